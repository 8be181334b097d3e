"""All that a report shows of a run, a sweep or a tune, as one record that is plain JSON; the page draws it.

Only the folder is read, and as it is found: a run that was killed, is still writing, or has lost a file gets as much of a
report as there is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from agent_tunix.config.commands import value_text
from agent_tunix.errors import UserError
from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.doctor.examination import examine
from agent_tunix.lab.doctor.finding import Finding
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.doctor.sweep import SweepReport
from agent_tunix.lab.report.candidates import (
    Candidate,
    accuracy_over_values,
    heat_table,
    ranks,
    read_candidates,
    standings,
    table,
)
from agent_tunix.lab.report.curves import Line, overlaid_charts, run_charts
from agent_tunix.lab.report.finder import finder_sections, finder_verdict, ramps_verdict
from agent_tunix.lab.report.plain import bounded, plain
from agent_tunix.lab.report.samples import columns
from agent_tunix.lab.report.settings import settings
from agent_tunix.lab.report.verdict import Verdict, percent, run_verdict, sweep_verdict, with_interval
from agent_tunix.lab.sweep.sweep_folder import job_folders
from agent_tunix.training.run_folder import finite, read_object, read_text
from agent_tunix.types import Record

Tile = tuple[str, str, str]  # name, value, detail


def kind_of(folder: Path) -> str | None:
    """What a folder holds: a tune, a run or a sweep; None for what is none of them, or not yet."""
    if (folder / "tune.json").is_file():
        return "tune"
    if (folder / "config.yaml").is_file():
        return "run"
    return "sweep" if folder.is_dir() and (job_folders(folder) or (folder / "sweep.json").is_file()) else None


def contents(folder: Path) -> Record:
    """The record of a page; raises UserError where there is nothing to report on."""
    kind = kind_of(folder)
    if kind is None:
        raise UserError(
            f"{folder} holds no run, sweep or tune: none of config.yaml, sweep.json and tune.json is a file there. "
            "Give runs/<time> as training printed it, or multirun/<time> for a sweep."
        )
    page = {"run": _run, "sweep": _sweep, "tune": _tune}[kind](folder)
    named = {"kind": kind, "name": folder.resolve().name}
    return plain(named | bounded(page))


def _run(folder: Path) -> Record:
    run = doctor.read(folder)
    report = examine(run)
    section = {"id": "run", "title": "", "charts": run_charts(run), "samples": _samples([("", folder)])}
    suggestion = finder_verdict(folder)
    findings = [_finding(finding) for finding in report.findings]
    judged = {} if suggestion else {"findings": findings, "judged_by": report.judged_by, "vitals": report.vitals}
    return {
        "verdict": suggestion or run_verdict(run, report),
        "tiles": _tiles(run, ramp=suggestion is not None),
        "sets": _on_sets(run),
        **judged,
        "next": _commands(run.summary.get("advice")),
        "sections": [*finder_sections(folder), section],
        "settings": settings([run]),
    }


def _sweep(folder: Path) -> Record:
    section, verdict, candidates, report = _sweep_section(folder, folder)
    mode = read_object(folder / "sweep.json").get("mode")
    runs = [one.run for one in candidates if one.run is not None]
    ramps = any(doctor.is_ramp(folder / one.name) for one in candidates)
    own = [_finding(f, one.label) for one in candidates if one.report for f in one.report.findings]
    judged = {} if ramps else {"findings": [*map(_finding, report.findings if report else []), *own]}
    jobs = "jobs" if report and report.repeated else "candidates"
    tiles = [(jobs, str(len(candidates)), ""), *([("run as", str(mode), "")] if mode else [])]
    return {
        "verdict": verdict,
        "tiles": tiles + _common(list(map(_about, runs))),
        **judged,
        "sections": [section],
        "settings": settings(runs),
    }


def _sweep_section(folder: Path, root: Path) -> tuple[Record, Verdict, list[Candidate], SweepReport | None]:
    candidates, report = read_candidates(folder)
    suggestions = ramps_verdict({one.label: folder / one.name for one in candidates})
    if suggestions and report:
        report = dataclasses.replace(report, best=None, tied=[])
    begun = [one for one in candidates if one.run is not None]
    best, tied = standings(candidates, report) if report else (None, [])
    ranked = ranks(report)
    lines = [Line(one.name, one.label, one.colour, one.dash, one.run) for one in begun if one.run]
    overlaid = overlaid_charts(lines) if lines else []
    first = accuracy_over_values(candidates)
    ordered = sorted(begun, key=lambda one: ranked.get(one.name) != "best")
    written = [one.name for one in begun if (folder / one.name / "report.html").is_file()]
    pages = {name: str(Path(folder.relative_to(root), name, "report.html").as_posix()) for name in written}
    section = {
        "id": folder.name,
        "title": "",
        "charts": [*([first] if first else []), *overlaid],
        "legend": [{"id": one.name, "name": one.label, "colour": one.colour, "dash": one.dash} for one in begun],
        "heat": heat_table(candidates),
        "table": table(candidates, ranked, pages),
        "samples": _samples([(one.label, folder / one.name) for one in ordered]),
    }
    findings, repeats = (report.findings, report.candidates if report.repeated else []) if report else ([], [])
    verdict = sweep_verdict([one.standing for one in candidates], best, tied, findings, repeats)
    return section, suggestions or verdict, candidates, report


def _tune(folder: Path) -> Record:
    tune = read_object(folder / "tune.json")
    stages = tune.get("stages")
    listed = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    told = [_stage(folder, stage) for stage in listed]
    sections = [section for section, _ in told]
    begun = [[one.run for one in candidates if one.run is not None] for _, candidates in told]
    status, best = str(tune.get("status", "unfinished")), tune.get("best")
    mood, lead = "going", f"Tuning: {status}"
    if status == "completed":
        mood, lead = ("good", "Tuned") if best else ("bad", "Nothing found")
        mood, lead = ("unsure", "Nothing gained") if best and tune.get("gained") is False else (mood, lead)
    alive = "The search is still at work, or was killed. " if status == "running" else ""
    said = tune.get("verdict") or f"{alive}No verdict yet: the stages below are as far as it has come."
    tiles = [("status", status, ""), ("budget", str(tune.get("budget", "-")), ""), ("stages", str(len(sections)), "")]
    return {
        "verdict": Verdict(mood, lead, str(said)),
        "tiles": [*tiles, *((key, _shown(value), "") for key, value in _items(best))],
        "next": _commands([tune.get("command")]),
        "best_yaml": _best_yaml(folder, best),
        **({"findings": _of_stages(told)} if any(begun) else {}),
        "sections": sections,
        "settings": settings(next(filter(None, reversed(begun)), [])),
    }


def _of_stages(told: Sequence[tuple[Record, Sequence[Candidate]]]) -> list[Record]:
    """What ails single candidates; one that a later stage took over is told of where it was trained."""
    found: dict[Finding, Record] = {}
    for section, candidates in told:
        for one in candidates:
            for finding in one.report.findings if one.report else []:
                found.setdefault(finding, _finding(finding, f"{section['title']}: {one.label}"))
    return list(found.values())


def _stage(folder: Path, stage: Record) -> tuple[Record, list[Candidate]]:
    """One stage of a tune: what it concluded, and the charts of its sweep, as soon as that has begun."""
    name = str(stage.get("folder") or stage.get("name") or "")
    # Looked up among what is there: a name from a file may be any text, also one that leads elsewhere.
    inside = next((path for path in folder.iterdir() if path.name == name and path.is_dir()), None)
    said = {
        "id": name,
        "title": str(stage.get("title") or stage.get("name") or "Stage"),
        "text": str(stage.get("conclusion") or "No conclusion yet."),
        "chosen": f"{stage.get('key')} = {_shown(stage['chosen'])}" if stage.get("chosen") is not None else "",
    }
    if inside is None or kind_of(inside) != "sweep":
        return {"charts": []} | said, []
    section, _, candidates, _ = _sweep_section(inside, folder)
    return section | said, candidates


def _best_yaml(folder: Path, best: Any) -> str:
    path = folder / "best.yaml"
    if path.is_file():
        return read_text(path)
    return yaml.safe_dump(plain(best), sort_keys=False) if best else ""


def _tiles(run: RunRecords, ramp: bool) -> list[Tile]:
    """The numbers that sum a run up; a ramp goes by the rates it came through, its configuration names the last."""
    tiles = []
    for key, name in (("accuracy", "held-out accuracy"), ("sampled_accuracy", "sampled accuracy")):
        seen = run.accuracies(key)
        if seen:
            low, high = seen[-1].interval
            ends = [percent(seen[0].share), percent(seen[-1].share)][-len(seen) :]
            tiles.append((name, " → ".join(ends), f"95 % interval {100 * low:.1f} to {100 * high:.1f} %"))
    seconds = run.summary.get("seconds")
    took, lost = f"in {seconds:,.0f} s" if finite(seconds) else "", f"{run.dropped} dropped" if run.dropped else ""
    tiles.append(("updates", str(run.reached), ", ".join(filter(None, [run.status, took, lost]))))
    rate, schedule = _shown(run.setting("optimizer.learning_rate")), _shown(run.setting("scheduler.scheduler_name"))
    if ramp:
        rates = run.values("lr")
        rate, schedule = f"{rates[0]:.2g} → {rates[-1]:.2g}" if rates else "-", "a ramp"
    tiles.append(("learning rate", rate, f"{_shown(run.setting('optimizer.optimizer_name'))}, {schedule}"))
    return [*tiles, *_about(run)]


def _on_sets(run: RunRecords) -> list[list[str]]:
    """Of each further test set its name, the first and the last accuracy with intervals, and the number of problems."""
    rows = []
    for name, seen in run.on_sets().items():
        ends = [f"{with_interval(one)} (update {one.step})" for one in (seen[0], seen[-1])]
        rows.append([name, *ends, str(seen[-1].n)])
    return rows


def _about(run: RunRecords) -> list[Tile]:
    """What was trained, and on what."""
    size, rank = run.setting("model.model_size"), run.setting("model.lora_rank")
    method = "supervised" if run.supervised else "GRPO"
    adapters = "all weights" if rank == 0 else f"LoRA rank {_shown(rank)}"
    model = f"{_shown(run.setting('model.model_family'))} {_shown(size)}"
    data = run.setting("data.path") or run.setting("data.source")
    said = run.metadata
    name, others = said.pop("experiment_name", ""), ", ".join(said.values())
    own = [("experiment", name or others, others if name else "")] if name or others else []
    return [*own, ("model", model, adapters), ("data", _shown(data), method)]


def _common(tiles: Sequence[Sequence[Tile]]) -> list[Tile]:
    """The tiles that all runs have; what differs between them is what they are told apart by."""
    return [tile for tile in tiles[0] if all(tile in others for others in tiles)] if tiles else []


def _samples(runs: Sequence[tuple[str, Path]]) -> list[Record]:
    found = [{"name": label, "columns": columns(folder)} for label, folder in runs]
    return [one for one in found if one["columns"]]


def _finding(finding: Finding, candidate: str = "") -> Record:
    return {**vars(finding), "candidate": candidate}


def _commands(found: Any) -> list[str]:
    return [line for line in found if isinstance(line, str) and line] if isinstance(found, list) else []


def _items(found: Any) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in found.items()] if isinstance(found, dict) else []


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value  # as it is: value_text would quote what a command line has to
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else value_text(value)
