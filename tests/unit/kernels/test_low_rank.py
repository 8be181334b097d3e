from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels.low_rank import adapted, adding_pays, low_rank


def arrays(members, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, a, b, dy = (jnp.asarray(rng.normal(size=(*members, *s)), jnp.float32) for s in ((7, 6), (6, 3), (3, 5), (7, 5)))
    return x.astype(dtype), a, b, dy


@pytest.mark.parametrize("members", [(), (4,)], ids=["one adapter", "several stacked"])
def test_value_and_gradients_are_those_of_automatic_differentiation(members):
    *given, dy = arrays(members)

    def plain(x, a, b):
        return (x @ a @ b * dy).sum()

    def ours(x, a, b):
        return (low_rank(x, a, b) * dy).sum()

    want, got = (jax.value_and_grad(f, (0, 1, 2))(*given) for f in (plain, ours))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


def test_gradients_of_the_adapter_keep_its_precision_whatever_that_of_the_rows():
    x, a, b, dy = arrays((), jnp.bfloat16)
    y, pull = jax.vjp(low_rank, x, a, b)
    dx, da, db = pull(dy.astype(y.dtype))
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert (da.dtype, db.dtype) == (jnp.float32, jnp.float32)
    assert (db != db.astype(jnp.bfloat16).astype(jnp.float32)).any()


@pytest.mark.parametrize("members", [(), (2,)], ids=["one adapter", "several stacked"])
@pytest.mark.parametrize("rows", [2, 40], ids=["apart", "added to the matrix"])
@pytest.mark.parametrize("factors", [False, True], ids=["LoRA", "DoRA"])
def test_an_adapted_matrix_has_the_value_and_gradients_of_automatic_differentiation(members, rows, factors):
    rng = np.random.default_rng(1)
    shapes = ((*members, rows, 6), (6, 5), (*members, 6, 3), (*members, 3, 5), (*members, rows, 5), (*members, 5))
    x, w, a, b, dy, factor = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    assert adding_pays(rows, w) == (rows == 40)

    def plain(x, w, a, b, factor):
        return ((x @ w + x @ a @ b) * (factor[..., None, :] if factors else 1) * dy).sum()

    def ours(x, w, a, b, factor):
        return (adapted(x, w, a, b, *([factor] if factors else [])) * dy).sum()

    want, got = (jax.value_and_grad(f, (0, 1, 2, 3, 4))(x, w, a, b, factor) for f in (plain, ours))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), got, want)


def test_a_matrix_in_bfloat16_is_never_added_to():
    assert adding_pays(1000, jnp.zeros((4, 4)))
    assert not adding_pays(1000, jnp.zeros((4, 4), jnp.bfloat16))
