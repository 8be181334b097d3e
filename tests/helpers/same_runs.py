"""A short run that reads and writes of everything, and what two runs must have in common to be one."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from agent_tunix.training.run_folder import RunFolder, read_records

BATCHES, ITERATIONS, SAVE_EVERY = 6, 2, 4
STEPS = BATCHES * ITERATIONS
RUN = [
    "model=gemma3_tiny",
    "data.num_examples=64",
    "training.micro_batch_size=2",
    f"training.num_batches={BATCHES}",
    f"grpo.num_iterations={ITERATIONS}",
    f"training.save_interval_steps={SAVE_EVERY}",
    "training.eval_every_n_steps=4",
    "training.num_epochs=1",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
    "optimizer.learning_rate=1e-5",
    "grpo.resample_rounds=2",
    "grpo.importance_correction=truncate",
]
TIMINGS = {"tokens_per_second", "memory/peak_gb"}


def records(run: Path, name: str) -> list[dict]:
    """What a run wrote, less what depends on the machine's mood."""
    return [
        {k: v for k, v in record.items() if k not in TIMINGS and not k.startswith("time/")}
        for record in read_records(run / name)
    ]


def final_checkpoint(run: Path, step: int = STEPS) -> list[np.ndarray]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return jax.tree.leaves(checkpointer.restore((run / "checkpoints" / str(step) / "state").resolve()))


def assert_same_run(run: Path, straight: Path, step: int = STEPS) -> None:
    for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
        assert records(run, name) == records(straight, name)
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    ours, theirs = final_checkpoint(run, step), final_checkpoint(straight, step)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@contextmanager
def interrupted_at(step: int) -> Iterator[None]:
    """Ctrl-C is pressed as soon as a run has written down that step."""
    write = RunFolder.metrics

    def interrupting(folder, record):
        write(folder, record)
        if record["step"] == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as during:
        during.setattr(RunFolder, "metrics", interrupting)
        yield
