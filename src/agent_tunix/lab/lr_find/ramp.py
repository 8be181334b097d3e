"""What a ramp of the learning rate says of the rates that a run can use: reward gained per KL divergence spent.

    gain(t)    reward, smoothed, above its start, less what noise explains
    score(t)   gain(t) / kl(t)

While the rate is too low there is no gain. Then the reward rises, and the score is highest where little KL buys much reward.
At last KL buys no more: the reward has its peak, and falls as the policy comes apart. That bounds the rate of a whole run.
A ramp spends a few updates near each rate and a run spends all of them there, so what counts is how far they travel, by the
sum of their rates:

    slow       the run travels as far as the ramp had where the score lies (its centre of gravity)
    fast       it travels as far as the ramp had at the peak of the reward, or goes as fast: the geometric mean of the two,
               as a run at low rates is ruined by how far it travels, and one at high rates by how fast it goes

The rate suggested is the geometric mean of slow and fast. Reward and KL of a step are measured before its update, so they
speak of the rate of the step before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal

NOISE = 3.0  # standard errors that a gain must exceed to be one
COLLAPSE = 5.0  # that a loss must exceed to end the ramp: more, as it is looked for after every step
WINDOW = 8  # a smoothed value is the mean of this part of the ramp, and its first two such parts are the start
NARROWEST = 3  # steps of such a part, in a short ramp
LEAST_KL = 1e-6  # nats a token; below it float32 shows rounding
MOVED = 0.01  # nats a token: a policy that has come so far was driven fast
PATIENCE = 100  # updates at full rate after which a run should have come as far as the ramp, however long it is


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a ramp says; without a gain there is no rate to suggest."""

    score: list[float]
    suggested: float | None
    range: tuple[float, float] | None
    conclusion: str
    beyond: Literal["below", "above"] | None = None  # where better rates may lie, if the ramp has not seen them


@dataclasses.dataclass(frozen=True)
class Curve:
    """The reward of a ramp, smoothed, as gain and loss against its start beyond noise."""

    reward: list[float]
    first: int  # step after those that make up the start
    start: float
    end: float
    error: float

    @property
    def gain(self) -> list[float]:
        above = [max(0.0, value - self.start - NOISE * self.error) for value in self.reward]
        return [0.0] * self.first + above[self.first :]

    @property
    def peak(self) -> int:
        return max(range(self.first, len(self.reward)), key=self.reward.__getitem__)

    @property
    def fell(self) -> bool:
        """Whether the reward is now below its start."""
        return self.end < self.start - COLLAPSE * self.error


def window(planned: int) -> int:
    """An odd number of steps, so that a mean has a middle."""
    return max(NARROWEST, planned // WINDOW | 1)


def least(planned: int) -> int:
    """How many steps a ramp must have made to be judged: its start, and one smoothed value after it."""
    return 3 * window(planned)


def curve(rewards: Sequence[float], planned: int) -> Curve | None:
    """The curve of a ramp of so many planned steps; None while there are too few to know the start and the noise.

    Noise is taken from the differences between neighbours up to the peak, which a rise over many steps hardly touches.
    """
    width = window(planned)
    if len(rewards) < least(planned):
        return None
    smooth = smoothed(rewards, width)
    before = rewards[: max(2 * width, smooth.index(max(smooth)) + 1)]
    steps = [(later - earlier) ** 2 for earlier, later in itertools.pairwise(before)]
    error = math.sqrt(statistics.fmean(steps) / 2 * (1 / width + 1 / (2 * width)))
    return Curve(smooth, 2 * width, statistics.fmean(rewards[: 2 * width]), statistics.fmean(rewards[-width:]), error)


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """The mean of the values around each; at the ends, of those that there are."""
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def read(
    rates: Sequence[float],
    rewards: Sequence[float],
    kls: Sequence[float],
    planned: int,
    full_updates: float,
    cut_short: bool = False,
) -> Reading:
    """Judges a ramp for runs that travel as far as `full_updates` updates at their peak rate.

    One that was `cut_short`, by Ctrl-C say, has not ended by its own rates.
    """
    found = curve(rewards, planned)
    if found is None:
        few = f"The ramp broke off after {len(rates)} steps: too few to judge."
        beyond: Literal["below"] | None = None if cut_short else "below"
        return Reading([0.0] * len(rates), None, None, few if cut_short else f"{few} It began too high.", beyond)
    kl = smoothed(kls, window(planned))
    score = [gain / max(spent, LEAST_KL) for gain, spent in zip(found.gain, kl, strict=True)]
    if max(score) == 0:
        too_high = found.fell and kls[found.first - 1] >= MOVED
        return Reading(score, None, None, _no_gain(rates, found, too_high), "below" if too_high else None)
    updates, speed = min(full_updates, PATIENCE), rates[found.peak - 1]
    slow = distance_at_score(rates, score[: found.peak + 1]) / updates
    fast = min(speed, math.sqrt(speed * sum(rates[: found.peak]) / updates))
    low, high = min(slow, fast), fast
    suggested = float(f"{math.sqrt(low * high):.2g}")
    rising = found.peak >= len(found.reward) - 2
    said = _conclusion(found, kl[found.peak], (slow, fast), rising, speed, suggested)
    return Reading(score, suggested, (low, high), said, "above" if rising else None)


def distance_at_score(rates: Sequence[float], score: Sequence[float]) -> float:
    """How far the ramp had come, by the sum of its rates, where the score lies: its centre of gravity over the steps."""
    travelled = [sum(rates[:step]) for step in range(len(score))]
    pairs = [(weight, far) for weight, far in zip(score, travelled, strict=True) if weight > 0]
    return math.exp(sum(weight * math.log(far) for weight, far in pairs) / sum(weight for weight, _ in pairs))


def _no_gain(rates: Sequence[float], found: Curve, too_high: bool) -> str:
    if found.fell:
        held = [i for i, value in enumerate(found.reward) if value >= found.start - NOISE * found.error]
        why = "there is nothing to learn from this reward, or the steps are too few to show it"
        return (
            f"No rate raised the reward beyond noise, and beyond {rates[max([0, *held])]:.1e} it fell: "
            f"{'the ramp began too high' if too_high else why}."
        )
    return f"No rate from {rates[0]:.1e} to {rates[-1]:.1e} raised the reward beyond noise."


def _conclusion(found: Curve, kl: float, bounds: tuple[float, float], rising: bool, speed: float, suggested: float) -> str:
    slow, fast = bounds
    rise = f"The reward, smoothed, rose from {found.start:.2f} to {found.reward[found.peak]:.2f} at a KL of {kl:.2g}"
    if slow > fast:
        return f"{rise}. The run is too short to come as far at a safe rate; {suggested:.1e} is the highest that looks safe."
    if rising:
        limit, advice = "was still rising at the end of the ramp", f"{suggested:.1e} should do; higher rates may be better"
    else:
        limit = f"fell beyond a rate of {speed:.1e}"
        advice = f"For this run {slow:.1e} to {fast:.1e} should do; {suggested:.1e} is in the middle"
    return f"{rise}, and {limit}. {advice}."
