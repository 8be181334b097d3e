"""The candidates of a sweep: how they stand, which colour each has, and what became of them over the swept values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.config.commands import value_text
from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.doctor.examination import Report
from agent_tunix.lab.doctor.records import Accuracy, RunRecords, late
from agent_tunix.lab.doctor.repeats import RATE, Repeats
from agent_tunix.lab.doctor.seeds import Interval, mean_of, over_seeds
from agent_tunix.lab.doctor.sweep import SweepReport, end_of, examine_sweep
from agent_tunix.lab.report.chart import Chart, Colour, Mark, Series, hue, on_scale, places
from agent_tunix.lab.report.verdict import Standing, over_its_seeds, percent
from agent_tunix.lab.sweep.sweep_folder import job_folders, labels, listed_jobs, overrides_of
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.progress import counted
from agent_tunix.training.run_folder import finite
from agent_tunix.types import Record

DASHES = 4  # patterns of lines, the first of which has none
WIDE = 8  # times the least value: from there on values are laid out by their logarithm
ABSENT: Colour = ("#767676", "#9a9a9a")
SINGLE = "Held-out accuracy at the end of each candidate, with 95 % intervals."
SEVERAL = "Held-out accuracy at the end of each candidate, its mean over the seeds with 95 % intervals. Small: single seeds."


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A job of a sweep; one that has not begun has no run."""

    name: str
    label: str
    status: str
    settings: Mapping[str, Any]
    colour: Colour = ABSENT
    dash: int = 0
    run: RunRecords | None = None
    report: Report | None = None
    repeats: Repeats | None = None  # where it is one of several seeds, and not of seeds alone

    @property
    def first(self) -> Accuracy | None:
        seen = self.run.accuracies() if self.run else []
        return seen[0] if seen else None

    @property
    def end(self) -> Accuracy | None:
        return end_of(self.run) if self.run else None

    @property
    def mean(self) -> Interval | None:
        """Over the seeds of what it repeats, or with its own alone."""
        return self.repeats.accuracy if self.repeats else over_seeds([self.end]) if self.end else None

    @property
    def standing(self) -> Standing:
        return Standing(self.label, self.status, self.first, self.end)


def read_candidates(folder: Path) -> tuple[list[Candidate], SweepReport | None]:
    """All jobs of a sweep, those with records first; and what the doctor says of the whole."""
    runs, others = doctor.read_jobs(folder)
    unreadable = [  # their configuration is being written, or was cut short
        Candidate(job.name, f"job {job.name}", "config.yaml cannot be read", {})
        for job in job_folders(folder)
        if job.name in others
    ]
    report = examine_sweep(runs, others) if runs else None
    jobs = report.jobs if report else []
    compared = report.candidates if report and report.repeated and not report.seeds_alone else []
    repeats = {job: one for one in compared for job in one.jobs}
    settings = [repeats[job.name].settings if repeats else job.settings for job in jobs]
    found = [
        Candidate(
            job.name, job.label or f"job {job.name}", _status(run), own, *drawn, run, job.report, repeats.get(job.name)
        )
        for job, run, own, drawn in zip(jobs, runs.values(), settings, _colours(settings), strict=True)
    ]
    known = {candidate.name for candidate in [*found, *unreadable]}
    return [*found, *unreadable, *_not_begun(folder, known)], report


def ranks(report: SweepReport | None) -> dict[str, str]:
    """The jobs of the best candidate, and of those that noise does not tell from it."""
    if report is None:
        return {}
    names = {report.best: "best"} | dict.fromkeys(report.tied, "tied")
    return {job: names[one.name] for one in report.candidates if one.name in names for job in one.jobs}


def standings(candidates: Sequence[Candidate], report: SweepReport) -> tuple[Standing | None, list[Standing]]:
    """Of the best, and of those that noise does not tell from it; that of seeds alone takes the place of the best."""
    found = {}
    for one in report.candidates:
        own = [candidate.standing for candidate in candidates if candidate.name in one.jobs]
        found[one.name] = over_its_seeds(one.label, own if one.accuracy else []) if report.repeated else own[0]
    best = report.candidates[0].name if report.seeds_alone else report.best
    return found[best] if best else None, [found[name] for name in report.tied]


def _status(run: RunRecords) -> str:
    """How a candidate ended; one that was rolled back did not end at its own rate."""
    status = run.status
    return "rolled back" if status == "completed" and run.rolled_back else status


def _not_begun(folder: Path, known: set[str]) -> list[Candidate]:
    """Jobs that the sweep's own list names and that have no folder yet."""
    jobs = listed_jobs(folder)
    told = zip(jobs, labels([overrides_of(job) for job in jobs]), strict=True)
    return [
        Candidate(job["job"], label or f"job {job['job']}", str(job.get("status", "waiting")), {})
        for job, label in told
        if job["job"] not in known
    ]


def swept_key(settings: Sequence[Mapping[str, Any]]) -> str | None:
    """The key that a sweep is about: the learning rate, else the first of numbers, else the first."""
    keys = list(settings[0]) if settings else []
    numeric = [key for key in keys if all(finite(one.get(key)) for one in settings)]
    return next((key for key in (RATE, *numeric, *keys) if key in keys), None)


def _colours(settings: Sequence[Mapping[str, Any]]) -> list[tuple[Colour, int]]:
    """By the swept value: a scale for numbers, hues for names. What the other keys change is told by dashes."""
    key = swept_key(settings)
    if key is None:
        return [(hue(i), 0) for i in range(len(settings))]
    values = [one.get(key) for one in settings]
    groups = list(dict.fromkeys(_others(one, key) for one in settings))
    dashes = [groups.index(_others(one, key)) % DASHES for one in settings]
    if all(map(finite, values)):
        return list(zip(map(on_scale, places([float(value or 0) for value in values])), dashes, strict=True))
    names = list(dict.fromkeys(map(value_text, values)))
    return [(hue(names.index(value_text(value))), dash) for value, dash in zip(values, dashes, strict=True)]


def accuracy_over_values(candidates: Sequence[Candidate]) -> Chart | None:
    """Final accuracies with their intervals against the swept value; one series for each setting of the other keys."""
    begun = [one for one in candidates if one.run is not None]
    key = swept_key([one.settings for one in begun])
    if key is None:
        return None
    values = [one.settings.get(key) for one in begun]
    numeric = all(map(finite, values))
    names = [] if numeric else list(dict.fromkeys(map(value_text, values)))
    xs = [float(value or 0) if numeric else float(names.index(value_text(value))) for value in values]
    placed = sorted(zip(xs, begun, strict=True), key=lambda pair: pair[0])
    by_seeds = _by_seeds(placed)
    groups: dict[str, list[tuple[float, list[Candidate]]]] = {}
    for x, seeds in by_seeds:
        groups.setdefault(_others(seeds[0].settings, key), []).append((x, seeds))
    series = [_series(name, members, hue(i)) for i, (name, members) in enumerate(groups.items())]
    bases = {mean_of(firsts).share for _, seeds in by_seeds if (firsts := [one.first for one in seeds if one.first])}
    spread = numeric and min(xs) > 0 and max(xs) >= WIDE * min(xs)
    return Chart(
        "over-values",
        f"Accuracy by {key.rpartition('.')[2].replace('_', ' ')}",
        f"{SEVERAL if any(one.repeats for one in begun) else SINGLE} Hollow: not ended. Cross: no final accuracy.",
        series,
        x_label=key,
        percent=True,
        log_x=spread,
        log_x_switch=numeric and min(xs) > 0,
        categories=names,
        levels=[Mark(bases.pop(), "before training")] if len(bases) == 1 else [],
        crosses=[Mark(x, f"{one.label}: {one.status}") for x, one in placed if one.end is None],
    )


def _by_seeds(placed: Sequence[tuple[float, Candidate]]) -> list[tuple[float, list[Candidate]]]:
    """The jobs of each candidate, with their place."""
    found: dict[str, tuple[float, list[Candidate]]] = {}
    for x, one in placed:
        found.setdefault(one.repeats.name if one.repeats else one.name, (x, []))[1].append(one)
    return list(found.values())


def _series(name: str, members: Sequence[tuple[float, list[Candidate]]], colour: Colour) -> Series:
    """A point a candidate; where it has several seeds, their mean, and a small one for each of them."""
    points: list[Sequence[float]] = []
    notes, colours, hollow = list[str](), list[Colour](), list[float]()
    for x, seeds in members:
        ended = [(one, end) for one in seeds if (end := one.end) is not None]
        told = [f"{one.label}, {one.status}, {end.n} problems" for one, end in ended]
        repeats, mean = seeds[0].repeats, seeds[0].mean
        if mean is not None:
            points.append((x, mean.middle, mean.low, mean.high))
            notes += [f"{repeats.label}, mean over {counted(len(ended), 'seed')}"] if repeats else told
        if repeats is not None:
            points += [(x, end.share) for _, end in ended]
            notes += told
        hollow += [x] if any(one.status != "completed" for one, _ in ended) else []
        colours += [seeds[0].colour] * (len(points) - len(colours))
    return Series(f"over-values {name}", name or "held-out accuracy", points, colour, False, hollow, notes, colours)


def heat_table(candidates: Sequence[Candidate]) -> Record | None:
    """The accuracies as a grid, where exactly two keys are swept, and neither follows from the other."""
    begun = _by_seeds([(0.0, one) for one in candidates if one.run is not None])
    if not begun or len(begun[0][1][0].settings) != 2:
        return None
    across, down = begun[0][1][0].settings
    cells: dict[str, dict[str, Record]] = {}
    for _, seeds in begun:
        one, mean = seeds[0], seeds[0].mean
        missing = next((seed.status for seed in seeds if seed.end is None), one.status)
        row = cells.setdefault(value_text(one.settings[down]), {})
        row[value_text(one.settings[across])] = {
            "share": mean.middle if mean else None,
            "text": percent(mean.middle) if mean else missing,
        }
    columns = list(dict.fromkeys(value_text(seeds[0].settings[across]) for _, seeds in begun))
    if len(begun) <= max(len(columns), len(cells)):
        return None
    return {"across": across, "down": down, "columns": columns, "rows": cells}


def table(candidates: Sequence[Candidate], ranked: Mapping[str, str], pages: Mapping[str, str]) -> Record:
    """One row a job: what is shown in each cell, and the number by which it is sorted."""
    heads = ["job", "candidate", "accuracy", "95 % interval", "before", "reward", "KL", "updates", "seconds", "state"]
    rows = [_row(one, ranked.get(one.name, "")) | {"page": pages.get(one.name)} for one in candidates]
    return {"heads": heads, "rows": rows}


def _row(one: Candidate, rank: str) -> Record:
    end, first, run = one.end, one.first, one.run
    low, high = end.interval if end else (None, None)
    reward = late(run.values("reward/mean")) if run else None
    kl = late(run.values("kl")) if run and run.measures_kl else None
    seconds = run.summary.get("seconds") if run else None
    ills = sorted({f.illness for f in one.report.findings if f.severity != "mild"}) if one.report else []
    state = f"{one.status}: {run.error}" if run and run.error else one.status
    key = swept_key([one.settings])
    value = one.settings.get(key) if key else None
    cells = [
        (one.name, int(one.name) if one.name.isdecimal() else None),
        (one.label, value if finite(value) else None),
        (percent(end.share) if end else "-", end.share if end else None),
        (f"{100 * low:.1f} to {100 * high:.1f} %" if low is not None and high is not None else "-", low),
        (
            f"{percent(first.share)} ({interval_text(first.share, first.n)})" if first else "-",
            first.share if first else None,
        ),
        ("-" if reward is None else f"{reward:.3g}", reward),
        ("-" if kl is None else f"{kl:.2g}", kl),
        (str(run.reached) if run else "0", run.reached if run else 0),
        (f"{seconds:g}" if finite(seconds) else "-", seconds if finite(seconds) else None),
        (", ".join([state, *ills]), None),
    ]
    return {"id": one.name, "colour": one.colour, "rank": rank, "cells": cells}


def _others(settings: Mapping[str, Any], key: str) -> str:
    return ", ".join(f"{k.rpartition('.')[2]}={value_text(v)}" for k, v in settings.items() if k != key)
