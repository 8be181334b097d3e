"""The diagnosis of a sweep: a line for each job, the best candidate, and what the whole grid shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from agent_tunix.config.commands import join, less
from agent_tunix.config.load import leaves
from agent_tunix.environments import arithmetic
from agent_tunix.lab.doctor.examination import examine
from agent_tunix.lab.doctor.finding import Finding, Severity
from agent_tunix.lab.doctor.records import Accuracy, RunRecords
from agent_tunix.lab.doctor.remedies import possible, rounded
from agent_tunix.lab.doctor.repeats import RATE, RUINED, SEED, Job, Repeats, best_of, candidates_of

LR_MIN = "scheduler.lr_min"
ALGORITHM = "optimizer.optimizer_name"
WARMUP, WARMUPS = "optimizer.warmup_ratio", (0.05, 0.1, 0.2)  # those of the optimizer reference
FINE = 4.0  # times as high: a rate nearer to the best one is not worth another sweep
FLAT = {"not learning", "slow convergence", "updates that do not survive"}


@dataclasses.dataclass(frozen=True)
class SweepReport:
    jobs: list[Job]
    candidates: list[Repeats]
    best: str | None  # the candidate of the highest mean final accuracy, by its first job; seeds alone have none
    tied: list[str]  # candidates that noise does not tell from it, by their first jobs
    findings: list[Finding]
    others: list[str]  # jobs that have not begun, or cannot be read

    @property
    def ended(self) -> bool:
        return not self.others and all(job.ended for job in self.jobs)

    @property
    def repeated(self) -> bool:
        """Whether a candidate has several seeds."""
        return len(self.candidates) < len(self.jobs)

    @property
    def seeds_alone(self) -> bool:
        """Whether nothing but the seed was swept: no seed is better than another."""
        return self.repeated and not self.candidates[0].settings


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
            end.n if end else None,
        )
        for (name, run), settings in zip(runs.items(), told_apart, strict=True)
    ]
    ends = {name: end for name, run in runs.items() if (end := end_of(run))}
    candidates = candidates_of(jobs, ends, [name for name, run in runs.items() if _diverged(run)])
    report = SweepReport(jobs, candidates, None, [], [], list(others))
    best, tied = best_of(candidates, ends) if not report.seeds_alone else (None, [])
    leader = runs[best.name] if best else next(iter(runs.values()))
    alike = [one for one in candidates if runs[one.name].setting(ALGORITHM) == leader.setting(ALGORITHM)]
    problems = min(ends[name].n for name in best.measured) if best else 0
    findings = _over_all(alike, best, tied, leader, problems) if report.ended else []
    return dataclasses.replace(report, best=best.name if best else None, tied=tied, findings=findings)


def end_of(run: RunRecords) -> Accuracy | None:
    """The last evaluation of a run at its own settings, none where a guard stopped it or went on at a tenth of its rate.

    So neither its beginning nor another rate makes it the best; nor does what it was before the first update.
    """
    seen = [accuracy for accuracy in run.accuracies() if accuracy.step > 0]
    return seen[-1] if seen and not _diverged(run) else None


def _diverged(run: RunRecords) -> bool:
    return run.summary.get("status") == "diverged" or run.rolled_back


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


def _next_sweep(leader: RunRecords, grid: Sequence[float], evaluated_on: int | None = None) -> str:
    """The command of a sweep over these rates, which has all else from one run."""
    changes = possible(leader, {RATE: rounded(min(grid))})
    changes[RATE] = ",".join(dict.fromkeys(f"{min(1.0, rounded(rate)):g}" for rate in grid))
    if evaluated_on:
        changes["evaluation.num_examples"] = evaluated_on
    return _swept(leader, changes)


def _swept(leader: RunRecords, changes: dict[str, Any]) -> str:
    own = less(leader.overrides, *changes)
    return join(["--multirun", *own, *(f"{k}={v}" for k, v in reversed(changes.items()))])


def _with_all_seeds(leader: RunRecords, candidates: Sequence[Repeats]) -> RunRecords:
    """The run with the seeds of all repeats in place of its own; one that was only better by luck is not kept."""
    seeds = _seeds(candidates)
    if len(seeds) < 2:
        return leader
    return _with_seeds(leader, seeds if _kind(candidates) == "candidate" else [])


def _seeds(candidates: Sequence[Repeats]) -> list[int]:
    return list(dict.fromkeys(seed for one in candidates for seed in one.seeds if seed is not None))


def _with_seeds(leader: RunRecords, seeds: Sequence[int]) -> RunRecords:
    swept = [f"{SEED}={','.join(map(str, seeds))}"] if seeds else []
    return dataclasses.replace(leader, overrides=[*less(leader.overrides, SEED), *swept])


def _over_all(
    candidates: Sequence[Repeats], best: Repeats | None, tied: Sequence[str], leader: RunRecords, problems: int
) -> list[Finding]:
    """What only the whole grid of learning rates shows; those of another algorithm are no part of it."""
    rates = sorted(_rates(candidates))
    if len(rates) < 2:
        return []
    sweep = partial(_next_sweep, _with_all_seeds(leader, candidates))
    low, high = rates[0], rates[-1]
    if missed := _all_missed(candidates, low, high, sweep):
        return [missed]
    if best and all(one.name in (best.name, *tied) for one in candidates):
        return [_no_difference(candidates, leader, rates, problems)]
    if best is None or (rate := best.rate) is None:
        return []
    as_good = sorted(_rates(one for one in candidates if one.name in tied) - {rate})
    if rate not in (low, high):
        evidence = f"the best rate, {rate:g}, lies inside the grid"
    else:
        evidence = f"the best rate, {rate:g}, is at the edge of the grid from {low:g} to {high:g}"
        if not as_good:
            beyond = [rate, rate * 3, rate * 10]
            if rate == low:  # and, where the next rate is ruinous, something between the two
                above = [math.sqrt(rate * rates[1])] if rates[1] in _rates(_ruined(candidates)) else []
                beyond = [rate / 10, rate / 3, rate, *above]
            return [Finding("best at the edge of the grid", Severity.MILD, evidence, sweep(beyond))]
        evidence += f", but noise does not tell it from {', '.join(f'{other:g}' for other in as_good)}"
    lower = max((other for other in rates if other < rate), default=rate / 9)
    higher = min((other for other in rates if other > rate), default=rate * 9)
    if max(rate / lower, higher / rate) > FINE:
        between = [math.sqrt(lower * rate), rate, math.sqrt(rate * higher)]
        return [Finding("refine", Severity.MILD, evidence, sweep(between))]
    return _after_rates(candidates, rate, _with_all_seeds(leader, candidates), evidence)


def _after_rates(candidates: Sequence[Repeats], rate: float, leader: RunRecords, evidence: str) -> list[Finding]:
    """The reference's next step, where the rate alone was swept, by steps that are fine enough."""
    if candidates[0].settings.keys() != {RATE}:
        return []
    changes = possible(leader, {RATE: rate, WARMUP: max(WARMUPS)})
    changes[WARMUP] = ",".join(map(str, WARMUPS))
    near = f"{evidence}, and its neighbours are near it"
    return [Finding("warm-up is next", Severity.MILD, near, _swept(leader, changes))]


def _no_difference(candidates: Sequence[Repeats], leader: RunRecords, rates: Sequence[float], problems: int) -> Finding:
    """With twice as many seeds the difference may show, where there are several; else with more problems."""
    evidence = (
        f"from {rates[0]:g} to {rates[-1]:g} all {_kind(candidates)}s end within noise of each other, on {problems} problems"
    )
    if _kind(candidates) == "candidate":
        seeds = _seeds(candidates)
        more = [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + len(seeds))]
        evidence, remedy = f"{evidence} and {len(seeds)} seeds", _next_sweep(_with_seeds(leader, more), rates)
    else:
        generated, level = leader.setting("data.source") == "arithmetic", int(leader.number("data.level", 0))
        there = arithmetic.how_many("validation", level) if generated else 4 * problems
        remedy = _next_sweep(_with_all_seeds(leader, candidates), rates, min(4 * problems, there))
    return Finding("no difference within noise", Severity.MILD, evidence, remedy)


def _all_missed(
    candidates: Sequence[Repeats], low: float, high: float, sweep: Callable[[Sequence[float]], str]
) -> Finding | None:
    """Where no candidate is well: all rates are too low, or too high, or good ones lie between those that are."""
    if all(FLAT.intersection(one.illnesses) for one in candidates):
        evidence = f"no {_kind(candidates)} from {low:g} to {high:g} learns as it should"
        return Finding("all rates too low", Severity.SERIOUS, evidence, sweep([high * 3, high * 10, high * 30]))
    ruined = _ruined(candidates)
    if len(ruined) == len(candidates):
        often = " with one seed or more" if _kind(candidates) == "candidate" else ""
        evidence = f"every {_kind(candidates)} from {low:g} to {high:g} diverges or collapses{often}"
        return Finding("all rates too high", Severity.GRAVE, evidence, sweep([low / 30, low / 10, low / 3]))
    flat = [one for one in candidates if FLAT.intersection(one.illnesses) and one not in ruined]
    below, above = max(_rates(flat), default=math.inf), min(_rates(ruined), default=0.0)
    if len(flat) + len(ruined) < len(candidates) or below >= above:
        return None
    evidence = f"{below:g} is too low to learn as it should, {above:g} diverges or collapses, and none between was tried"
    between = [below * (above / below) ** (n / 4) for n in (1, 2, 3)]
    return Finding("good rates stepped over", Severity.SERIOUS, evidence, sweep(between))


def _kind(candidates: Sequence[Repeats]) -> str:
    return "candidate" if any(len(one.jobs) > 1 for one in candidates) else "job"


def _ruined(candidates: Sequence[Repeats]) -> list[Repeats]:
    return [one for one in candidates if RUINED.intersection(one.illnesses)]


def _rates(candidates: Iterable[Repeats]) -> set[float]:
    return {one.rate for one in candidates if one.rate is not None}
