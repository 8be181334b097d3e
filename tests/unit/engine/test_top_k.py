from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.engine.top_k import SMALLEST_ROW, narrow, top_k

narrow = jax.jit(narrow, static_argnames="k")


def assert_as_sorted(values_BV, k):
    got, want = narrow(values_BV, k), jax.lax.top_k(values_BV, k)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("k", [1, 50, 128])
@pytest.mark.parametrize("width", [40_960, 33_001])
def test_narrowing_finds_what_sorting_finds(k, width):
    """Also where the width is no multiple of the blocks."""
    assert_as_sorted(jax.random.normal(jax.random.key(k), (3, width)), k)


@pytest.mark.parametrize("values", [2, 40])
def test_of_equal_values_the_lower_index_comes_first(values):
    """With two or forty different values in a row, the k-th and thousands more are equal."""
    rows = jax.random.randint(jax.random.key(0), (3, 40_960), 0, values).astype(jnp.float32)
    assert_as_sorted(rows, 50)


def test_the_greatest_may_all_lie_in_one_block_or_be_barred():
    values = np.full((2, 40_960), -np.inf, np.float32)
    values[0, 512:562] = np.arange(50)
    values[1, ::1000] = 1.0  # 41 finite values: the rest of the top 50 is minus infinity
    assert_as_sorted(jnp.asarray(values), 50)


@pytest.mark.parametrize(("width", "k"), [(SMALLEST_ROW - 1, 50), (SMALLEST_ROW, 50), (SMALLEST_ROW, 200)])
def test_the_way_that_is_chosen_makes_no_difference(width, k):
    values_BV = jax.random.normal(jax.random.key(1), (2, width))
    for ours, theirs in zip(jax.jit(top_k, static_argnames="k")(values_BV, k), jax.lax.top_k(values_BV, k), strict=True):
        np.testing.assert_array_equal(ours, theirs)
