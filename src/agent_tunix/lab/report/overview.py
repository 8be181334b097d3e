"""The page of several runs: how each stands, and their curves laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.report.chart import hue
from agent_tunix.lab.report.contents import contents, kind_of
from agent_tunix.lab.report.curves import Line, overlaid_charts
from agent_tunix.lab.report.plain import bounded, plain
from agent_tunix.lab.report.settings import settings
from agent_tunix.lab.report.verdict import Verdict, percent
from agent_tunix.lab.runs import runs
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.progress import counted
from agent_tunix.types import Record

HEADS = ["page", "run", "accuracy", "95 % interval", "updates", "last write", "state"]
DRAWN = 12  # whose curves are laid over each other: more cannot be told apart


def overview(folders: Sequence[Path]) -> Record:
    """Of runs, and of sweeps and tunes, which have a row without curves. The pages of single ones are 1/, 2/ and so on."""
    rows, lines = [], list[Line]()
    read = [_read(folder) for folder in folders]
    drawn = [i for i, run in enumerate(read) if run is not None][-DRAWN:]
    for number, (folder, run) in enumerate(zip(folders, read, strict=True), start=1):
        colour = hue(drawn.index(number - 1)) if number - 1 in drawn else ("#767676", "#9a9a9a")
        rows.append(_row(number, folder, run) | {"colour": colour, "live": f"{number}/"})
        if run is not None and number - 1 in drawn:
            lines.append(Line(str(number), folder.name, colour, drawn.index(number - 1) // 8 % 4, run))
    section = {
        "id": "runs",
        "title": "",
        "charts": overlaid_charts(lines) if lines else [],
        "legend": [{"id": line.id, "name": line.label, "colour": line.colour, "dash": line.dash} for line in lines],
        "table": {"heads": HEADS, "rows": rows},
    }
    states = [row["cells"][-1][0] for row in rows]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    page = {
        "verdict": Verdict("going" if runs.RUNNING in states else "unsure", counted(len(rows), "run"), f"{told}."),
        "tiles": [],
        "sections": [section],
        "settings": settings([run for run in read if run is not None]),
    }
    return plain(
        {"kind": "folder", "name": ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))} | bounded(page)
    )


def _read(folder: Path) -> RunRecords | None:
    """The records of a run; None of a sweep or a tune, and of what cannot be read, which the next look may find mended."""
    try:
        return runs.read_run(folder) if kind_of(folder) == "run" else None
    except (UserError, OSError):
        return None


def _row(number: int, folder: Path, run: RunRecords | None) -> Record:
    if run is None:
        return {"id": str(number), "rank": "", "cells": _of_others(number, folder)}
    seen, age = run.accuracies(), runs.age_of(folder)
    last = seen[-1] if seen else None
    cells = [
        (str(number), number),
        (folder.name, None),
        (percent(last.share) if last else "-", last.share if last else None),
        (f"{interval_text(last.share, last.n)} %" if last else "-", last.interval[0] if last else None),
        (str(run.reached), run.reached),
        (f"{runs.ago(age)} ago", age),
        (runs.status_of(folder, run), None),
    ]
    return {"id": str(number), "rank": "", "cells": cells}


def _of_others(number: int, folder: Path) -> list[tuple[str, float | None]]:
    try:
        state = str(contents(folder)["verdict"]["lead"])
    except (UserError, OSError):
        state = runs.UNREADABLE
    return [(str(number), number), (folder.name, None), *[("-", None)] * 4, (state, None)]
