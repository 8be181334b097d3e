"""A run that never was, told to loggers as the real ones are told: it begins, is resumed after its first step, and ends."""

from __future__ import annotations

from pathlib import Path

from agent_tunix.config.imports import OWN
from agent_tunix.training.loggers.base import Guarded, logger_class
from agent_tunix.training.run_folder import RunFolder

CONFIG = {
    "seed": 7,
    "model": {"weights": "owner/name", "mesh_shape": [[1, 1], ["fsdp", "tp"]], "adapter": None},
    "tags": ["first", "second"],
    "description": "what it is for",
}
SAMPLE = {"prompt": "2 + 2?", "answer": "4", "reward": 1.0, "rewards": {"answer": 1.0}, "advantage": 0.5}


def tell(folder: Path, name: str, config: dict = CONFIG) -> list[str]:
    """Tells a logger of all of it; returns what the run said of the logger."""
    said: list[str] = []

    def open_them() -> list[Guarded]:
        return [Guarded(logger_class(name, OWN, said.append), folder, config, said.append)]

    begun = RunFolder(folder, 0, open_them)
    evaluated(begun, 0, 0.25)
    stepped(begun, 1, loss=0.5)
    stepped(begun, 2, loss=0.6)
    begun.close()
    resumed = RunFolder(folder, 1, open_them)
    stepped(resumed, 2, loss=0.4)
    evaluated(resumed, 2, 0.75)
    resumed.summary({"status": "completed", "steps": 2, "seconds": 3.5})
    resumed.close()
    return said


def stepped(folder: RunFolder, step: int, loss: float) -> None:
    folder.metrics({"step": step, "loss": loss, "kl": float("nan"), "reward/answer": 1.0})
    folder.samples([{"step": step, **SAMPLE, "completion": f"four, at {step}", "transcript": [{"role": "user"}]}])


def evaluated(folder: RunFolder, step: int, accuracy: float) -> None:
    record = {"step": step, "split": "validation", "n": 4, "accuracy": accuracy, "pass@8": 1.0}
    folder.evaluation(record)
    row = {"step": step, "question": "1 + 1?", "answer": "2", "completion": f"two, at {step}"}
    folder.completions(record, [row])
