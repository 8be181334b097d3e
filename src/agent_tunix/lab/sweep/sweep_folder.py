"""The folder of a sweep: beside the folders of its jobs `sweep.json`, with the overrides and the results of each.

It also keeps what was decided of jobs that one program can train. Programs of other sizes add up in another order, so a
sweep that goes on must not decide again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.errors import UserError
from agent_tunix.training.run_folder import objects, read_object, read_text, replace_text
from agent_tunix.types import Record

APART = "apart"  # how jobs ran that no sweep of ours has trained
RESULTS = ("status", "steps", "first_eval", "best_eval", "final_eval", "seconds", "rollbacks")


@dataclasses.dataclass(frozen=True)
class Group:
    """Jobs that one program can train, by their numbers, and how: so many at once, with prompts padded to one width.

    It holds on the way to a rest after `until` updates, or to the end. Jobs that are trained one by one have widths of their
    own.
    """

    jobs: tuple[str, ...]
    until: int | None
    at_once: int
    prompt_width: int

    @classmethod
    def from_json(cls, saved: Any) -> Group:
        """What `dataclasses.asdict` wrote; raises a TypeError, KeyError or ValueError for anything else."""
        jobs, until = tuple(saved["jobs"]), saved["until"]
        numbers = saved["at_once"], saved["prompt_width"], *([] if until is None else [until])
        if not all(type(name) is str and name.isdecimal() for name in jobs):
            raise ValueError(f"jobs {jobs} are not numbers")
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError(f"{numbers} are not positive numbers")
        return cls(jobs, until, saved["at_once"], saved["prompt_width"])

    def parts(self) -> list[tuple[str, ...]]:
        """The jobs of each program; the last may have fewer."""
        return [self.jobs[start : start + self.at_once] for start in range(0, len(self.jobs), self.at_once)]


def write_index(
    folder: Path,
    overrides: Mapping[str, Sequence[str]] | None = None,
    mode: str | None = None,
    running: Collection[str] = (),
    groups: Sequence[Group] | None = None,
) -> Record:
    """Writes sweep.json from what the jobs' folders say; `overrides` names jobs, some of which may not have begun.

    The caller names those that are `running`, all at once: their folders do not exist yet, or still tell of an earlier
    attempt. `groups` takes the place of what was decided so far.
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
    decided = index["groups"] if groups is None else [dataclasses.asdict(group) for group in groups]
    index = {"mode": mode or index["mode"], "groups": decided, "jobs": jobs}
    replace_text(folder / "sweep.json", json.dumps(index, indent=2) + "\n")
    return index


def _entry(known: Record, folder: Path, running: bool) -> Record:
    """A job as it stands, with the overrides that the sweep gave it: if it was resumed by itself, it was given others."""
    found = {"status": "running"} if running else results(folder)
    return known | found | ({"overrides": known["overrides"]} if known.get("overrides") else {})


def read_index(folder: Path) -> Record:
    """The record in sweep.json, or an empty one; refuses one that is damaged, without which a sweep cannot go on."""
    path = folder / "sweep.json"
    if not os.path.lexists(path):
        return {"mode": APART, "groups": [], "jobs": []}
    try:
        (found,) = objects([read_text(path)])
        found = {"groups": [], **found}  # which earlier versions did not write
        list(map(Group.from_json, found["groups"]))
        whole = isinstance(found["mode"], str) and found["jobs"] == _numbered(found["jobs"])
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise UserError(
            f"{path} cannot be read, and a sweep cannot go on without it: it says how its jobs are trained together. Choose "
            f"another folder,\nor move the file away: jobs then go on, but how is decided anew, which changes last digits."
        )
    return found


def groups_of(index: Record) -> list[Group]:
    """What was decided, the latest last."""
    return [Group.from_json(saved) for saved in index["groups"]]


def listed_jobs(folder: Path) -> list[Record]:
    """The jobs that sweep.json names, as far as it can be read; the jobs' own folders make up for what cannot."""
    return _numbered(read_object(folder / "sweep.json").get("jobs"))


def _numbered(jobs: Any) -> list[Record]:
    found = [job for job in jobs if isinstance(job, dict)] if isinstance(jobs, list) else []
    return [job | {"job": str(job["job"])} for job in found if str(job.get("job")).isdecimal()]


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
