"""A Gemma 3 small enough to be read, compiled and differentiated in a second, and batches for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from agent_tunix.models import lora
from agent_tunix.models.architecture import Architecture, Segment, Weights
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, Adapters, module_shape
from agent_tunix.models.published import of_repository
from agent_tunix.types import Prompts

GROUP = 3
settings.register_profile("unit", deadline=None, max_examples=50, derandomize=True, database=None)
settings.load_profile("unit")


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


@pytest.fixture(scope="session")
def lowered_for_gpu():
    """What JAX would give a GPU to compile, as text; a kernel that asks for what Triton does not know is refused."""

    def lowered(function, *shapes) -> str:
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("all",), abstract_device=device)):
            return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    return lowered


@pytest.fixture(scope="session")
def arch() -> Architecture:
    """Four layers, local and global in turn; the window is shorter than the sequences of the tests."""
    return Architecture(
        vocab_size=40,
        num_layers=4,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_dim=32,
        sliding_window=4,
        global_every=2,
        query_scale=8**-0.5,
        rope_local_base=100.0,
        rope_global_base=1000.0,
        rope_global_factor=2.0,
        norm_eps=1e-6,
    )


@pytest.fixture(scope="session")
def weights(arch) -> Weights:
    """Random weights, the norms too."""
    rng, L, D = np.random.default_rng(200), arch.num_layers, arch.embed_dim
    norms = family_of(arch).norms
    drawn = ("input_norm", "q_norm", "k_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    layers = {norm: normal(rng, L, getattr(arch, norms[norm][1]), scale=0.3) for norm in drawn}
    for module in ATTENTION + FEED_FORWARD:
        fan_in, fan_out = module_shape(arch, module)
        layers[module] = normal(rng, L, fan_in, fan_out, scale=fan_in**-0.5)
    return Weights(normal(rng, arch.vocab_size, D, scale=D**-0.5), layers, normal(rng, D, scale=0.3))


@pytest.fixture(scope="session")
def adapters(arch) -> Adapters:
    """Adapters of rank 3 on all modules that have learnt something: B is not zero."""
    rng, L = np.random.default_rng(1), arch.num_layers
    shapes = {module: module_shape(arch, module) for module in ATTENTION + FEED_FORWARD}
    a = {module: normal(rng, L, fan_in, 3, scale=fan_in**-0.5) for module, (fan_in, _) in shapes.items()}
    b = {module: normal(rng, L, 3, fan_out, scale=0.2) for module, (_, fan_out) in shapes.items()}
    return Adapters(a, b, 2.0)


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Three prompts of 7, 3 and 5 tokens, padded to 8."""
    lengths, S = np.array([[7], [3], [5]]), 8
    positions = np.maximum(np.arange(S) - (S - lengths), -1)
    tokens = np.where(positions >= 0, np.random.default_rng(2).integers(3, 40, (3, S)), 0)
    return Prompts(jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))


@pytest.fixture(scope="session")
def shipped():
    """The architecture of a Gemma 3, by its size."""
    return lambda size: of_repository(f"google/gemma-3-{size}-it")


@pytest.fixture(scope="session")
def reading_for_gpu(lowered_for_gpu):
    """The program that reads a token by a way, of so many policies with two prompts each, as text."""

    def lowered(way, arch: Architecture, policies: int) -> str:
        prompts, shape = 2 * policies, jax.ShapeDtypeStruct
        weights = jax.eval_shape(lambda: init_weights(jax.random.key(0), arch, jnp.bfloat16))
        modules = lora.select_modules("_proj", arch.num_layers)
        own = [jax.eval_shape(lambda: lora.init_adapters(jax.random.key(0), arch, modules, 32, 32.0))] * policies
        kv = shape((arch.num_layers, prompts, 100, arch.num_kv_heads, arch.head_dim), jnp.bfloat16)
        prompt = Segment(kv, kv, shape((prompts, 100), jnp.int32))

        def read_one(weights, own, prompt, tokens_B):
            cache, read, *_ = way(weights, lora.stack(own), arch, prompt, GROUP, 70)
            return read(cache, tokens_B, 5, None)

        return lowered_for_gpu(read_one, weights, own, prompt, shape((prompts * GROUP,), jnp.int32))

    return lowered
