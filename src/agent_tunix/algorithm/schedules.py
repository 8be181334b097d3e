"""Learning-rate schedules, as functions of t, the number of the optimizer update, counted from 1.

    warm-up       lr(t) = peak * t / warmup_steps                                       t <= warmup_steps
    cosine decay  lr(t) = lr_min + (peak - lr_min) / 2 * (1 + cos(pi * progress))       progress in (0, 1]

with progress = (t - warmup_steps) / (total_steps - warmup_steps). The first update is not wasted at rate zero, warm-up
ends exactly at the peak, and the last update is exactly at lr_min.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warmup_steps_from_ratio(warmup_ratio: float, total_steps: int) -> int:
    """The reference's fraction of the run, rounded up; a whole number stays what it is despite binary fractions."""
    return math.ceil(round(warmup_ratio * total_steps, 6))


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, lr_min: float) -> Schedule:
    def schedule(t: int) -> float:
        if t <= warmup_steps:
            return peak * (t / warmup_steps)
        progress = min(1.0, (t - warmup_steps) / max(total_steps - warmup_steps, 1))
        cosine = lr_min + 0.5 * (peak - lr_min) * (1 + math.cos(math.pi * progress))
        return min(cosine, peak)  # rounding may pass the peak by a bit

    return schedule
