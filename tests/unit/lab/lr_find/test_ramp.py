"""What is read from a ramp, on made-up ones whose answer is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.algorithm.schedules import ramp as rising
from agent_tunix.lab.lr_find import ramp

FULL_UPDATES = 20.0


def made_up(steps=40, low=1e-7, high=1e-3, *, seed=0, noise=0.05, gain=0.5, way=5e-5, limit=6e-5):
    """Reward rises with the way travelled and is lost beyond a limit of the rate; KL goes with the square of the way."""
    rates = [rising(low, high, steps)(t) for t in range(1, steps + 1)]
    far = np.concatenate([[0.0], np.cumsum(rates)[:-1]])
    fast = np.concatenate([[low], rates[:-1]])
    reward = 0.6 + gain * (1 - np.exp(-far / way)) - 1.0 * np.clip(np.log(fast / limit), 0, 1)
    rng = np.random.default_rng(seed)
    return rates, list(reward + noise * rng.normal(size=steps)), list((far / way) ** 2 / 100)


@given(seed=st.integers(0, 2**16), steps=st.integers(20, 120))
def test_the_suggestion_lies_between_too_slow_and_too_fast(seed, steps):
    found = ramp.read(*made_up(steps, seed=seed), steps, FULL_UPDATES)
    slow, fast = 5e-5 / FULL_UPDATES / 4, 6e-5
    assert slow < found.suggested < fast
    assert found.range[0] < found.suggested < found.range[1] < fast
    assert "fell beyond" in found.conclusion


@given(seed=st.integers(0, 2**16), factor=st.sampled_from([1e-2, 0.1, 10.0, 100.0]))
def test_only_ratios_of_rates_and_of_kl_count(seed, factor):
    rates, rewards, kls = made_up(seed=seed)
    plain = ramp.read(rates, rewards, kls, 40, FULL_UPDATES)
    assert ramp.read(rates, [reward + 7.0 for reward in rewards], kls, 40, FULL_UPDATES).suggested == plain.suggested
    dearer = ramp.read(rates, rewards, [max(kl, 1e-4) for kl in kls], 40, FULL_UPDATES)
    again = ramp.read(rates, rewards, [100 * max(kl, 1e-4) for kl in kls], 40, FULL_UPDATES)
    assert again.suggested == dearer.suggested
    moved = ramp.read([factor * rate for rate in rates], rewards, kls, 40, FULL_UPDATES)
    assert moved.suggested == pytest.approx(factor * plain.suggested, rel=1e-9)


def test_the_length_of_the_ramp_hardly_matters():
    found = [ramp.read(*made_up(steps, noise=0.01), steps, FULL_UPDATES).suggested for steps in (20, 40, 80, 160)]
    assert max(found) / min(found) < 3


def test_a_longer_run_can_go_slower_and_there_is_an_end_to_it():
    readings = [ramp.read(*made_up(), 40, updates) for updates in (5, 20, 80, 1000, 5000)]
    for found in ([reading.suggested for reading in readings], [reading.range[1] for reading in readings]):
        assert found == sorted(found, reverse=True)
        assert found[0] > found[2]
        assert found[3] == found[4]


def test_noise_is_not_taken_for_a_gain():
    readings = [ramp.read(*made_up(seed=seed, gain=0.0, limit=1.0), 40, FULL_UPDATES) for seed in range(200)]
    assert sum(reading.suggested is not None for reading in readings) <= 20
    silent = next(reading for reading in readings if reading.suggested is None)
    assert "raised the reward beyond noise" in silent.conclusion
    assert silent.range is None
    assert set(silent.score) == {0.0}


def test_noise_does_not_end_a_ramp():
    ended = 0
    for seed in range(100):
        _, rewards, _ = made_up(seed=seed, gain=0.0, limit=1.0)
        ended += any(found.fell for step in range(1, 41) if (found := ramp.curve(rewards[:step], 40)))
    assert ended <= 5


def test_a_collapse_ends_a_ramp():
    for seed in range(20):
        _, rewards, _ = made_up(seed=seed)
        assert ramp.curve(rewards, 40).fell


def test_a_reward_that_only_falls_suggests_nothing():
    reading = ramp.read(*made_up(gain=0.0), 40, FULL_UPDATES)
    assert reading.suggested is None
    assert "it fell: there is nothing to learn from this reward" in reading.conclusion
    assert reading.beyond is None


def test_a_ramp_that_began_too_high_is_said_to():
    """By the KL that its first steps have spent; one that broke off at once began too high too, unless by Ctrl-C."""
    rates, rewards, kls = made_up(gain=0.0)
    reading = ramp.read(rates, rewards, [max(kl, 0.05) for kl in kls], 40, FULL_UPDATES)
    assert "the ramp began too high" in reading.conclusion
    assert reading.beyond == "below"
    assert ramp.read(rates[:2], rewards[:2], kls[:2], 40, FULL_UPDATES).beyond == "below"
    assert ramp.read(rates[:2], rewards[:2], kls[:2], 40, FULL_UPDATES, cut_short=True).beyond is None


def test_a_reward_that_still_rises_at_the_end_is_said_to():
    reading = ramp.read(*made_up(high=3e-5, noise=0.001), 40, FULL_UPDATES)
    assert "still rising at the end of the ramp" in reading.conclusion
    assert reading.beyond == "above"


def test_a_run_too_short_to_get_there_is_told_so():
    rates, rewards, kls = made_up()
    reading = ramp.read(rates, rewards, kls, 40, 0.1)
    assert "too short" in reading.conclusion
    assert reading.range[0] == reading.range[1]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_ramp_that_broke_off_is_not_judged(steps):
    rates, rewards, kls = (values[:steps] for values in made_up())
    assert ramp.curve(rewards, 40) is None
    reading = ramp.read(rates, rewards, kls, 40, FULL_UPDATES)
    assert reading.suggested is None
    assert f"after {steps} steps" in reading.conclusion
    json.dumps(reading.score, allow_nan=False)


def test_a_constant_reward_is_no_signal():
    reading = ramp.read([1e-6] * 40, [0.0] * 40, [0.0] * 40, 40, FULL_UPDATES)
    assert reading.suggested is None
    assert all(math.isfinite(score) for score in reading.score)


def test_a_mean_stays_within_its_values_and_keeps_a_constant():
    assert ramp.smoothed([2.0] * 9, 5) == [2.0] * 9
    assert ramp.smoothed([0.0, 3.0, 0.0, 0.0], 3) == [1.5, 1.0, 1.0, 0.0]
