"""Where a run goes on that an earlier process began."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.progress import Progress
from agent_tunix.environments.stream import Example
from agent_tunix.errors import UserError
from agent_tunix.training import loading
from agent_tunix.training.best import stopped_early
from agent_tunix.training.data import Notice
from agent_tunix.training.progress import counted
from agent_tunix.training.run_folder import finite, last_step, read_object
from agent_tunix.training.setup import Setup
from agent_tunix.types import TrainState


def restored(
    r: Setup, path: Path, checkpoints: Checkpoints, fresh: TrainState, notice: Notice
) -> tuple[TrainState, Progress]:
    """The state from which the run goes on, or begins; says how many recorded updates no checkpoint holds."""
    state, progress = fresh, Progress(data=_digest(r.task.train), base=r.model.checksum)
    if checkpoints.steps():
        state, saved_progress = checkpoints.restore(fresh)
        _check(r, path, int(state.step), saved_progress.position)
        _check_data(r, path, saved_progress.data, progress.data)
        r.model.serve(str(path), saved_progress.base)
        progress = dataclasses.replace(saved_progress, data=progress.data, base=progress.base, midway=False)
    saved = int(state.step)
    if (lost := last_step(path) - saved) > 0:
        notice(f"Saved up to step {saved}: {counted(lost, 'update')} recorded after it will be made again.")
    return state, progress


def _check(r: Setup, path: Path, steps: int, made: int) -> None:
    """Refuses a configuration in which the run could not have made so many steps from so many batches."""
    planned = r.plan.total_batches
    if made > planned:
        raise UserError(
            f"{path} has trained on {made} batches, and this configuration ends after {planned}.\n"
            "A run cannot be made shorter; evaluate and export take an earlier checkpoint by step=<n>."
        )
    if steps != made * r.plan.iterations:
        raise UserError(
            f"{path} has made {steps} updates from {made} batches, and this configuration has {r.plan.iterations} "
            "for each.\nSchedules count updates, so grpo.num_iterations must be what the run was started with."
        )
    changed = r.cfg != loading.saved_config(str(path), "training.resume")
    if changed and made < planned and (stopped := stopped_early(r.cfg, path, steps)):
        raise UserError(
            f"{path} has stopped early, at step {stopped['step']}, so other values would change nothing.\n"
            f"A training.early_stopping larger than {r.cfg.training.early_stopping} goes on, or null; or start another run."
        )
    ended = made == planned and read_object(path / "summary.json").get("status") == "completed"
    if ended and changed:  # it would overwrite the run's own
        raise UserError(
            f"{path} has come to its end, so other values would change nothing.\n"
            "Make it longer, as by training.num_epochs, or start another run."
        )


def _check_data(r: Setup, path: Path, before: str, now: str) -> None:
    """Refuses what would give the rest of the run other batches: positions count them, and held-out problems are the others.

    `before` is empty where the checkpoint is of an earlier version.
    """
    prompts = loading.saved_config(str(path), "training.resume").training.prompts_per_step
    if r.cfg.training.prompts_per_step != prompts:
        raise UserError(
            f"{path} learns from {prompts} prompts an update, and this configuration from "
            f"{r.cfg.training.prompts_per_step}; set training.batch_size={prompts}.\n"
            "training.micro_batch_size then says how many of them are read at a time."
        )
    if before not in ("", now):
        raise UserError(
            f"{path} began with other training examples: the data has changed since, or how examples are chosen from it.\n"
            "What it has trained on could count as held out. Put the data back, or start another run;\n"
            f"training.init_from={path} begins it with what this one has learnt."
        )


def _digest(examples: Sequence[Example]) -> str:
    """A text that tells these examples, in this order, from any others."""
    return hashlib.sha256(repr([(e.question, e.answer, e.worked) for e in examples]).encode()).hexdigest()[:16]


def counting_on(r: Setup, path: Path) -> Setup:
    """The run, with its start moved back by the seconds of earlier processes; one that was killed has left none."""
    earlier = read_object(path / "summary.json").get("seconds", 0.0)
    return dataclasses.replace(r, started=r.started - earlier) if finite(earlier) else r
