"""What the stages of a search share: the run that all candidates are variants of, its rungs, the budget and the record.

A candidate that an earlier stage has trained is not trained a second time: its folder is copied. Decisions follow from the
folders, so a search that was killed is continued by repeating it: runs that have come far enough are left as they are.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from agent_tunix.config.commands import less, value_text
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.records import Accuracy, RunRecords
from agent_tunix.lab.sweep import sweep
from agent_tunix.lab.sweep.sweep_folder import groups_of, read_index, results
from agent_tunix.lab.tune.config import TuneConfig
from agent_tunix.lab.tune.halving import Price
from agent_tunix.lab.tune.stages import Settings, candidate, possible
from agent_tunix.training.guard import Interruption
from agent_tunix.training.progress import say
from agent_tunix.training.run_folder import read_records, replace_text
from agent_tunix.training.setup import Loaded
from agent_tunix.types import Record

PACE = "0-pace"


class EndedError(Exception):
    """The search ends before its last stage: it was interrupted, its time is up, or no candidate is left."""

    def __init__(self, status: str, words: str):
        super().__init__(words)
        self.status = status


class AllDivergedError(EndedError):
    """No candidate of a stage is left."""

    def __init__(self, words: str):
        super().__init__("completed", words)


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate: its settings, and the job that trains it."""

    settings: Settings
    job: sweep.Job

    def accuracy(self, step: int) -> Accuracy | None:
        """Held-out accuracy after so many updates; None where it did not get there."""
        run = RunRecords({}, evals=read_records(self.job.folder / "evals.jsonl"))
        return next((accuracy for accuracy in run.accuracies() if accuracy.step == step), None)

    def measured(self, step: int) -> Accuracy | None:
        """As `accuracy`, after training to there; None only where the candidate diverged on the way."""
        found = self.accuracy(step)
        if found is None and results(self.job.folder)["status"] != "diverged":
            where = self.job.folder / "evals.jsonl"
            raise UserError(f"{where} lacks the evaluation after {step} updates, which was made; choose another folder.")
        return found


@dataclasses.dataclass
class Session:
    """A search under way."""

    cfg: TuneConfig
    base: Config
    places: Sequence[int]  # the rungs, in updates
    folder: Path
    overrides: Sequence[str]  # as they were given
    console: Console
    loaded: Loaded
    interruption: Interruption
    record: Record  # tune.json
    price: Price = dataclasses.field(default_factory=Price)
    fuse: sweep.Fuse = "auto"
    trials: list[Trial] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.monotonic)
    spent: float = 0.0  # seconds, by the processes that this one goes on from

    @property
    def end(self) -> int:
        return self.places[-1]

    def say(self, text: str) -> None:
        say(self.console, text)

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began

    def write(self) -> None:
        """Replaces tune.json atomically."""
        self.record |= {"seconds": round(self.seconds(), 1), "fuse": self.fuse}
        replace_text(self.folder / "tune.json", json.dumps(self.record, indent=2) + "\n")

    def trial(self, stage: str, number: int, settings: Settings) -> Trial:
        changed = possible(self.base, settings)
        own = less(self.overrides, "tune.", *changed)
        overrides = (*own, *(f"{key}={value_text(value)}" for key, value in changed.items()))
        return Trial(settings, sweep.Job(candidate(self.base, settings), self.folder / stage / str(number), overrides))

    def train(self, trials: Sequence[Trial], until: int) -> None:
        """Trains candidates of one stage until so many updates, unless there is no time for it."""
        self._adopt(trials)
        limit = self.cfg.tune.seconds
        if limit is not None and (need := self._need(trials, until)) and self.seconds() + need > limit:
            raise EndedError("completed", f"The budget of {self.cfg.tune.budget} is spent.")
        self.run(trials, until)

    def _need(self, trials: Sequence[Trial], until: int) -> float:
        """The seconds that a rung should take."""
        before = max((place for place in self.places if place < until), default=0)
        new = [trial for trial in trials if trial.accuracy(until) is None]
        ways = [until - (before if trial.job.folder.exists() else 0) for trial in new]
        return sum(self.price.update * way + self.price.rung for way in ways)

    def run(self, trials: Sequence[Trial], until: int) -> None:
        folder = trials[0].job.folder.parent
        jobs = [dataclasses.replace(trial.job, stop_after=until) for trial in trials]
        found = sweep.train_all(jobs, folder, self.console, self.loaded, self.interruption, self.fuse)
        if any(len(group.jobs) > 1 and group.at_once == 1 for group in groups_of(read_index(folder))):
            self.fuse = "never"  # what was measured once need not be again
        if self.interruption.requested or any(
            result["status"] not in ("completed", "paused", "diverged") and trial.accuracy(until) is None
            for trial, result in zip(trials, found, strict=True)
        ):
            raise EndedError("interrupted", "Interrupted.")

    def _adopt(self, trials: Sequence[Trial]) -> None:
        """Copies the folders of candidates that an earlier stage has begun; a kill leaves a whole copy or none."""
        for trial in trials:
            source = next((one.job.folder for one in self.trials if one.job.cfg == trial.job.cfg), None)
            if source is not None and source != trial.job.folder and not trial.job.folder.exists():
                half = trial.job.folder.with_name(f"{trial.job.folder.name}.copy")
                shutil.rmtree(half, ignore_errors=True)
                shutil.copytree(source, half)
                half.rename(trial.job.folder)
        known = [trial.job.folder for trial in self.trials]
        self.trials += [trial for trial in trials if trial.job.folder not in known]

    def ended(self) -> list[tuple[Settings, Accuracy]]:
        """The settings that were trained to the end, each once, and how they ended."""
        found: list[tuple[Settings, Accuracy]] = []
        for trial in self.trials:
            accuracy = trial.accuracy(self.end)
            if accuracy is not None and trial.settings not in [one for one, _ in found]:
                found.append((trial.settings, accuracy))
        return found
