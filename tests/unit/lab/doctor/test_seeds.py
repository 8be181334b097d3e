"""Several seeds of one candidate: how sure their mean is, and the difference between two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.doctor.seeds import T, gained, over_seeds, paired_difference


def seeds(*shares: float, n: int = 200) -> list[Accuracy]:
    return [Accuracy(40, share, n) for share in shares]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=10))
def test_an_interval_holds_its_mean_and_is_never_narrower_than_binomial_noise(rights):
    found = over_seeds(seeds(*(right / 200 for right in rights)))
    low, high = Accuracy(40, sum(rights) / 200 / len(rights), 200).interval
    assert 0 <= found.low <= low + 1e-12
    assert low <= found.middle + 1e-12
    assert found.middle <= high + 1e-12
    assert high - 1e-12 <= found.high <= 1


def test_the_interval_covers_the_mean_of_seeds_that_differ():
    """Seeds whose own success rates scatter by 5 points: binomial noise alone would be far too sure."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        rates = np.clip(rng.normal(0.6, 0.05, size=4), 0, 1)
        interval = over_seeds(seeds(*(rng.binomial(1000, rate) / 1000 for rate in rates), n=1000))
        covered += interval.low <= 0.6 <= interval.high
    assert covered / 500 > 0.93


def test_the_interval_covers_what_the_model_can_where_all_seeds_are_asked_the_same_problems():
    """Problems are easy or hard for every seed alike: few of them say little, however many seeds answer."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(500):
        easy = rng.random(100) < 0.6
        answered = (rng.random((5, 100)) < 0.05) ^ easy
        interval = over_seeds(seeds(*answered.mean(axis=1), n=100))
        covered += interval.low <= 0.6 * 0.95 + 0.4 * 0.05 <= interval.high
    assert covered / 500 > 0.93


def test_a_difference_is_taken_seed_by_seed():
    first, second = seeds(0.30, 0.60, 0.90), seeds(0.40, 0.70, 0.99)
    assert paired_difference(first, second).low > 0, "seeds scatter, and the difference does not"
    assert paired_difference(second, first).middle == pytest.approx(-paired_difference(first, second).middle)
    assert paired_difference(first, first).low < 0 < paired_difference(first, first).high


@given(st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0.1, 0.9)), min_size=2, max_size=10))
def test_where_binomial_noise_is_nothing_it_is_the_paired_t_interval(pairs):
    ones, others = np.transpose(pairs)
    assume(np.ptp(others - ones) > 1e-3)
    found = paired_difference(seeds(*ones, n=10**12), seeds(*others, n=10**12))
    low, high = stats.ttest_rel(others, ones).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("count", [11, 40])
def test_of_more_seeds_than_are_tabulated_the_interval_is_a_little_too_wide(count):
    shares = np.linspace(0.2, 0.8, count)
    found, exact = over_seeds(seeds(*shares, n=10**9)), stats.t.interval(0.95, count - 1, 0.5, stats.sem(shares))
    assert found.middle == pytest.approx(0.5)
    assert 1 <= (found.high - found.low) / (exact[1] - exact[0]) < 1.2
    assert list(T) == pytest.approx(stats.t.ppf(0.975, range(1, 10)), rel=1e-3)


@pytest.mark.parametrize(
    ("ends", "more"),
    [([0.4, 0.4], False), ([0.9, 0.4], False), ([0.2, 0.2], False), ([0.9, 0.88], True), ([0.98, 0.7], True)],
)
def test_what_one_seed_gained_and_the_other_did_not_may_be_noise(ends, more):
    """What both gained is not, however far apart they end."""
    assert gained([Accuracy(0, 0.4, 200)] * 2, [Accuracy(40, end, 200) for end in ends]) is more


def test_a_start_that_is_not_known_takes_no_gain_away():
    assert gained([], [Accuracy(40, 0.4, 200)])
