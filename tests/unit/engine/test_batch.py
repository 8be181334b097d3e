from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.engine.batch import SMALLEST_BUCKET, bucket, trim
from agent_tunix.types import Rollouts


@given(st.integers(1, 600).flatmap(lambda longest: st.tuples(st.integers(0, longest), st.just(longest))))
def test_a_bucket_holds_what_is_put_into_it_and_is_one_of_three(lengths):
    length, longest = lengths
    found = bucket(length, longest)
    assert length <= found
    assert found in (longest, longest // 2, longest // 4)
    assert found >= min(longest, SMALLEST_BUCKET)


@pytest.mark.parametrize(
    ("length", "longest", "width"), [(128, 512, 128), (129, 512, 256), (257, 512, 512), (1, 16, 8), (9, 16, 16), (2, 7, 7)]
)
def test_the_smallest_bucket_that_holds_it_is_taken(length, longest, width):
    assert bucket(length, longest) == width


def test_completions_are_cut_where_all_have_ended_and_no_token_is_lost():
    mask_BC = np.arange(64) < np.array([[5], [17], [3]])
    tokens_BC = np.where(mask_BC, 7, 0)
    ended_B = jnp.array([True, False, True])
    rollouts = Rollouts(jnp.asarray(tokens_BC), jnp.asarray(mask_BC), jnp.asarray(-1.0 * mask_BC), ended_B)
    trimmed, lengths_B = trim(rollouts)
    assert lengths_B.tolist() == [5, 17, 3]
    np.testing.assert_array_equal(trimmed.tokens_BC, tokens_BC[:, :32])
    np.testing.assert_array_equal(trimmed.mask_BC, mask_BC[:, :32])
    np.testing.assert_array_equal(trimmed.logprobs_BC, -1.0 * mask_BC[:, :32])
    assert trimmed.ended_B is ended_B
