"""Learning-rate schedules, as functions of t, the number of the optimizer update, counted from 1.

    warm-up       lr(t) = peak * t / warmup_steps                                 t <= warmup_steps, in all of them
    decay         lr(t) = lr_min + (peak - lr_min) * share(t)                     warmup_steps < t < total_steps
    afterwards    lr(t) = lr_min                                                  t >= total_steps

where progress = (t - warmup_steps) / (total_steps - warmup_steps), and share(t) is, for

    warmup_cosine     (1 + cos(pi * progress)) / 2
    linear            1 - progress
    wsd               1 until the last decay_ratio of the run, then falling straight to 0
    inverse_sqrt      sqrt(w / t), w = max(warmup_steps, 1), stretched so that it falls from 1 to 0
    cosine_restarts   the cosine, num_cycles times over

`constant` stays at the peak. The first update is not wasted at rate zero, warm-up ends exactly at the peak, and the last
update of a schedule that decays is exactly at lr_min.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warmup_steps_from_ratio(warmup_ratio: float, total_steps: int) -> int:
    """The reference's fraction of the run, rounded up; but 0.07 of 100 is 7, although in floats it is a little more."""
    return math.ceil(round(warmup_ratio * total_steps, 6))


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, lr_min: float) -> Schedule:
    return cosine_restarts(peak, warmup_steps, total_steps, lr_min, num_cycles=1)


def constant(peak: float, warmup_steps: int, total_steps: int) -> Schedule:
    """`total_steps` is accepted, as by all schedules, and ignored."""
    return lambda t: peak * min(1.0, t / max(warmup_steps, 1))


def linear(peak: float, warmup_steps: int, total_steps: int, lr_min: float) -> Schedule:
    return _decaying(peak, warmup_steps, total_steps, lr_min, lambda t: (total_steps - t) / (total_steps - warmup_steps))


def wsd(peak: float, warmup_steps: int, total_steps: int, lr_min: float, decay_ratio: float) -> Schedule:
    """Warm-up, stable, decay (Hu et al., 2024, arXiv:2404.06395), with a straight decay as in transformers."""
    decay_steps = min(decay_ratio * total_steps, total_steps - warmup_steps)
    return _decaying(peak, warmup_steps, total_steps, lr_min, lambda t: min(1.0, (total_steps - t) / decay_steps))


def inverse_sqrt(peak: float, warmup_steps: int, total_steps: int, lr_min: float) -> Schedule:
    """Vaswani et al. (2017, arXiv:1706.03762, equation 3), which lr_min = peak * sqrt(w / total_steps) gives exactly."""
    start = max(warmup_steps, 1)
    last = math.sqrt(start / total_steps)
    return _decaying(peak, warmup_steps, total_steps, lr_min, lambda t: (math.sqrt(start / t) - last) / (1.0 - last))


def cosine_restarts(peak: float, warmup_steps: int, total_steps: int, lr_min: float, num_cycles: int) -> Schedule:
    """Loshchilov & Hutter (2017, arXiv:1608.03983) with cycles of equal length; each ends at lr_min."""

    def share(t: int) -> float:
        done = num_cycles * (t - warmup_steps) / (total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * (done - math.ceil(done) + 1)))

    return _decaying(peak, warmup_steps, total_steps, lr_min, share)


def ramp(low: float, high: float, total_steps: int) -> Schedule:
    """Rises by equal factors from `low` to `high`; for the learning-rate finder alone, so not one of SCHEDULES."""
    return lambda t: low * (high / low) ** ((t - 1) / max(total_steps - 1, 1))


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "warmup_cosine": warmup_cosine,
    "constant": constant,
    "linear": linear,
    "wsd": wsd,
    "inverse_sqrt": inverse_sqrt,
    "cosine_restarts": cosine_restarts,
}


def _decaying(peak: float, warmup_steps: int, total_steps: int, lr_min: float, share: Callable[[int], float]) -> Schedule:
    def schedule(t: int) -> float:
        if t <= warmup_steps:
            return peak * (t / warmup_steps)
        if t >= total_steps:
            return lr_min
        return min(lr_min + (peak - lr_min) * share(t), peak)  # rounding may pass the peak by a bit

    return schedule
