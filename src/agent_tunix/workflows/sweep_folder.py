"""The folder of a sweep: beside the folders of its jobs `sweep.json`, with the overrides and the results of each."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from agent_tunix.engine.metrics import Record, replace_text
from agent_tunix.workflows.diagnosis.records import read_object

APART = "apart"  # how jobs ran that no sweep of ours has trained
RESULTS = ("status", "steps", "first_eval", "best_eval", "final_eval", "seconds", "rollbacks")


def write_index(
    folder: Path,
    overrides: Mapping[str, Sequence[str]] | None = None,
    mode: str | None = None,
    running: Collection[str] = (),
) -> Record:
    """Writes sweep.json from what the jobs' folders say; `overrides` names jobs, some of which may not have begun.

    The caller names those that are `running`, all at once: their folders do not exist yet, or still tell of an earlier
    attempt.
    """
    index = read_index(folder)
    known = {job["job"]: job for job in index["jobs"]}
    at_once = {name: job["at_once"] for name, job in known.items() if "at_once" in job}
    at_once |= dict.fromkeys(running, len(running))
    known |= {name: {"job": name, "overrides": list(given)} for name, given in (overrides or {}).items()}
    for path in job_folders(folder):
        known.setdefault(path.name, {"job": path.name, "overrides": []})
    known |= {name: known[name] | {"at_once": count} for name, count in at_once.items()}
    jobs = [_entry(known[name], folder / name, name in running) for name in sorted(known, key=int)]
    index = {"mode": mode or index["mode"], "jobs": jobs}
    replace_text(folder / "sweep.json", json.dumps(index, indent=2) + "\n")
    return index


def _entry(known: Record, folder: Path, running: bool) -> Record:
    """A job as it stands, with the overrides that the sweep gave it: if it was resumed by itself, it was given others."""
    found = {"status": "running"} if running else results(folder)
    return known | found | ({"overrides": known["overrides"]} if known.get("overrides") else {})


def read_index(folder: Path) -> Record:
    """What is there of sweep.json; the jobs' own folders make up for one that cannot be read."""
    found = {"mode": APART, "jobs": [], **read_object(folder / "sweep.json")}
    jobs = found["jobs"] if isinstance(found["jobs"], list) else []
    numbered = [job for job in jobs if isinstance(job, dict) and str(job.get("job")).isdecimal()]
    return found | {"jobs": [job | {"job": str(job["job"])} for job in numbered]}


def overrides_of(job: Record) -> list[str]:
    """What sweep.json says that a job was started with."""
    found = job.get("overrides")
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def labels(overrides: Sequence[Sequence[str]]) -> list[str]:
    """What tells jobs apart: the overrides that not all of them have, without their sections."""
    common = set.intersection(*map(set, overrides)) if overrides else set()
    own = [[override for override in one if override not in common] for one in overrides]
    return [" ".join(re.sub(r"^[\w.]*\.(?=\w+=)", "", override) for override in one) for one in own]


def job_folders(folder: Path) -> list[Path]:
    """The numbered folders of jobs that have begun, in the order of their numbers."""
    begun = (path for path in folder.iterdir() if path.name.isdecimal() and (path / "config.yaml").is_file())
    return sorted(begun, key=lambda path: int(path.name))


def results(folder: Path) -> Record:
    """What came of a job that is not running; one that has begun and has no summary was killed."""
    summary = read_object(folder / "summary.json")
    if "status" not in summary:
        return {"status": "interrupted" if (folder / "config.yaml").exists() else "waiting"}
    given = {"overrides": summary["overrides"]} if summary.get("overrides") else {}
    return given | {key: summary.get(key) for key in RESULTS}
