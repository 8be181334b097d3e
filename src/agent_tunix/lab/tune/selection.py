"""Which candidate is kept: by held-out accuracy, with its noise.

One run of each: accuracies are told apart from two standard errors of their binomial noise on. Several seeds of each: they
are compared seed by seed. A challenger takes the incumbent's place only if it is told from it: otherwise there is no
difference within noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from agent_tunix.lab.doctor.records import TOLD_APART, Accuracy, difference
from agent_tunix.lab.doctor.seeds import paired_difference
from agent_tunix.lab.tune.halving import LEAST_KEPT


@dataclasses.dataclass(frozen=True)
class Result:
    """A candidate's value and its accuracy at a rung; None where it diverged on the way."""

    value: float
    accuracy: Accuracy | None


@dataclasses.dataclass(frozen=True)
class Standing:
    """Another value against the chosen one, at the last rung that both were at."""

    value: float
    accuracy: Accuracy | None
    chosen: Accuracy

    @property
    def tied(self) -> bool:
        return self.accuracy is not None and tied(self.accuracy, self.chosen)


def tied(one: Accuracy, other: Accuracy) -> bool:
    return abs(difference(one, other).z) < TOLD_APART


def ranked(results: Sequence[Result], incumbent: float) -> list[Result]:
    """Those that have an accuracy, the best first; an incumbent that noise does not tell from the best comes before it.

    Of equal ones the value nearer to the incumbent comes first, by their ratio, and of two as near the higher: where
    nothing has moved yet, it is the one that may.
    """
    measured = [(result, result.accuracy) for result in results if result.accuracy is not None]
    if not measured:
        return []
    best = max((accuracy for _, accuracy in measured), key=lambda accuracy: accuracy.share)

    def place(pair: tuple[Result, Accuracy]) -> tuple:
        result, accuracy = pair
        kept = result.value == incumbent and tied(accuracy, best)
        return not kept, -accuracy.share, _apart(result.value, incumbent), -result.value

    return [result for result, _ in sorted(measured, key=place)]


def _apart(value: float, incumbent: float) -> float:
    """How many times greater or less; rounded, as 3 and 1/3 are equally far from 1."""
    if value == incumbent:
        return 0.0
    return round(abs(math.log10(value / incumbent)), 1) if value > 0 and incumbent > 0 else math.inf


def survivors(results: Sequence[Result], incumbent: float, most: int) -> list[Result]:
    """Those that go on: all that noise does not tell from the first, at most so many, and at least two."""
    ordered = [(r, r.accuracy) for r in ranked(results, incumbent)[:most] if r.accuracy is not None]
    return [r for i, (r, accuracy) in enumerate(ordered) if i < LEAST_KEPT or tied(accuracy, ordered[0][1])]


def choose(results: Sequence[Result], incumbent: float) -> float | None:
    """The value that a stage ends with; None where every candidate diverged."""
    return next((result.value for result in ranked(results, incumbent)), None)


def standings(history: Sequence[Sequence[Result]], chosen: float) -> list[Standing]:
    """Every other value of a stage against the chosen one; `history` has the results of each rung."""
    found: dict[float, Standing] = {}
    for results in history:
        against = next(result.accuracy for result in results if result.value == chosen)
        assert against is not None, "the chosen value came to the end"
        found |= {r.value: Standing(r.value, r.accuracy, against) for r in results if r.value != chosen}
    return [found[value] for value in sorted(found)]


def best_finalist(finalists: Sequence[Sequence[Accuracy]]) -> int:
    """The first, unless another is better by more than noise; of several such, the one that gains most."""
    gains = [paired_difference(finalists[0], finalist) for finalist in finalists]
    better = [i for i, gain in enumerate(gains) if gain.low > 0]
    return max(better, key=lambda i: gains[i].middle, default=0)
