from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.engine.batch import SMALLEST_BUCKET, bucket, groups_to_learn, merged, padded, trim
from agent_tunix.types import Batch, Prompts, Rollouts


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
    trimmed = trim(rollouts, mask_BC.sum(axis=1))
    np.testing.assert_array_equal(trimmed.tokens_BC, tokens_BC[:, :32])
    np.testing.assert_array_equal(trimmed.mask_BC, mask_BC[:, :32])
    np.testing.assert_array_equal(trimmed.logprobs_BC, -1.0 * mask_BC[:, :32])
    assert trimmed.ended_B is ended_B


@given(
    st.integers(1, 6).flatmap(lambda P: st.lists(st.lists(st.booleans(), min_size=P, max_size=P), min_size=1, max_size=4))
)
def test_groups_without_a_spread_give_way_to_later_ones_that_have_it(draws):
    found, spread = groups_to_learn([np.array(draw) for draw in draws]), np.concatenate(draws)
    P = len(draws[0])
    assert len(set(found)) == len(found) == P
    assert all(found[p] == p for p in range(P) if draws[0][p]), "what can be learnt stays in its place"
    assert spread[found].sum() == min(P, spread.sum())
    assert all(spread[group] for group in found if group >= P), "a group is only replaced by a better one"


def test_a_batch_is_merged_from_groups_of_draws_of_several_widths():
    def draw(first: int, width: int) -> Batch:
        tokens = jnp.arange(first, first + 4)[:, None] + jnp.zeros((4, width), jnp.int32)
        prompts = Prompts(tokens[::2, :1], tokens[::2, :1])
        return Batch(prompts, tokens, tokens > 0, tokens > 0, tokens * 1.0)

    batch = merged((padded(draw(10, 3), 5), draw(20, 5)), np.array([3, 0]))
    assert batch.tokens_BC[:, 0].tolist() == [22, 23, 10, 11]
    assert batch.prompts.tokens_PS[:, 0].tolist() == [22, 10]
    assert batch.mask_BC.sum(axis=1).tolist() == [5, 5, 3, 3]
    assert batch.advantages_B is batch.weights_BC is None
