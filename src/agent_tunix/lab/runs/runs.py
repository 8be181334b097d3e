"""`agent-tunix runs [folders]`: the runs that lie in some folders, with status, best accuracy and age.

A run that is under way keeps its folder to itself by a lock, which a kill releases: so what has no end and no lock has
crashed. A disk that knows no locks, as some shared ones do not, hides that a run is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from agent_tunix.config import output_folders
from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.records import Accuracy, RunRecords, read_run
from agent_tunix.training.intervals import interval_text
from agent_tunix.training.progress import counted, say

USAGE = "usage: agent-tunix runs [folder ...] [--json]        (without a folder: runs and multirun)"
HERE = ("runs", "multirun")
DEPTH = 3  # of a tune's jobs: tune, stage, job
RECORDS = ("summary.json", "metrics.jsonl", "evals.jsonl", "config.yaml")
RUNNING, CRASHED, UNREADABLE = "running", "crashed", "unreadable"
UNITS = (("d", 86400), ("h", 3600), ("min", 60))


@dataclasses.dataclass(frozen=True)
class Listed:
    """A run as it is listed; `age` counts the seconds since it was last written to."""

    folder: Path
    status: str
    updates: int
    first: Accuracy | None
    best: Accuracy | None
    age: float
    model: str
    data: str
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)  # what its user has said of it


def main(arguments: Sequence[str], console: Console) -> None:
    given = [Path(argument) for argument in arguments if not argument.startswith("-")]
    options = {argument for argument in arguments if argument.startswith("-")}
    if options & {"--help", "-h"}:
        print(USAGE)
        return
    if options - {"--json"}:
        raise UserError(USAGE)
    if missing := [folder for folder in given if not folder.is_dir()]:
        raise UserError(f"{missing[0]} is not a folder.\n{USAGE}")
    folders = given or [Path(name) for name in HERE if Path(name).is_dir()]
    found = listed(folders)
    if "--json" in options:
        print(json.dumps([as_json(one) for one in found], indent=2))
    elif found:
        show(found, console)
    else:
        where = " and ".join(map(str, folders)) or "the working directory"
        say(console, f"There is no run in {where}. Training makes one: agent-tunix train +experiment=quick_test")


def listed(folders: Sequence[Path]) -> list[Listed]:
    """All runs in some folders, those last written to at the end."""
    found = [_listed(run) for run in dict.fromkeys(run for folder in folders for run in inside(folder))]
    return sorted(found, key=lambda one: -one.age)


def inside(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The folders of runs at or below one, down to the jobs of a search."""
    if (folder / "config.yaml").is_file():
        yield folder
        return
    with contextlib.suppress(OSError):  # it may not be read, or is gone by now
        for path in sorted(folder.iterdir()) if depth else ():
            if path.is_dir() and not path.name.startswith("."):
                yield from inside(path, depth - 1)


def _listed(folder: Path) -> Listed:
    age = age_of(folder)
    try:
        run = read_run(folder)
    except UserError:
        return Listed(folder, UNREADABLE, 0, None, None, age, "-", "-")
    seen = run.accuracies()
    best = max(seen, key=lambda one: one.share, default=None)
    model = f"{run.setting('model.model_family')} {run.setting('model.model_size')}"
    data = str(run.setting("data.path") or run.setting("data.task") or run.setting("data.source"))
    return Listed(
        folder, status_of(folder, run), run.reached, seen[0] if seen else None, best, age, model, data, run.metadata
    )


def age_of(folder: Path) -> float:
    """Seconds since a run was last written to."""
    return time.time() - max((os.stat(folder / name).st_mtime for name in RECORDS if (folder / name).exists()), default=0.0)


def status_of(folder: Path, run: RunRecords) -> str:
    """As the run's summary has it; of one without, or resumed since, whether a process is at work on it."""
    if run.status != "unfinished":
        return run.status
    return RUNNING if output_folders.is_claimed(folder) else CRASHED


def as_json(one: Listed) -> dict[str, object]:
    best = one.best and {
        "step": one.best.step,
        "accuracy": one.best.share,
        "interval": list(one.best.interval),
        "n": one.best.n,
    }
    return vars(one) | {
        "folder": str(one.folder),
        "best": best,
        "first": one.first and one.first.share,
        "age": round(one.age),
    }


def show(found: Sequence[Listed], console: Console) -> None:
    """In 80 columns, where the folders have the names that training gives them."""
    names = [str(one.folder) for one in found]
    width = max(map(len, names))
    head = f"{'run':{width}}  {'status':11}  {'updates':>7}  {'best accuracy':20}  age"
    say(console, head)
    for name, one in zip(names, found, strict=True):
        best = f"{one.best.share:.1%} ({interval_text(one.best.share, one.best.n)})" if one.best else "-"
        say(console, f"{name:{width}}  {one.status:11}  {one.updates:>7}  {best:20}  {ago(one.age)}")
        if one.metadata:
            say(console, f"{'':{width}}  {'; '.join(one.metadata.values())}")
    say(
        console,
        f"\n{counted(len(found), 'run')}. Accuracy is held-out, with its 95 % interval; age is since the last write.",
    )
    if any(one.status == CRASHED for one in found):
        last = [one for one in found if one.status == CRASHED][-1]
        say(console, f"What crashed goes on from its last checkpoint: agent-tunix train training.resume={last.folder}")


def ago(seconds: float) -> str:
    for unit, length in UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
