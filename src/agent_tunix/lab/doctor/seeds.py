"""Several seeds of one candidate: their mean with its noise, and the difference between two candidates.

Runs of one seed share data and beginning, so candidates are compared in pairs, by Student's t over the seeds; where seeds
happen to agree by chance that would be too sure, so an interval is never narrower than binomial noise allows.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from agent_tunix.lab.doctor.records import TOLD_APART, Accuracy, difference
from agent_tunix.training.intervals import Z95

T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided 95 %, by degrees of freedom from 1


@dataclasses.dataclass(frozen=True)
class Interval:
    """A share, or a difference of shares, with its 95 % interval."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.middle:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


def mean_of(accuracies: Sequence[Accuracy]) -> Accuracy:
    """All seeds are asked the same problems of a data set, so those of one are counted: more seeds are no more problems."""
    return Accuracy(accuracies[0].step, statistics.fmean(a.share for a in accuracies), min(a.n for a in accuracies))


def over_seeds(accuracies: Sequence[Accuracy]) -> Interval:
    """The mean over seeds: the wider of Wilson's interval and Student's over the seeds."""
    mean, spread = mean_of(accuracies), _student([a.share for a in accuracies])
    low, high = mean.interval
    return Interval(mean.share, max(0.0, min(low, mean.share - spread)), min(1.0, max(high, mean.share + spread)))


def paired_difference(ones: Sequence[Accuracy], others: Sequence[Accuracy]) -> Interval:
    """Of accuracies of the same seeds, the second less the first."""
    changes = [difference(one, other) for one, other in zip(ones, others, strict=True)]
    middle = statistics.fmean(change.gain for change in changes)
    binomial = Z95 * math.sqrt(sum(change.error**2 for change in changes)) / len(changes)
    spread = max(binomial, _student([change.gain for change in changes]))
    return Interval(middle, middle - spread, middle + spread)


def gained(before: Sequence[Accuracy], after: Sequence[Accuracy]) -> bool:
    """Whether training gained more than noise, as far as is known: over all seeds, or with each of them by itself.

    Two seeds that gain much, but not equally much, leave Student's interval for their mean too wide to say anything.
    """
    if not before:
        return True
    each = all(difference(one, other).z >= TOLD_APART for one, other in zip(before, after, strict=True))
    return each or paired_difference(before, after).low > 0


def _student(values: Sequence[float]) -> float:
    """Half of the interval for the mean of a few values; nothing is known from one. Of many it is a little too wide."""
    if len(values) < 2:
        return 0.0
    return T[min(len(values) - 2, len(T) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
