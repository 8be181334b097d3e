from __future__ import annotations

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from agent_tunix.algorithm.advantages import group_advantages, overlong_penalty, shuffle_within_groups

rewards = arrays(
    np.float32,
    st.sampled_from([(1, 2), (3, 4), (2, 6)]),
    elements=st.floats(-8, 8, width=16, allow_subnormal=False),
)


def advantages(rewards_PG) -> np.ndarray:
    return group_advantages(np.asarray(rewards_PG, np.float32))


@given(rewards)
def test_advantages_of_a_group_sum_to_zero(rewards_PG):
    np.testing.assert_allclose(advantages(rewards_PG).sum(axis=1), 0, atol=1e-3)


@given(rewards, st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_advantages(rewards_PG, random):
    order = list(range(rewards_PG.shape[1]))
    random.shuffle(order)
    np.testing.assert_allclose(advantages(rewards_PG[:, order]), advantages(rewards_PG)[:, order], rtol=1e-3, atol=1e-4)


@given(rewards)
def test_groups_do_not_touch_each_other(rewards_PG):
    alone = np.concatenate([advantages(row[None]) for row in rewards_PG])
    np.testing.assert_array_equal(advantages(rewards_PG), alone)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7, 1e6])
def test_a_group_of_equal_rewards_gets_exactly_zero(reward):
    assert (advantages(np.full((1, 7), reward)) == 0).all()


def test_known_values():
    got = advantages([[1.0, 0.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    want = [[0.75, -0.25, -0.25, -0.25], [-1.5, -0.5, 0.5, 1.5]] / (np.array([[0.5], [np.sqrt(5 / 3)]]) + 1e-4)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_better_reward_gets_a_greater_advantage():
    assert (np.diff(advantages([[0.0, 0.2, 0.5, 3.0]])) > 0).all()


def test_shuffling_stays_within_each_group_and_depends_on_the_key():
    advantages_PG = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    shuffled = shuffle_within_groups(jax.random.key(0), advantages_PG)
    np.testing.assert_array_equal(np.sort(shuffled, axis=1), advantages_PG)
    orders = {tuple((row - row.min()).astype(int).tolist()) for row in shuffled}
    assert len(orders) == 4, "each group has an order of its own"
    assert not np.array_equal(shuffled, shuffle_within_groups(jax.random.key(1), advantages_PG))


def test_the_baseline_of_leave_one_out_is_the_mean_of_the_others():
    rewards = np.float32([[1.0, 0.0, 0.0, 0.5], [2.0, 2.0, 2.0, 2.0]])
    found = group_advantages(rewards, "none", leave_one_out=True)
    np.testing.assert_allclose(found[0], [1 - 0.5 / 3, -0.5, -0.5, 0.5 - 1 / 3], rtol=1e-6)
    assert not found[1].any()


def test_rewards_are_scaled_by_group_by_batch_or_not_at_all():
    rewards = np.float32([[1.0, 0.0], [10.0, 0.0]])
    by_group, by_batch, plain = (group_advantages(rewards, scale) for scale in ("group", "batch", "none"))
    np.testing.assert_allclose(np.abs(by_group), np.sqrt(0.5), rtol=1e-3)
    np.testing.assert_array_equal(plain, [[0.5, -0.5], [5.0, -5.0]])
    np.testing.assert_allclose(by_batch, plain / (rewards.std(ddof=1) + 1e-4), rtol=1e-6)


def test_the_penalty_falls_over_the_last_tokens():
    np.testing.assert_allclose(overlong_penalty(np.array([1, 80, 90, 100]), 100, 20), [0, 0, -0.5, -1])


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_those_that_left_a_group_count_as_if_they_were_not_there(scale, leave_one_out):
    rewards_PG = np.float32([[1, 0, 5, 0], [2, 2, 2, 9]])
    kept_PG = np.array([[True, True, False, True], [True, True, False, True]])
    found_PG = group_advantages(rewards_PG, scale, leave_one_out, kept_PG)
    expected_PG = group_advantages(rewards_PG[kept_PG].reshape(2, 3), scale, leave_one_out)
    np.testing.assert_allclose(found_PG[kept_PG].reshape(2, 3), expected_PG, rtol=1e-6)
    assert not found_PG[~kept_PG].any()


def test_one_that_is_left_alone_has_none_to_be_compared_with():
    kept_PG = np.array([[True, False]])
    assert not group_advantages(np.float32([[1, 0]]), kept_PG=kept_PG).any()
