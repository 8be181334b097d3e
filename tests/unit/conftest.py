"""A Gemma 3 small enough to be read, compiled and differentiated in a second, and batches for it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, Adapters, init_adapters
from agent_tunix.models.weights import init_weights
from agent_tunix.tasks.datasets import left_pad
from agent_tunix.types import Prompts

settings.register_profile("unit", deadline=None, max_examples=50, derandomize=True, database=None)
settings.load_profile("unit")


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
    """Random weights; the norms too, which start at zero otherwise."""
    plain = init_weights(jax.random.key(0), arch)
    keys = iter(jax.random.split(jax.random.key(1), 7))
    layers = {
        field.name: (
            0.3 * jax.random.normal(next(keys), getattr(plain.layers, field.name).shape)
            if "norm" in field.name
            else getattr(plain.layers, field.name)
        )
        for field in dataclasses.fields(plain.layers)
    }
    final_norm_D = 0.3 * jax.random.normal(next(keys), plain.final_norm_D.shape)
    return Weights(plain.embed_VD, type(plain.layers)(**layers), final_norm_D)


@pytest.fixture(scope="session")
def fresh_adapters(arch) -> Adapters:
    return init_adapters(jax.random.key(2), arch, ATTENTION + FEED_FORWARD, rank=3, alpha=6.0)


@pytest.fixture(scope="session")
def adapters(fresh_adapters) -> Adapters:
    """Adapters that have learnt something: B is not zero."""
    keys = iter(jax.random.split(jax.random.key(3), len(fresh_adapters.b)))
    b = {name: 0.2 * jax.random.normal(next(keys), value.shape) for name, value in fresh_adapters.b.items()}
    return Adapters(fresh_adapters.a, b, fresh_adapters.scale)


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    """Three prompts of 7, 3 and 5 tokens."""
    rng = np.random.default_rng(0)
    return as_arrays(left_pad([rng.integers(3, 40, n).tolist() for n in (7, 3, 5)], 8, 0))


def as_arrays(prompts: Prompts) -> Prompts:
    return jax.tree.map(jnp.asarray, prompts)
