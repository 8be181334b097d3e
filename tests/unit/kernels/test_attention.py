"""The two ways are one function of positions. cuDNN is not here; what it is given is read by JAX's own attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels import attention, device
from agent_tunix.kernels.norm_rope import Placing

HEADS, KEYS, WIDTH = 4, 2, 8


@pytest.fixture
def by_cudnn(monkeypatch):
    """A switch: with it on, sequences are given to cuDNN, or what stands in for it."""
    plain = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **options):
        assert implementation == "cudnn"
        assert (q.shape[1] % 2, k.shape[1] % 2) == (0, 0), "cuDNN refuses odd lengths"
        return plain(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return lambda on: monkeypatch.setattr(attention, "cudnn_serves", lambda q: on)


def tokens(rng: np.random.Generator, rows: int, length: int, heads: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=(rows, length, heads, WIDTH)), jnp.float32)


def padded(length: int) -> jax.Array:
    """Positions of rows without padding, with it on the left, on the right, and on both sides."""
    at = jnp.arange(length)
    on_the_right, on_both = jnp.where(at < length - 2, at, -1), jnp.where(at < length - 1, at - 2, -1)
    return jnp.maximum(jnp.stack([at, at - 3, on_the_right, on_both]), -1)


@pytest.mark.parametrize(("length", "window"), [(10, 4), (9, 4), (9, 1), (6, 6), (5, 20), (1, 4)])
def test_both_ways_see_the_same_to_the_gradient(by_cudnn, length, window):
    """Local and global. Whatever padding itself reads is of no use, and no gradient comes from it."""
    rng = np.random.default_rng(0)
    positions_BT = padded(length)
    given = [tokens(rng, 4, length, heads) for heads in (HEADS, KEYS, KEYS)]
    weight = tokens(rng, 4, length, HEADS).reshape(4, length, -1) * (positions_BT >= 0)[..., None]

    def read_and_back(on: bool):
        by_cudnn(on)

        @jax.jit
        def run(is_global, *given):
            reach = attention.Reach(is_global, window)
            found, back = jax.vjp(lambda q, k, v: attention.attend(q, k, v, positions_BT, reach), *given)
            return found * (positions_BT >= 0)[..., None], *back(weight)

        return [run(jnp.asarray(is_global), *given) for is_global in (False, True)]

    assert_close(read_and_back(True), read_and_back(False))


def assert_close(ours, theirs) -> None:
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def group_reader(positions, lengths, reach):
    """Attention of groups as a function of queries, keys, values and the scales of norms, with RoPE of a few angles."""

    def read(q, k, v, q_norm, k_norm):
        turned = attention.cudnn_serves(q)
        places = attention.places_of_groups(positions, lengths, turned)
        angles = places[..., None, None] * jnp.geomspace(1.0, 0.01, q.shape[-1] // 2)
        placing = Placing(q_norm, k_norm, jnp.cos(angles), jnp.sin(angles), 1e-6, 0.5, 1.0)
        return attention.attend_groups(q, k, v, positions, lengths, placing, reach, turned)

    return read


def scales(rng: np.random.Generator, width: int) -> list[jax.Array]:
    return [jnp.asarray(rng.normal(size=width) / 4, jnp.float32) for _ in range(2)]


def test_both_ways_see_the_same_of_groups(by_cudnn):
    """Local and global; two prompts, one of them padded on its left, with three completions each, of several lengths.

    Gradients are those of queries, keys and values before they are placed, and of the scales of norms.
    """
    rng, lengths = np.random.default_rng(0), attention.Lengths(5, 3)
    own = jnp.where(jnp.arange(4) < jnp.asarray([[[4], [2], [3]], [[1], [4], [4]]]), jnp.arange(4), -9)
    prompts = jnp.stack([jnp.arange(5), jnp.maximum(jnp.arange(5) - 2, -1)])
    positions = jnp.maximum(jnp.concatenate([prompts, (prompts[:, -1:, None] + 1 + own).reshape(2, -1)], axis=1), -1)
    given = [*(tokens(rng, 2, 17, heads) for heads in (HEADS, KEYS, KEYS)), *scales(rng, WIDTH)]
    seen = (positions >= 0)[..., None]
    weight = tokens(rng, 2, 17, HEADS).reshape(2, 17, -1) * seen

    def read_and_back(on: bool):
        by_cudnn(on)

        @jax.jit
        def run(is_global, *given):
            found, back = jax.vjp(group_reader(positions, lengths, attention.Reach(is_global, 4)), *given)
            return found * seen, *back(weight)

        return [run(jnp.asarray(is_global), *given) for is_global in (False, True)]

    assert_close(read_and_back(True), read_and_back(False))


def test_only_layers_that_differ_are_told_apart(by_cudnn):
    """Within the window of a local layer it sees what a global one does, and no branch is compiled for it."""
    by_cudnn(True)
    q, k, v = (tokens(np.random.default_rng(0), 4, 8, heads) for heads in (HEADS, KEYS, KEYS))

    def read(window):
        return lambda is_global: attention.attend(q, k, v, padded(8), attention.Reach(is_global, window))

    for window, branches in ((7, True), (8, False)):
        assert ("cond[" in str(jax.make_jaxpr(read(window))(True))) is branches


@pytest.mark.skipif(device.capability() != device.HOPPER, reason="no Hopper GPU here that cuDNN attends on")
@pytest.mark.parametrize("is_global", [False, True], ids=["local", "global"])
def test_cudnn_itself_sees_the_same_to_the_gradient(is_global, monkeypatch):
    """Of groups after prompts of two lengths, past the window; to the precision of bfloat16."""
    rng, lengths, reach = np.random.default_rng(0), attention.Lengths(70, 3), attention.Reach(jnp.asarray(is_global), 64)
    prompts = jnp.maximum(jnp.arange(70) - jnp.asarray([[0], [9]]), -1)
    own = (prompts[:, -1:, None] + 1 + jnp.arange(50)).repeat(3, axis=1).reshape(2, -1)
    positions = jnp.concatenate([prompts, own], axis=1)
    given = [jnp.asarray(rng.normal(size=(2, 220, heads, 256)), jnp.bfloat16) / 4 for heads in (4, 1, 1)]
    given += scales(rng, 256)
    seen = (positions >= 0)[..., None]
    weight = jnp.asarray(rng.normal(size=(2, 220, 1024)), jnp.bfloat16) * seen

    def read_and_back():
        found, back = jax.vjp(group_reader(positions, lengths, reach), *given)
        return [np.asarray(x, np.float32) for x in (found * seen, *back(weight))]

    assert attention.cudnn_serves(given[0])
    ours = read_and_back()
    monkeypatch.setattr(attention, "cudnn_serves", lambda q: False)
    for got, want in zip(ours, read_and_back(), strict=True):
        assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("length", "width", "served"), [(7, 256, True), (7, 128, True), (7, 96, False), (7, 320, False), (1, 256, False)]
)
def test_cudnn_is_asked_for_heads_that_it_takes_and_for_more_than_a_token(monkeypatch, length, width, served):
    monkeypatch.setattr(device, "capability", lambda: device.HOPPER)
    q_BTHN = jax.ShapeDtypeStruct((2, length, HEADS, width), jnp.bfloat16)
    assert attention.cudnn_serves(q_BTHN) is served
