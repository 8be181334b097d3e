from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from agent_tunix.algorithm.schedules import (
    SCHEDULES,
    constant,
    cosine_restarts,
    inverse_sqrt,
    linear,
    ramp,
    warmup_cosine,
    warmup_steps_from_ratio,
    wsd,
)

LONGEST = 3000


@st.composite
def plans(draw):
    """(peak, warmup_steps, total_steps, lr_min) with room for at least one update after warm-up."""
    total = draw(st.integers(1, LONGEST))
    peak = draw(st.floats(1e-7, 1.0))
    lr_min = draw(st.just(0.0) | st.floats(1e-9, 1)) * peak
    return peak, draw(st.integers(0, total - 1)), total, lr_min


EXTRAS = {"wsd": {"decay_ratio": st.floats(0.01, 1)}, "cosine_restarts": {"num_cycles": st.integers(1, 7)}}
DECAYING = [name for name in SCHEDULES if name != "constant"]


@st.composite
def any_schedule(draw, names=tuple(SCHEDULES)):
    """A schedule of any shape, with the run that it was made for."""
    name, (peak, warmup, total, lr_min) = draw(st.sampled_from(names)), draw(plans())
    keys = {"lr_min": lr_min} if name in DECAYING else {}
    keys |= {key: draw(values) for key, values in EXTRAS.get(name, {}).items()}
    return SCHEDULES[name](peak, warmup, total, **keys), (peak, warmup, total, lr_min)


def over_the_run(schedule, total_steps: int) -> np.ndarray:
    """The rates of all updates of a run."""
    return np.array([schedule(t) for t in range(1, total_steps + 1)])


def rates(peak, warmup_steps, total_steps, lr_min) -> np.ndarray:
    return over_the_run(warmup_cosine(peak, warmup_steps, total_steps, lr_min), total_steps)


@given(any_schedule())
def test_every_rate_lies_between_zero_and_the_peak(drawn):
    schedule, (peak, _, total, _) = drawn
    got = over_the_run(schedule, total + 10)
    assert got.max() <= peak
    assert got.min() >= 0


@given(any_schedule())
def test_warmup_is_the_references_in_all_of_them(drawn):
    schedule, (peak, warmup, _, _) = drawn
    np.testing.assert_array_equal(over_the_run(schedule, warmup), [peak * (t / warmup) for t in range(1, warmup + 1)])


@given(any_schedule(DECAYING))
def test_what_decays_ends_exactly_at_lr_min_and_stays_there(drawn):
    schedule, (_, _, total, lr_min) = drawn
    assert [schedule(t) for t in (total, total + 1, 10 * total)] == [lr_min] * 3


@given(any_schedule([name for name in SCHEDULES if name != "cosine_restarts"]))
def test_only_restarts_raise_the_rate_after_warmup(drawn):
    schedule, (peak, warmup, total, _) = drawn
    assert (np.diff(over_the_run(schedule, total)[warmup:]) <= peak * 1e-12).all()


@given(plans())
def test_constant_stays_at_the_peak_whatever_the_length_of_the_run(plan):
    peak, warmup, total, _ = plan
    assert {constant(peak, warmup, total)(t) for t in (warmup + 1, total, 10 * total)} == {peak}


@given(plans())
def test_linear_is_transformers_formula_above_lr_min(plan):
    peak, warmup, total, lr_min = plan
    t = np.arange(warmup + 1, total + 1)
    want = lr_min + (peak - lr_min) * np.maximum(0, (total - t) / max(1, total - warmup))
    np.testing.assert_allclose(over_the_run(linear(*plan), total)[warmup:], want, rtol=1e-9, atol=1e-12 * peak)


@pytest.mark.parametrize(("warmup", "total", "ratio"), [(10, 100, 0.2), (0, 50, 0.5), (5, 40, 0.1)])
def test_wsd_is_transformers_formula_with_a_linear_decay(warmup, total, ratio):
    decay = round(ratio * total)
    stable_end = total - decay
    share = [1.0 if t <= stable_end else 1 - (t - stable_end) / decay for t in range(warmup + 1, total + 1)]
    want = 0.01 + (1 - 0.01) * np.array(share)
    got = over_the_run(wsd(1.0, warmup, total, 0.01, ratio), total)[warmup:]
    np.testing.assert_allclose(got, want, rtol=1e-9)
    assert (got == 1.0).sum() == stable_end - warmup


def test_a_decay_of_wsd_that_would_reach_into_warmup_begins_after_it():
    np.testing.assert_allclose(over_the_run(wsd(1.0, 6, 10, 0.0, 0.8), 10)[5:], [1.0, 0.75, 0.5, 0.25, 0.0])


@given(st.integers(1, 300), st.integers(2, 300))
def test_inverse_sqrt_is_the_transformers_papers_where_lr_min_is_its_last_rate(warmup, more):
    total = warmup + more
    got = over_the_run(inverse_sqrt(1.0, warmup, total, float(np.sqrt(warmup / total))), total)
    t = np.arange(1, total + 1)
    np.testing.assert_allclose(got, np.minimum(t / warmup, np.sqrt(warmup / t)), rtol=1e-9)


@pytest.mark.parametrize("cycles", [1, 2, 3])
def test_cosine_restarts_are_transformers_but_for_the_end_of_each_cycle(cycles):
    """There, transformers has restarted already; here a cycle's last update is at lr_min, as the run's is."""
    warmup, total = 5, 65
    got = over_the_run(cosine_restarts(1.0, warmup, total, 0.0, cycles), total)[warmup:]
    progress = np.arange(1, total - warmup + 1) / (total - warmup)
    want = 0.5 * (1 + np.cos(np.pi * ((cycles * progress) % 1)))
    want[(total - warmup) // cycles - 1 :: (total - warmup) // cycles] = 0.0
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@given(plans())
def test_one_cycle_is_the_plain_cosine(plan):
    np.testing.assert_array_equal(over_the_run(cosine_restarts(*plan, num_cycles=1), plan[2]), rates(*plan))


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


@given(low=st.floats(1e-9, 1e-4), factor=st.floats(1.1, 1e6), total=st.integers(2, 200))
def test_a_ramp_climbs_by_equal_factors_from_end_to_end(low, factor, total):
    rates = np.array([ramp(low, low * factor, total)(t) for t in range(1, total + 1)])
    np.testing.assert_allclose(rates[[0, -1]], [low, low * factor], rtol=1e-9)
    np.testing.assert_allclose(np.diff(np.log(rates)), np.log(factor) / (total - 1), rtol=1e-6)
