"""The diagnosis of a sweep: a line for each job, the best of them, and what the whole grid shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agent_tunix.tasks import arithmetic
from agent_tunix.workflows.diagnosis.examination import Report, examine
from agent_tunix.workflows.diagnosis.finding import Finding, Severity
from agent_tunix.workflows.diagnosis.records import FINISHED, TOLD_APART, Accuracy, RunRecords, difference
from agent_tunix.workflows.diagnosis.remedies import join, leaves, less, possible, rounded, value_text

RATE = "optimizer.learning_rate"
LR_MIN = "scheduler.lr_min"
ALGORITHM = "optimizer.optimizer_name"
FLAT = {"not learning", "slow convergence", "updates that do not survive"}
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

    @property
    def rate(self) -> float | None:
        """Its learning rate, if it is known and differs between the jobs."""
        rate = self.settings.get(RATE)
        return float(rate) if isinstance(rate, int | float) else None

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
        """What tells it from the others; a search over an interval draws numbers of seventeen digits."""
        told = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in self.settings.items()}
        return " ".join(f"{key.rpartition('.')[2]}={value_text(value)}" for key, value in told.items())


@dataclasses.dataclass(frozen=True)
class SweepReport:
    jobs: list[Job]
    best: str | None  # the job of the highest final accuracy
    tied: list[str]  # jobs that noise does not tell from it
    findings: list[Finding]
    others: list[str]  # jobs that have not begun, or cannot be read

    @property
    def ended(self) -> bool:
        return not self.others and all(job.ended for job in self.jobs)


def examine_sweep(runs: Mapping[str, RunRecords], others: Mapping[str, Sequence[str]] | None = None) -> SweepReport:
    """Judges every job that has records, and the grid as a whole once all have ended.

    `others` are those without a record, with the overrides as they were written.
    """
    others = others or {}
    told_apart = _told_apart(list(runs.values()), list(others.values()))
    jobs = [
        Job(
            name,
            settings,
            end.share if (end := end_of(run)) else None,
            examine(run),
            run.status,
            run.steps,
            run.rolled_back,
        )
        for (name, run), settings in zip(runs.items(), told_apart, strict=True)
    ]
    ends = {name: end for name, run in runs.items() if (end := end_of(run))}
    best = max(ends, key=lambda name: ends[name].share, default=None)
    tied = [name for name in ends if best and name != best and difference(ends[name], ends[best]).z < TOLD_APART]
    report = SweepReport(jobs, best, tied, [], list(others))
    leader = runs[best] if best else next(iter(runs.values()))
    alike = [job for job in jobs if runs[job.name].setting(ALGORITHM) == leader.setting(ALGORITHM)]
    findings = _over_all(alike, best, tied, leader, ends[best].n if best else 0) if report.ended else []
    return dataclasses.replace(report, findings=findings)


def end_of(run: RunRecords) -> Accuracy | None:
    """The last evaluation of a run at its own settings, none where a guard stopped it or went on at a tenth of its rate.

    So neither its beginning nor another rate makes it the best; nor does what it was before the first update.
    """
    seen = [accuracy for accuracy in run.accuracies() if accuracy.step > 0]
    return seen[-1] if seen and run.summary.get("status") != "diverged" and not run.rolled_back else None


def _told_apart(runs: Sequence[RunRecords], waiting: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Each job's values of the keys that differ, also from those of jobs that have not begun.

    Where files of a group are swept, as in optimizer=adamw,lion, only their name is given, and the rate, which a grid is
    judged by.
    """
    tables = [leaves(run.config) for run in runs]
    given, to_come = ([_by_key(overrides) for overrides in some] for some in ([run.given for run in runs], waiting))
    swept = [key for key in _differing([*given, *to_come]) if all(key in one for one in [*given, *to_come])]
    groups = [key for key in swept if "." not in key and key not in tables[0]]
    lowered = 0 < sum(LR_MIN in one for one in given) < len(given)  # by a search, with the rates that are below it
    varied = {*_differing(tables), *(swept if waiting else [])} - ({LR_MIN} if lowered else set())
    keys = [key for key in dict.fromkeys(key for table in tables for key in table) if key in varied]
    if groups:
        keys = [key for key in keys if key == RATE or any(key in one for one in given)]
    return [
        {group: one[group] for group in groups} | {key: table.get(key) for key in keys}
        for one, table in zip(given, tables, strict=True)
    ]


def _by_key(overrides: Sequence[str]) -> dict[str, str]:
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def _differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not the same in all."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({repr(table.get(key)) for table in tables}) > 1]


def _next_sweep(leader: RunRecords, dropped: Sequence[str], grid: Sequence[float], evaluated_on: int | None = None) -> str:
    """The command of a sweep over these rates, which has all else from one run, but for the keys that are dropped."""
    changes = possible(leader, {RATE: rounded(min(grid))})
    changes[RATE] = ",".join(f"{min(1.0, rounded(rate)):g}" for rate in grid)
    if evaluated_on:
        changes["evaluation.num_examples"] = evaluated_on
    own = less(leader.overrides, *changes, *dropped)
    return join(["--multirun", *own, *(f"{k}={v}" for k, v in reversed(changes.items()))])


def _over_all(
    jobs: Sequence[Job], best: str | None, tied: Sequence[str], leader: RunRecords, problems: int
) -> list[Finding]:
    """What only the whole grid of learning rates shows; those of another algorithm are no part of it."""
    rates = sorted(_rates(jobs))
    if len(rates) < 2:
        return []
    sweep = partial(_next_sweep, leader, [key for key in jobs[0].settings if key == "seed"])  # a better seed is luck
    low, high = rates[0], rates[-1]
    if missed := _all_missed(jobs, low, high, sweep):
        return [missed]
    if best and all(job.name in (best, *tied) for job in jobs):
        evidence = f"from {low:g} to {high:g} all jobs end within noise of each other, on {problems} problems"
        there = arithmetic.how_many("validation") if leader.setting("data.source") == "arithmetic" else 4 * problems
        remedy = sweep(rates, evaluated_on=min(4 * problems, there))
        return [Finding("no difference within noise", Severity.MILD, evidence, remedy)]
    rate = next((job.rate for job in jobs if job.name == best), None)
    if rate is None:
        return []
    as_good = sorted(_rates(job for job in jobs if job.name in tied) - {rate})
    if rate not in (low, high):
        evidence = f"the best rate, {rate:g}, lies inside the grid"
    else:
        evidence = f"the best rate, {rate:g}, is at the edge of the grid from {low:g} to {high:g}"
        if not as_good:
            beyond = [rate, rate * 3, rate * 10]
            if rate == low:  # and, where the next rate is ruinous, something between the two
                above = [math.sqrt(rate * rates[1])] if rates[1] in _rates(_ruined(jobs)) else []
                beyond = [rate / 10, rate / 3, rate, *above]
            return [Finding("best at the edge of the grid", Severity.MILD, evidence, sweep(beyond))]
        evidence += f", but noise does not tell it from {', '.join(f'{other:g}' for other in as_good)}"
    return [Finding("refine", Severity.MILD, evidence, sweep([rate / 3, rate, rate * 3]))]


def _all_missed(jobs: Sequence[Job], low: float, high: float, sweep: Callable[[Sequence[float]], str]) -> Finding | None:
    """Where no job is well: all rates are too low, or too high, or good ones lie between those that are."""
    if all(job.illnesses & FLAT for job in jobs):
        evidence = f"no job from {low:g} to {high:g} learns as it should"
        return Finding("all rates too low", Severity.SERIOUS, evidence, sweep([high * 3, high * 10, high * 30]))
    ruined = _ruined(jobs)
    if len(ruined) == len(jobs):
        evidence = f"every job from {low:g} to {high:g} diverges or collapses"
        return Finding("all rates too high", Severity.GRAVE, evidence, sweep([low / 30, low / 10, low / 3]))
    flat = [job for job in jobs if job.illnesses & FLAT and job not in ruined]
    below, above = max(_rates(flat), default=math.inf), min(_rates(ruined), default=0.0)
    if len(flat) + len(ruined) < len(jobs) or below >= above:
        return None
    evidence = f"{below:g} is too low to learn as it should, {above:g} diverges or collapses, and none between was tried"
    between = [below * (above / below) ** (n / 4) for n in (1, 2, 3)]
    return Finding("good rates stepped over", Severity.SERIOUS, evidence, sweep(between))


def _ruined(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.illnesses & RUINED]


def _rates(jobs: Iterable[Job]) -> set[float]:
    return {job.rate for job in jobs if job.rate is not None}
