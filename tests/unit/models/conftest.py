"""Models as they are shipped, and what a GPU would be given to read a token of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.models import gemma3, lora
from agent_tunix.models.gemma3 import Architecture
from agent_tunix.models.weights import init_weights
from agent_tunix.workflows import setup

GROUP = 3


@pytest.fixture(scope="session")
def shipped():
    """The architecture of a model, by its size."""

    def architecture(size: str, *overrides: str) -> Architecture:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return setup.architecture(validate(compose("config", [f"model=gemma3_{size}", *overrides]), Config).model)

    return architecture


@pytest.fixture(scope="session")
def reading_for_gpu(lowered_for_gpu):
    """The program that reads a token by a way, of so many policies with two prompts each, as text."""

    def lowered(way, arch: Architecture, policies: int) -> str:
        prompts, shape = 2 * policies, jax.ShapeDtypeStruct
        weights = jax.eval_shape(lambda: init_weights(jax.random.key(0), arch, jnp.bfloat16))
        modules = lora.select_modules("_proj", arch.num_layers)
        own = [jax.eval_shape(lambda: lora.init_adapters(jax.random.key(0), arch, modules, 32, 32.0))] * policies
        kv = shape((arch.num_layers, prompts, 100, arch.num_kv_heads, arch.head_dim), jnp.bfloat16)
        prompt = gemma3.Segment(kv, kv, shape((prompts, 100), jnp.int32))

        def read_one(weights, own, prompt, tokens_B):
            cache, read = way(weights, lora.stack(own), arch, prompt, GROUP, 70)
            return read(cache, tokens_B, 5, None)

        return lowered_for_gpu(read_one, weights, own, prompt, shape((prompts * GROUP,), jnp.int32))

    return lowered
