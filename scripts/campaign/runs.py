"""The runs that all others are compared with, made once, and the comparison."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from campaign.commands import Outcome, apart, run

SAVED, STEPS = (2, 4, 6), 6
HALFWAY = 4  # the last checkpoint of a run that a kill has kept from saving its last
RUN = ["model=gemma3_tiny", "data.num_examples=64", "training.micro_batch_size=2", f"training.num_batches={STEPS}"]
RUN += ["training.save_interval_steps=2", "training.eval_every_n_steps=2", "evaluation.num_examples=8"]
RUN += ["evaluation.sampled=false", "optimizer.learning_rate=1e-5"]
SWEEP = ["--multirun", *RUN[:-1], "optimizer.learning_rate=1e-6,1e-5", "training.num_batches=2"]
SEARCH = ["tune", *RUN[:-1], "training.num_batches=2", "tune.budget=24", "tune.rates=2", "tune.seeds=1", "tune.finalists=1"]
SEARCH += ["tune.warmup_ratios=[]", "tune.weight_decays=[]", "hydra.run.dir=search"]
TRAIN, RESUME = ["train", *RUN, "hydra.run.dir=run"], ["train", "training.resume=run"]
FROM_RUN = ["train", *RUN, "training.num_batches=1", "training.init_from=run", "hydra.run.dir=next"]
EVALUATE = ["evaluate", "run=run", "evaluation.num_examples=8"]
EXPORT = ["export", "run=run"]
RECORDS = ("metrics.jsonl", "evals.jsonl", "samples.jsonl")
OF_THE_MACHINE = ("time/", "tokens_per_second", "memory/")  # metrics that no two runs have in common
Weights = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Scene:
    """What is read by all cases and changed by none: runs that nothing interrupted, and what came of commands on them."""

    folder: Path
    seconds: dict[str, float]  # that each command takes
    evaluated: dict[int, dict[str, Any]]  # by step
    exported: dict[int, dict[str, str]]
    continued: dict[int, Weights]  # of a run that starts from that step

    @property
    def straight(self) -> Path:
        return self.folder / "straight" / "run"

    @property
    def halfway(self) -> Path:
        return self.folder / "halfway" / "run"

    @property
    def search(self) -> Path:
        return self.folder / "searched" / "search"

    def sweep(self, fuse: str) -> Path:
        return self.folder / fuse / "sweep"


def make_scene(folder: Path) -> Scene:
    """Trains what the others are compared with; two runs of the same command must already agree."""
    seconds: dict[str, float] = {}

    def must(name: str, arguments: list[str], at: Path) -> Outcome:
        at.mkdir(exist_ok=True)
        outcome = run(arguments, at, work=600)
        if outcome.code or [*outcome.faults()]:
            raise SystemExit(f"{' '.join(arguments)}: {[*outcome.faults()]}\n{outcome.said()}")
        seconds[name] = outcome.seconds
        return outcome

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    scene = Scene(folder, seconds, {}, {}, {})
    for name in ("straight", "again"):  # the second finds its programs compiled, and takes as long as all after it
        must("train", TRAIN, folder / name)
    if found := differences(folder / "again" / "run", scene.straight):
        raise SystemExit(f"Two runs of the same command differ: {found}")
    shutil.copytree(scene.straight, scene.halfway)
    shutil.rmtree(scene.halfway / "checkpoints" / str(STEPS))
    (scene.halfway / "summary.json").unlink()
    for _ in range(2):
        must("resume", RESUME, folder / "halfway")
        shutil.rmtree(scene.halfway / "checkpoints" / str(STEPS))
        (scene.halfway / "summary.json").unlink()
    for fuse in ("always", "never"):
        arguments = ["train", *SWEEP, "hydra.sweep.dir=sweep", f"hydra.launcher.fuse={fuse}"]
        must("sweep", arguments, folder / fuse)
    shutil.rmtree(scene.sweep("never"))
    must("sweep", arguments, folder / "never")
    must("search", SEARCH, folder / "searched")
    shutil.rmtree(scene.search)
    must("search", SEARCH, folder / "searched")
    for step in SAVED:
        at = folder / f"from-{step}"
        at.mkdir()
        shutil.copytree(scene.straight, at / "run")
        for later in (saved for saved in SAVED if saved > step):
            shutil.rmtree(at / "run" / "checkpoints" / str(later))
        must("evaluate", EVALUATE, at)
        must("export", EXPORT, at)
        scene.evaluated[step] = records(at / "run", "evals.jsonl")[-1]
        scene.exported[step] = content(at / "run" / "exports")
        if step < STEPS:
            must("init_from", FROM_RUN, at)
            scene.continued[step] = weights(at / "next", 1)
    return scene


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a run wrote, less what depends on the machine's mood; a line that cannot be read stands for itself."""
    return [_record(line) for line in (folder / name).read_text(errors="replace").splitlines()]


def _record(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        return {key: value for key, value in found.items() if not key.startswith(OF_THE_MACHINE)}
    except (ValueError, AttributeError):
        return {"step": 0, "line": line}


def weights(folder: Path, step: int) -> Weights:
    """A digest of everything that a checkpoint restores to, by its name, read without the code that is judged."""
    return apart(lambda: _stored(folder / "checkpoints" / str(step) / "state"))


def _stored(state: Path) -> Weights:
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{state.resolve()}/"}).result()
    return {key.decode(): hashlib.sha256(store.read(key).result().value).hexdigest() for key in store.list().result()}


def saved_steps(folder: Path) -> list[int]:
    """The steps whose checkpoints have been renamed to their place."""
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())


def content(folder: Path) -> dict[str, str]:
    """Everything in a folder, by its path: a digest of a file, what a link leads to, or what else it is."""
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            kind = stat.S_IFMT(path.lstat().st_mode)
            if kind == stat.S_IFREG:
                found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found[str(path.relative_to(folder))] = os.readlink(path) if kind == stat.S_IFLNK else f"kind {kind:o}"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(path for path in before | after if before.get(path) != after.get(path))


def differences(folder: Path, straight: Path, all_records: bool = True) -> list[str]:
    """What tells a run that has come to its end from the one that nothing interrupted."""
    compared = [name for name in RECORDS if all_records]
    same = [(folder / name).exists() and records(folder, name) == records(straight, name) for name in compared]
    found = [f"{name} differs" for name, whole in zip(compared, same, strict=True) if not whole]
    last = saved_steps(straight)[-1]
    if last not in saved_steps(folder):
        found.append(f"there is no checkpoint of step {last}")
    elif weights(folder, last) != weights(straight, last):
        found.append(f"the weights or moments of step {last} differ")
    status = json.loads((folder / "summary.json").read_text())["status"] if (folder / "summary.json").exists() else None
    found += [] if status == "completed" else [f"its status is {status}"]
    found += half_written(folder)
    lacking = {path.name for path in straight.iterdir()} - {path.name for path in folder.iterdir()}
    return found + [f"{name} is lacking" for name in sorted(lacking)]


def half_written(folder: Path) -> list[str]:
    """What a command has left that it was still writing."""
    names = [path.name for path in folder.rglob("*")] if folder.exists() else []
    return [f"{name} is left" for name in names if ".tmp" in name or "-tmp" in name or name.endswith(".half")]
