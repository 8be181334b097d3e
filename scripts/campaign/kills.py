"""Kills: a command gets a signal at a random moment, maybe a second one, and is then given again until it ends.

Promised: it ends in the same bits as the command that nothing interrupted, and nothing beyond the last save is lost. A
signal other than SIGKILL ends it with exit code 0, or 130 and a message, and a single one leaves nothing half-written.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from campaign.cases import Verdict
from campaign.commands import Outcome, Strike, run
from campaign.runs import (
    EVALUATE,
    EXPORT,
    RECORDS,
    RESUME,
    SAVED,
    SEARCH,
    STEPS,
    SWEEP,
    TRAIN,
    Scene,
    changes,
    content,
    differences,
    half_written,
    records,
    saved_steps,
)

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
INTERRUPTED = (0, 130)  # exit codes of a command that was asked to end
TRIES = 5  # to hit a command before it ends
IMPORTS = 3.0  # seconds that a process of its own takes to start


@dataclasses.dataclass(frozen=True)
class Command:
    """What is killed: how its folder begins, what is given, at first and again, and what is wrong when it has ended."""

    prepare: Callable[[Scene, Path], object]
    arguments: Callable[[Path], list[str]]
    faults: Callable[[Scene, Path], Iterator[str]]


def _train(folder: Path) -> list[str]:
    return RESUME if (folder / "run" / "config.yaml").exists() else TRAIN


def _run_faults(scene: Scene, folder: Path) -> Iterator[str]:
    yield from differences(folder / "run", scene.straight)


def _sweep(fuse: str) -> Command:
    def faults(scene: Scene, folder: Path) -> Iterator[str]:
        ours, theirs = folder / "sweep", scene.sweep(fuse)
        for job in ("0", "1"):
            yield from (f"job {job}: {found}" for found in differences(ours / job, theirs / job))
        decided = [json.loads((place / "sweep.json").read_text()) for place in (ours, theirs)]
        if any(decided[0][key] != decided[1][key] for key in ("mode", "groups")):
            yield "sweep.json says that it was trained in another way"

    arguments = ["train", *SWEEP, "hydra.sweep.dir=sweep", f"hydra.launcher.fuse={fuse}"]
    return Command(lambda scene, folder: None, lambda folder: arguments, faults)


def _search_faults(scene: Scene, folder: Path) -> Iterator[str]:
    ours, theirs = folder / "search", scene.search
    yield from half_written(ours)
    if _groups(ours) != _groups(theirs):  # how jobs are trained together was measured, which decides the last bits
        return
    for name in ("best.yaml", "tune.yaml"):
        if (ours / name).read_bytes() != (theirs / name).read_bytes():
            yield f"{name} differs"
    if _stages(ours) != _stages(theirs):
        yield "tune.json tells of other stages"
    for job in sorted(path.parent.relative_to(theirs) for path in theirs.glob("*/*/metrics.jsonl")):
        found = (name for name in RECORDS if records(ours / job, name) != records(theirs / job, name))
        yield from (f"{job}/{name} differs" for name in found)


def _groups(search: Path) -> object:
    return [json.loads(path.read_text())["groups"] for path in sorted(search.glob("*/sweep.json"))]


def _stages(search: Path) -> object:
    return json.loads((search / "tune.json").read_text())["stages"]


def _copied(of: str) -> Callable[[Scene, Path], object]:
    return lambda scene, folder: shutil.copytree(getattr(scene, of), folder / "run")


def _evaluate_faults(scene: Scene, folder: Path) -> Iterator[str]:
    before, after = records(scene.straight, "evals.jsonl"), records(folder / "run", "evals.jsonl")
    tests = after[len(before) :]
    if after[: len(before)] != before or not tests or any(test != scene.evaluated[STEPS] for test in tests):
        yield "evals.jsonl differs"
    yield from _changed(scene, folder, "evals.jsonl", "tensorboard")


def _export_faults(scene: Scene, folder: Path) -> Iterator[str]:
    if content(folder / "run" / "exports") != scene.exported[STEPS]:
        yield "what was exported differs"
    yield from _changed(scene, folder, "exports")


def _changed(scene: Scene, folder: Path, *written: str) -> Iterator[str]:
    found = changes(content(scene.straight), content(folder / "run"))
    yield from (f"{path} was changed" for path in found if not path.startswith(written))


def _export(folder: Path) -> list[str]:
    """An export that has come to its end is not given again, as it would be refused."""
    shutil.rmtree(folder / "run" / "exports" / f"peft-{STEPS}", ignore_errors=True)
    return EXPORT


COMMANDS = {
    "train": Command(lambda scene, folder: None, _train, _run_faults),
    "resume": Command(_copied("halfway"), _train, _run_faults),
    "evaluate": Command(_copied("straight"), lambda folder: EVALUATE, _evaluate_faults),
    "export": Command(_copied("straight"), _export, _export_faults),
    "fused sweep": _sweep("always"),
    "sweep": _sweep("never"),
    "search": Command(lambda scene, folder: None, lambda folder: SEARCH, _search_faults),
}
# How often each moment has its turn.
TURNS = ["training"] * 4 + ["saving"] * 4 + ["starting"] * 2 + ["resuming"] * 3
TURNS += ["in a fused sweep", "in a search", "in a sweep", "evaluating", "evaluating", "exporting", "exporting"]


@dataclasses.dataclass(frozen=True)
class Kill:
    """Signals of one command: the first comes after a share of the command's usual time, a second one after a gap."""

    kind: str
    command: str
    signals: tuple[signal.Signals, ...]
    share: float
    gap: float
    save: int
    real: bool

    def strikes(self, seconds: float, folder: Path) -> list[Strike]:
        first = self.share * seconds
        at = [Strike(self.signals[0], self._as_it_saves(folder) if self.kind == "saving" else lambda now: now >= first)]
        began: list[float] = []

        def gap_is_over(now: float) -> bool:
            began.append(now)
            return now - began[0] >= self.gap

        return at + [Strike(number, gap_is_over) for number in self.signals[1:]]

    def _as_it_saves(self, folder: Path) -> Callable[[float], bool]:
        """Somewhere between the beginning of a checkpoint's folder and its last file."""
        seen: list[float] = []

        def due(now: float) -> bool:
            if seen or any(folder.glob(f"run/checkpoints/{self.save}.*")):
                seen.append(now)
            return bool(seen) and now - seen[0] >= self.share * 0.15

        return due


def case(number: int, rng: random.Random) -> Kill:
    kind = TURNS[number % len(TURNS)]
    commands = {
        "saving": "train",
        "training": "train",
        "resuming": "resume",
        "evaluating": "evaluate",
        "exporting": "export",
    }
    command = commands.get(kind, kind.removeprefix("in a "))
    if kind == "starting":
        command = rng.choice(["train", "resume", "evaluate", "export"])
    signals = rng.sample(SIGNALS, 2) if rng.random() < 0.25 else [rng.choice(SIGNALS)]
    real = kind == "starting" or rng.random() < 0.05
    return Kill(kind, command, tuple(signals), rng.random(), rng.random() / 2, rng.choice(SAVED), real)


def judged(kill: Kill, scene: Scene, folder: Path) -> Verdict:
    command = COMMANDS[kill.command]
    faults: list[str] = []
    command.prepare(scene, folder)
    seconds = IMPORTS if kill.kind == "starting" else scene.seconds[kill.command.removeprefix("fused ")]
    struck, kept = 0, {}
    for attempt in range(TRIES):
        strikes = kill.strikes(seconds / 2**attempt + IMPORTS * (kill.real and kill.kind != "starting"), folder)
        outcome = run(command.arguments(folder), folder, strikes, kill.real)
        struck += outcome.struck
        faults += _faults_of_end(outcome, kill, folder)
        if outcome.struck:
            break
        shutil.rmtree(folder)  # it ended before: once more, and earlier
        folder.mkdir()
        command.prepare(scene, folder)
    kept = {run: _saved_lines(run) for run in _runs(folder)}
    again = run(command.arguments(folder), folder)
    faults += [f"given again, {fault}" for fault in again.faults()]
    if again.code:
        faults.append(f"given again, it ended with exit code {again.code}: {again.err[-300:]}")
    else:
        faults += command.faults(scene, folder)
        faults += [
            f"{run.name} has lost what was saved" for run, lines in kept.items() if _saved_lines(run)[: len(lines)] != lines
        ]
    return Verdict("the same bits", faults, struck)


def _runs(folder: Path) -> list[Path]:
    return [path.parent for path in folder.rglob("config.yaml")]


def _saved_lines(run: Path) -> list[bytes]:
    """The metrics of the updates that the last checkpoint holds, with their times: made again, these would be others."""
    return _lines(run)[: max(saved_steps(run), default=0)]


def _lines(run: Path) -> list[bytes]:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().splitlines() if metrics.exists() else []


def _faults_of_end(outcome: Outcome, kill: Kill, folder: Path) -> Iterator[str]:
    yield from outcome.faults()
    if outcome.code == -signal.SIGKILL and signal.SIGKILL in kill.signals:
        return
    if outcome.code not in INTERRUPTED:
        yield f"it ended with exit code {outcome.code}"
    if outcome.code and not outcome.err.strip():
        yield "it ended without a word"
    if outcome.struck < 2:  # a second signal does not wait for what is being written
        yield from half_written(folder)
    done, saved = len(_lines(folder / "run")), saved_steps(folder / "run")
    if kill.command in ("train", "resume") and outcome.code == 0 and done != max(saved, default=0):
        yield f"it made {done} updates and saved {saved}"
