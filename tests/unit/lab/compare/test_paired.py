"""The paired test and its interval, against scipy's and against what is known of simulated runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test

from agent_tunix.lab.compare.paired import MCNEMAR, SIGNS, mcnemar, paired


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemars_test_is_the_sign_test_of_the_problems_that_differ(only_a, only_b):
    exact = binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    assert mcnemar(only_a, only_b) == pytest.approx(exact)


def test_several_completions_are_tested_by_flipping_signs():
    rng = np.random.default_rng(3)
    a, b = rng.binomial(4, 0.5, 12) / 4, rng.binomial(4, 0.7, 12) / 4
    found = paired(a, b)
    exact = permutation_test((b - a,), np.mean, permutation_type="samples", n_resamples=np.inf).pvalue
    assert found.test == SIGNS
    assert found.p == pytest.approx(exact, abs=0.01)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Problems of their own difficulty, which both runs share; B solves a problem with 0.1 more."""
    rng, hits, tries = np.random.default_rng(1), 0, 400
    for _ in range(tries):
        ease = rng.uniform(0, 0.9, 80)
        found = paired(rng.random(80) < ease, rng.random(80) < ease + 0.1)
        hits += found.low <= 0.1 <= found.high
    assert 0.93 <= hits / tries <= 0.98


def test_chance_alone_is_told_from_a_difference_as_seldom_as_it_says():
    rng = np.random.default_rng(2)
    ease = rng.uniform(0, 1, (400, 60))
    small = [paired(*(rng.random((2, 60)) < row)).p < 0.05 for row in ease]
    assert np.mean(small) <= 0.05


def test_runs_that_solve_the_same_problems_are_not_certain_to_be_equal():
    found = paired([1, 0, 1], [1, 0, 1])
    assert (found.difference, found.p, found.test) == (0, 1, MCNEMAR)
    assert found.low < 0 < found.high


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_it_is_the_same_the_other_way_round(pairs):
    a, b = zip(*pairs, strict=True)
    one, other = paired(a, b), paired(b, a)
    assert (one.p, one.n, one.only_a) == (other.p, other.n, other.only_b)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low))
