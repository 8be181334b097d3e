"""Checkpoints by orbax: what is trained, the optimizer's state, the step and the position in the data.

Orbax writes to a temporary folder and renames it when all is on disk, so a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from agent_tunix.engine.guard import Progress
from agent_tunix.errors import UserError
from agent_tunix.types import TrainState

logging.getLogger("absl").setLevel(logging.ERROR)


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: Progress) -> None:
        """Saves once a step."""
        step = int(state.step)
        if step not in self.steps():
            record = ocp.args.JsonSave(dataclasses.asdict(progress))
            args = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=record)
            self._manager.save(step, args=args, force=True)

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, Progress]:
        """The state at a step (default: the last) in the structure of `like`, and the progress saved with it."""
        steps = self.steps()
        if not steps:
            raise UserError(f"{self._manager.directory} holds no checkpoint yet; start the run anew.")
        step = steps[-1] if step is None else step
        if step not in steps:
            raise UserError(f"step={step}: there is no such checkpoint; there are {', '.join(map(str, steps))}.")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
        except ValueError as fault:
            raise UserError(
                f"The checkpoint of step {step} does not fit this configuration ({str(fault).splitlines()[0]}).\n"
                "Model, adapters and optimizer must be those the run was started with."
            ) from fault
        return restored.state, Progress.from_json(restored.progress)

    def close(self) -> None:
        self._manager.close()
