"""The two ways are one function of positions. cuDNN is not here; what it is given is read by JAX's own attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.models import attention, kernels

GROUP, HEADS, KEYS, WIDTH = 3, 4, 2, 8


@pytest.fixture
def by_cudnn(monkeypatch):
    plain = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        assert (q.shape[1] % 2, k.shape[1] % 2) == (0, 0), "cuDNN refuses odd lengths"
        return plain(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return attention._by_cudnn


def tokens(rng: np.random.Generator, rows: int, length: int, heads: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=(rows, length, heads, WIDTH)), jnp.float32)


@pytest.mark.parametrize("window", [4, 2**30], ids=["local", "global"])
@pytest.mark.parametrize(("prompt", "own"), [(6, 4), (5, 4), (6, 3), (5, 3)])
def test_both_ways_see_the_same_to_the_gradient(by_cudnn, prompt, own, window):
    """Two prompts, one of them padded on its left, and completions of three tokens or fewer after them."""
    rng = np.random.default_rng(0)
    q, k, v = (tokens(rng, 2 * GROUP, own, heads) for heads in (HEADS, KEYS, KEYS))
    prompt_k, prompt_v = (tokens(rng, 2, prompt, KEYS) for _ in range(2))
    prompt_at = jnp.stack([jnp.arange(prompt), jnp.maximum(jnp.arange(prompt) - 2, -1)])
    at = jnp.repeat(prompt_at[:, -1:] + 1, GROUP, axis=0) + jnp.arange(own)

    def read(way, q, k, v, prompt_k, prompt_v):
        return way(q, at, [(prompt_k, prompt_v, prompt_at), (k, v, at)], window)

    @partial(jax.jit, static_argnums=0)
    def read_and_back(way, weight, *given):
        found, back = jax.vjp(partial(read, way), *given)
        return found, *back(weight)

    given = tokens(rng, 2 * GROUP, own, HEADS), q, k, v, prompt_k, prompt_v
    for ours, theirs in zip(read_and_back(by_cudnn, *given), read_and_back(attention._by_scores, *given), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(("width", "served"), [(256, True), (96, True), (100, False), (320, False)])
def test_cudnn_is_asked_for_heads_that_it_takes(monkeypatch, width, served):
    monkeypatch.setattr(kernels, "capability", lambda: kernels.HOPPER)
    q_BTHN = jax.ShapeDtypeStruct((2, 7, HEADS, width), jnp.bfloat16)
    assert attention._cudnn_serves(q_BTHN) is served
