"""The jobs of a sweep, and the candidates that they are of.

Jobs that differ in nothing but their seed are repeats of one candidate. It is judged by their mean: the best of all jobs
would be the luckiest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from agent_tunix.config.commands import value_text
from agent_tunix.lab.doctor.examination import Report
from agent_tunix.lab.doctor.finding import Severity
from agent_tunix.lab.doctor.records import FINISHED, TOLD_APART, Accuracy, difference
from agent_tunix.lab.doctor.seeds import Interval, over_seeds, paired_difference

RATE = "optimizer.learning_rate"
SEED = "seed"
RUINED = {"diverging", "policy collapse", "KL runaway"}


@dataclasses.dataclass(frozen=True)
class Job:
    name: str
    settings: dict[str, Any]  # what differs between the jobs
    accuracy: float | None
    report: Report
    status: str
    steps: int
    rolled_back: bool = False
    problems: int | None = None  # that the accuracy is of

    @property
    def ended(self) -> bool:
        return self.status in FINISHED

    @property
    def illnesses(self) -> set[str]:
        """Those that are not mild. A run that was rolled back diverged at its own rate, whatever it came to at a tenth."""
        grave = {finding.illness for finding in self.report.findings if finding.severity != Severity.MILD}
        return grave | ({"diverging"} if self.rolled_back else set())

    @property
    def label(self) -> str:
        return _label(self.settings)

    @property
    def seed(self) -> int | None:
        """If it is known and differs between the jobs."""
        seed = self.settings.get(SEED)
        return seed if isinstance(seed, int) else None


@dataclasses.dataclass(frozen=True)
class Repeats:
    """A candidate: the jobs that differ in nothing but their seed; where none do, a single job."""

    jobs: list[str]
    settings: dict[str, Any]  # what differs between the candidates
    seeds: list[int | None]  # one a job
    measured: list[str]  # jobs with a final accuracy
    diverged: list[str]  # or rolled back, which is no better
    accuracy: Interval | None  # the mean of those measured; none where one diverged: the others were only luckier
    illnesses: list[str]  # what ails every job, and what ruins one of them

    @property
    def name(self) -> str:
        return self.jobs[0]

    @property
    def label(self) -> str:
        return _label(self.settings)

    @property
    def rate(self) -> float | None:
        """Its learning rate, if it is known and differs between the jobs."""
        rate = self.settings.get(RATE)
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def not_ranked(self) -> str | None:
        """Why it is not the best, though its other seeds may have ended well."""
        unranked = f"{self.label} is not ranked" if self.settings else "There is no mean over the seeds"
        return f"{unranked}: {numbered(self.diverged)} diverged" if self.diverged else None


def candidates_of(jobs: Sequence[Job], ends: Mapping[str, Accuracy], diverged: Sequence[str]) -> list[Repeats]:
    """The jobs by what tells them apart but for the seed; one whose seed is not known repeats none."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.name if job.seed is None else repr(_but_seed(job)), []).append(job)
    repeated = len(groups) < len(jobs)
    found = []
    for group in groups.values():
        names, ills = [job.name for job in group], [job.illnesses for job in group]
        measured, lost = ([name for name in names if name in some] for some in (ends, diverged))
        found.append(
            Repeats(
                names,
                _but_seed(group[0]) if repeated else group[0].settings,
                [job.seed for job in group],
                measured,
                lost,
                over_seeds([ends[name] for name in measured]) if measured and not lost else None,
                sorted(set.intersection(*ills) | set.union(*ills) & RUINED),
            )
        )
    return found


def _but_seed(job: Job) -> dict[str, Any]:
    return {key: value for key, value in job.settings.items() if key != SEED}


def best_of(candidates: Sequence[Repeats], ends: Mapping[str, Accuracy]) -> tuple[Repeats | None, list[str]]:
    """The candidate of the highest mean, and the names of those that noise does not tell from it."""
    means = [(one.accuracy.middle, one) for one in candidates if one.accuracy]
    _, best = max(means, key=lambda pair: pair[0], default=(None, None))
    return best, [one.name for _, one in means if best and one is not best and _tied(one, best, ends)]


def _tied(one: Repeats, best: Repeats, ends: Mapping[str, Accuracy]) -> bool:
    """Seed by seed where they share seeds, else by their intervals; single jobs by their difference."""
    if len(one.jobs) == len(best.jobs) == 1:
        return difference(ends[one.name], ends[best.name]).z < TOLD_APART
    own, its = ({seed: ends[job] for job, seed in zip(c.jobs, c.seeds, strict=True) if job in ends} for c in (one, best))
    if shared := [seed for seed in own if seed in its]:
        return paired_difference([own[seed] for seed in shared], [its[seed] for seed in shared]).low <= 0
    return over_seeds(list(own.values())).high >= over_seeds(list(its.values())).low


def _label(settings: Mapping[str, Any]) -> str:
    """What tells a job from the others; a search over an interval draws numbers of seventeen digits."""
    told = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in settings.items()}
    return " ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in told.items())


def numbered(jobs: Sequence[str]) -> str:
    return f"job{'s' if len(jobs) > 1 else ''} {', '.join(jobs)}"
