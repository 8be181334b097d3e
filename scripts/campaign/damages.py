"""Damages: something in a run's folder is not what was written, and a command reads it.

Promised: the command refuses it by name and leaves the folder as it was, and a resume that follows the advice ends in the
same bits; or what it gives is what it gives of the undamaged run, never other numbers in silence. An earlier checkpoint is
taken where the last is no more there, as after a kill.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from campaign.cases import Verdict
from campaign.commands import Outcome, run
from campaign.files import OF_FILES, OF_FOLDERS
from campaign.runs import (
    EVALUATE,
    EXPORT,
    FROM_RUN,
    HALFWAY,
    RECORDS,
    RESUME,
    SAVED,
    STEPS,
    Scene,
    changes,
    content,
    differences,
    half_written,
    records,
    weights,
)

LAST = f"run/checkpoints/{HALFWAY}"
PLACES = {  # patterns of files, and how often each kind has its turn
    "adapters and moments": ([f"{LAST}/state/ocdbt.process_0/d/*", f"{LAST}/state/d/*"], 6),
    "digest": ([f"{LAST}/progress/metadata"], 3),
    "metadata": (
        [
            *(f"{LAST}/{name}" for name in ("_CHECKPOINT_METADATA", "commit_success.txt", "progress/commit_success.txt")),
            *(f"{LAST}/state/{name}" for name in ("_METADATA", "_sharding", "commit_success.txt", "manifest.ocdbt")),
            *(f"{LAST}/state/{name}" for name in ("array_metadatas/process_0", "ocdbt.process_0/manifest.ocdbt")),
        ],
        4,
    ),
    "folders": (
        [LAST, "run/checkpoints", *(f"{LAST}/{name}" for name in ("state", "progress", "state/ocdbt.process_0/d"))],
        2,
    ),
    "records": ([*(f"run/{name}" for name in RECORDS), "run/summary.json", "run/tensorboard/*"], 3),
    "config.yaml": (["run/config.yaml"], 2),
}
TURNS = [place for place, (_, turns) in PLACES.items() for _ in range(turns)]
REMOVAL = re.compile(r"^.*: (rm -r .*)$", re.MULTILINE)
WAYS = {"resume": RESUME, "evaluate": EVALUATE, "export": EXPORT, "init_from": FROM_RUN}
READERS = {"doctor": ["doctor", "run"], "report": ["report", "run"]}  # of records alone


@dataclasses.dataclass(frozen=True)
class Damage:
    kind: str
    command: str
    seed: float


def case(number: int, rng: random.Random) -> Damage:
    kind = TURNS[number % len(TURNS)]
    commands = ["resume"] * 4 + ["evaluate", "export", "init_from"] * (kind != "records")
    commands += [*READERS, *READERS] * (kind in ("records", "config.yaml"))
    return Damage(kind, rng.choice(commands), rng.random())


def judged(damage: Damage, scene: Scene, folder: Path) -> Verdict:
    rng = random.Random(damage.seed)
    shutil.copytree(scene.halfway, folder / "run")
    whole = content(folder / "run")
    path = rng.choice(sorted(path for pattern in PLACES[damage.kind][0] for path in folder.glob(pattern)))
    act = rng.choice(OF_FOLDERS if path.is_dir() else OF_FILES)
    act(path, rng)
    before = content(folder / "run")
    what = f"{damage.command} after '{act.__name__}' of {path.relative_to(folder)}"
    outcome = run({**WAYS, **READERS}[damage.command], folder)
    faults = [*outcome.faults()]
    if outcome.code == 2:
        way = "refused by name"
        faults += _refusal_faults(outcome, changes(whole, before), folder)
        after = content(folder / "run")
        faults += [f"{name} was changed by a refusal" for name in changes(before, after) if damage.command not in READERS]
        if damage.command == "resume" and (advice := REMOVAL.search(outcome.err)) and not faults:
            faults += _faults_of_advice(advice[1], scene, folder)
    elif outcome.code:
        way = ""
        faults.append(f"it ended with exit code {outcome.code}")
    else:
        way = "the same numbers" if damage.command in WAYS else "shown"
        faults += [] if faults else _faults_of_numbers(damage, scene, folder, outcome, path)
    return Verdict(way, [*([what] if faults else []), *faults, *([outcome.err[-400:]] if faults else [])])


def _refusal_faults(outcome: Outcome, damaged: list[str], folder: Path) -> Iterator[str]:
    named = [f"step {HALFWAY}", *damaged, *("/".join(Path(path).parts[:1]) for path in damaged)]
    if not any(name in outcome.err for name in named):
        yield "the message does not name what is damaged"
    if (folder / "next").exists():
        yield "the folder of the run to be was made"


def _faults_of_advice(command: str, scene: Scene, folder: Path) -> Iterator[str]:
    """Does what the message says, and resumes."""
    for named in shlex.split(command)[2:]:
        place = folder / named
        place.unlink() if place.is_symlink() or place.is_file() else shutil.rmtree(place)
    again = run(RESUME, folder)
    yield from (f"after {command}: {fault}" for fault in again.faults())
    if again.code:
        yield f"after {command} it ended with exit code {again.code}: {again.err[-300:]}"
    else:
        yield from (f"after {command}: {found}" for found in differences(folder / "run", scene.straight))


def _faults_of_numbers(damage: Damage, scene: Scene, folder: Path, outcome: Outcome, path: Path) -> Iterator[str]:
    """What a command that took the damaged folder has given, beside what the whole one gives."""
    taken = [step for step in SAVED if f"step {step}" in outcome.out.lower()]  # as it says
    if damage.command == "resume":
        of_records = damage.kind == "records"  # which are none of what a run goes on from: what is lost of them stays lost
        yield from differences(folder / "run", scene.straight, all_records=not of_records)
        for name in RECORDS if of_records else ():
            later = [[r for r in records(at, name) if r["step"] > HALFWAY] for at in (folder / "run", scene.straight)]
            if later[0] != later[1] or (
                path.name != name and records(folder / "run", name) != records(scene.straight, name)
            ):
                yield f"{name} differs in what was not damaged"
    if damage.command == "evaluate" and records(folder / "run", "evals.jsonl")[-1] not in map(scene.evaluated.get, taken):
        yield "it was evaluated to other numbers"
    if damage.command == "export" and content(folder / "run" / "exports") not in map(scene.exported.get, taken):
        yield "what was exported differs"
    if damage.command == "init_from":
        begun = re.search(r"^  init_step: (\d+)$", (folder / "next" / "config.yaml").read_text(), re.MULTILINE)
        if begun is None or weights(folder / "next", 1) != scene.continued.get(int(begun[1])):
            yield "the run that starts from it has learnt something else"
    yield from half_written(folder)
    if STEPS in taken and damage.command != "resume":
        yield f"there is no step {STEPS} yet"
