"""`agent-tunix doctor <folder>`: names the illness of a run or a sweep, shows the evidence, prints the command to try."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.examination import Report, examine
from agent_tunix.lab.doctor.finding import Finding
from agent_tunix.lab.doctor.records import RunRecords, read_run
from agent_tunix.lab.doctor.remedies import OwnOverrides
from agent_tunix.lab.doctor.repeats import numbered
from agent_tunix.lab.doctor.sweep import SweepReport, examine_sweep
from agent_tunix.lab.sweep.sweep_folder import job_folders, listed_jobs, overrides_of
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.progress import counted, say

USAGE = "usage: agent-tunix doctor <run or sweep folder> [--json]"
VERDICTS = {
    "ill": "ill",
    "healthy": "healthy",
    "undecided": "nothing wrong is seen, and no gain beyond noise: train longer, or evaluate on more problems",
    "too short": "too short to judge",
}


def main(arguments: Sequence[str], console: Console) -> None:
    """Reads the command line; a folder with numbered runs in it is a sweep."""
    folders = [Path(argument) for argument in arguments if not argument.startswith("-")]
    options = {argument for argument in arguments if argument.startswith("-")}
    if options & {"--help", "-h"}:
        print(USAGE)
        return
    if len(folders) != 1 or options - {"--json"}:
        raise UserError(USAGE)
    folder = folders[0]
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.\n{USAGE}")
    report = diagnose(folder)
    if "--json" in options:
        print(json.dumps(as_json(folder, report), indent=2))
    else:
        show(folder, report, console)


def diagnose(folder: Path) -> Report | SweepReport:
    jobs = job_folders(folder)
    for ramp in filter(is_ramp, (folder, *jobs)):
        raise UserError(
            f"{ramp} is a ramp of lr-find, which ends in collapse on purpose; see its lr_find.json or report.html."
        )
    if (folder / "tune.json").is_file():
        raise UserError(f"{folder} is a search; give one of its stages, as in {folder / '1-coarse-rate'}.")
    if jobs and not (folder / "config.yaml").is_file():
        runs, others = read_jobs(folder)
        return examine_sweep(runs, others) if runs else examine(read(jobs[0]))  # which says why it cannot be read
    return examine(read(folder))


def is_ramp(folder: Path) -> bool:
    return (folder / "lr_find.json").is_file()


def read(folder: Path) -> RunRecords:
    """A run's records, with the overrides that lead to its configuration again."""
    run = read_run(folder)
    return dataclasses.replace(run, overrides=OwnOverrides(run.config))


def read_jobs(folder: Path) -> tuple[dict[str, RunRecords], dict[str, list[str]]]:
    """The records of a sweep's jobs, and the overrides of those without: not begun, or with a configuration cut short."""
    begun = job_folders(folder)
    given = {job.name: list[str]() for job in begun} | {job["job"]: overrides_of(job) for job in listed_jobs(folder)}
    runs = {}
    for job in begun:
        with contextlib.suppress(UserError):
            runs[job.name] = dataclasses.replace(read(job), given=given[job.name])
    return runs, {name: given[name] for name in sorted(given.keys() - runs.keys(), key=int)}


def as_json(folder: Path, report: Report | SweepReport) -> dict[str, Any]:
    kind = "sweep" if isinstance(report, SweepReport) else "run"
    return {"folder": str(folder), "kind": kind, **dataclasses.asdict(report)}


def show(folder: Path, report: Report | SweepReport, console: Console) -> None:
    if isinstance(report, SweepReport):
        show_sweep(folder, report, console)
    else:
        show_run(folder, report, console)


def show_run(folder: Path, report: Report, console: Console) -> None:
    say(console, f"{folder}: {VERDICTS[report.verdict]}\n{report.judged_by}\n")
    width = max(map(len, report.vitals))
    for name, value in report.vitals.items():
        say(console, f"  {name:{width}}  {value}")
    _show_findings(report.findings, console)


def show_sweep(folder: Path, report: SweepReport, console: Console) -> None:
    count = len(report.jobs) + len(report.others)
    say(console, f"{folder}: a sweep of {counted(count, 'job')}\n")
    width = max(len(job.label) for job in report.jobs)
    for job in report.jobs:
        accuracy = "-"
        if job.accuracy is not None and job.problems is not None:
            accuracy = f"{job.accuracy:.1%} ({interval_text(job.accuracy, job.problems)})"
        state = ", ".join(sorted(job.illnesses)) or job.report.verdict
        state += "" if job.ended else f" ({job.status} after {counted(job.steps, 'update')})"
        say(console, f"  {job.name:>3}  {job.label:{width}}  held-out accuracy {accuracy:>20}  {state}")
        if error := job.report.vitals.get("ended by"):
            say(console, f"       ended by: {error}")
    if report.others:
        say(console, f"  not begun, or unreadable: {', '.join(report.others)}")
    if said := _on_candidates(report) if report.repeated else _on_best(report):
        say(console, f"\n{said}")
    _show_findings(report.findings, console)


def _on_best(report: SweepReport) -> str:
    best = next((job for job in report.jobs if job.name == report.best), None)
    if best is None:
        return ""
    tied = f"; within noise of it: {', '.join(report.tied)}" if report.tied else ""
    label = f"  {best.label}" if best.label else ""  # of a single job nothing differs
    return f"Best{_so_far(report)}: job {best.name}{label}  ({best.accuracy:.1%}){tied}"


def _on_candidates(report: SweepReport) -> str:
    """The best over its seeds, or what seeds alone come to; and which candidates a diverged seed rules out."""
    named = {one.name: one for one in report.candidates}
    first = report.candidates[0] if report.seeds_alone else named.get(report.best or "")
    lines = [f"{one.not_ranked}." for one in report.candidates if one.diverged]
    if first and (mean := first.accuracy):
        seeds = counted(len(first.measured), "seed")
        said = f"Best{_so_far(report)}: {first.label} (mean {mean.middle:.1%} over {seeds}: {numbered(first.measured)})"
        if tied := [f"{named[name].label} ({numbered(named[name].measured)})" for name in report.tied]:
            said += f"; within noise of it: {', '.join(tied)}"
        if report.seeds_alone:
            interval = f"{mean.middle:.1%} ({100 * mean.low:.1f} to {100 * mean.high:.1f})"
            said = f"{seeds}{_so_far(report)}: {interval}. A better seed is luck."
        lines.insert(0, said)
    return "\n".join(lines)


def _so_far(report: SweepReport) -> str:
    return "" if report.ended else " so far"


def _show_findings(findings: Sequence[Finding], console: Console) -> None:
    for number, finding in enumerate(findings, start=1):
        say(console, f"\n{number}. {finding.illness} ({finding.severity})\n   {finding.evidence}\n   try: {finding.remedy}")
