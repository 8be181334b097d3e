from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from agent_tunix.algorithm.schedules import warmup_cosine, warmup_steps_from_ratio

LONGEST = 3000


@st.composite
def plans(draw):
    """(peak, warmup_steps, total_steps, lr_min) with room for at least one update after warm-up."""
    total = draw(st.integers(1, LONGEST))
    peak = draw(st.floats(1e-7, 1.0))
    lr_min = draw(st.just(0.0) | st.floats(1e-9, 1)) * peak
    return peak, draw(st.integers(0, total - 1)), total, lr_min


def rates(peak, warmup_steps, total_steps, lr_min) -> np.ndarray:
    """The rates of all updates of a run."""
    schedule = warmup_cosine(peak, warmup_steps, total_steps, lr_min)
    return np.array([schedule(t) for t in range(1, total_steps + 1)])


@given(plans())
def test_every_rate_lies_between_zero_and_the_peak(plan):
    got = rates(*plan)
    assert got.max() <= plan[0]
    assert got.min() >= 0


def test_rounding_does_not_lift_the_rate_above_the_peak():
    """Of 3000 random runs one in a thousand passed its peak by the last bit, just after a short warm-up."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        peak, total = 10 ** rng.uniform(-7, 0), int(rng.integers(1, LONGEST + 1))
        assert rates(peak, int(rng.integers(total)), total, peak * rng.uniform()).max() <= peak


@given(plans())
def test_the_first_update_moves_warmup_ends_at_the_peak_and_the_last_is_at_lr_min(plan):
    peak, warmup, total, lr_min = plan
    got = rates(*plan)
    assert got[0] > 0 or total == 1
    assert got[-1] == pytest.approx(lr_min, rel=1e-12)
    if warmup:
        assert got[warmup - 1] == peak
        assert (np.diff(got[:warmup]) > 0).all()
    assert (np.diff(got[warmup:]) <= peak * 1e-12).all()


@given(plans())
def test_the_formulas_of_the_reference(plan):
    peak, warmup, total, lr_min = plan
    t = np.arange(1, total + 1, dtype=np.float64)
    progress = np.clip((t - warmup) / (total - warmup), 0, 1)
    want = np.where(t <= warmup, peak * t / max(warmup, 1), lr_min + 0.5 * (peak - lr_min) * (1 + np.cos(np.pi * progress)))
    np.testing.assert_allclose(rates(*plan), want, rtol=1e-9, atol=1e-12 * peak)


def test_a_horizon_that_is_all_warmup_may_be_passed():
    assert [warmup_cosine(1.0, 2, 2, 0.1)(t) for t in (1, 2, 3, 4)] == [0.5, 1.0, 0.1, 0.1]


def test_the_rate_stays_at_lr_min_after_the_horizon():
    schedule = warmup_cosine(1e-3, 2, 10, 1e-5)
    assert [schedule(t) for t in (10, 11, 500)] == [1e-5] * 3


@pytest.mark.parametrize(
    ("ratio", "total", "steps"),
    [(0.1, 60, 6), (0.1, 100, 10), (0.1, 61, 7), (0.0, 60, 0), (1.0, 60, 60), (0.2, 1, 1), (0.07, 100, 7), (0.29, 100, 29)],
)
def test_warmup_ratio_is_a_share_of_the_run_rounded_up(ratio, total, steps):
    assert warmup_steps_from_ratio(ratio, total) == steps


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_warmup_from_a_ratio_fits_the_run(total, ratio):
    assert 0 <= warmup_steps_from_ratio(ratio, total) <= total
