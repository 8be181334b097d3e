"""Checkpoints by orbax: what is trained, the optimizer's state, the step and the position in the data.

The state is copied to the host, and orbax writes it while the run goes on, to a temporary folder that it renames when all is
on disk: a kill at any moment leaves the last good one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import fnmatch
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from agent_tunix.engine.guard import Progress
from agent_tunix.errors import UserError, may_not_be_read, mistake_of
from agent_tunix.types import TrainState

SAVER = concurrent.futures.ThreadPoolExecutor(1)  # of all runs: several at once would keep Python from the one that trains
OF_TENSORSTORE = re.compile(r" \[tensorstore_spec|\. See full TensorStore details")  # where pages of detail begin
for logger in ("absl", "asyncio"):  # orbax also raises what it logs as an error
    logging.getLogger(logger).setLevel(logging.CRITICAL)


def _named(folder: epath.Path, pattern: str) -> Iterator[epath.Path]:
    """What lies in a folder under names that fit a pattern. By itself etils takes brackets in the folder's own path for a
    pattern too, and orbax does not find what it has written.
    """
    name, _, below = pattern.partition("/")
    for path in folder.iterdir() if folder.is_dir() else ():
        if fnmatch.fnmatchcase(path.name, name):
            yield from _named(path, below) if below else (path,)


type(epath.Path()).glob = _named


def _unless_late(hook: Callable[[Any], object], found: Any) -> None:
    if "Event loop is closed" not in str(found.exc_value):
        hook(found)


def _quiet_others() -> None:
    """Orbax stops at the first array that it cannot read or write; the errors of others, which end later, are not shown."""
    if getattr(sys.unraisablehook, "func", None) is not _unless_late:
        sys.unraisablehook = partial(_unless_late, sys.unraisablehook)


def _on_host(state: TrainState) -> TrainState:
    """A copy in the host's memory. The device writes it by and by; it is not waited for."""
    there = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("pinned_host"), state)
    return jax.device_put(state, there, may_alias=False)


def _fetched(state: TrainState) -> TrainState:
    """The same as NumPy's arrays, where one process has all of it. `_on_host`, and orbax, which does as much, would wait for
    all that the device is doing.
    """
    if jax.process_count() > 1:
        return state
    for leaf in jax.tree.leaves(state):
        leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, state)


@jax.jit
def _finite(state: TrainState) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


@dataclasses.dataclass
class Kept:
    """Which checkpoints stay, as orbax asks: the last few, and the last due, which interruptions do not push out."""

    keep: int
    due: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        older = len(checkpoints) - self.keep
        return [place >= older or info.step == self.due for place, info in enumerate(checkpoints)]


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int | None = None):
        """Makes the folder and keeps the last `keep` checkpoints, and the last due; with None they are only read."""
        if "\\" in str(folder.resolve()):
            raise UserError(f"{folder.resolve()}: checkpoints cannot be kept below a folder with a backslash in its name.")
        # Made in the background, a folder that cannot be made keeps orbax's threads waiting, and Python for them.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        self._kept = Kept(keep) if keep else None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept, read_only=self._kept is None, async_options=at_once
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)
        self._saving: concurrent.futures.Future | None = None
        if self._kept:
            self._kept.due = self.last_due()

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        self._handed_over()
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: Progress, *, used_up: bool = True) -> None:
        """Saves a step once, by a thread: a tenth of a second passes before orbax has taken a state over.

        A state that the next update uses up is copied before the device is asked for anything else; one that none follows
        is fetched by the thread.
        """
        _quiet_others()
        step = int(state.step)
        if step not in self.steps():
            self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
            copied = _on_host(state) if used_up else None
            self._saving = SAVER.submit(lambda: self._hand_over(step, copied or _fetched(state), progress))
            if jax.process_count() > 1:  # they wait for each other in there, and must do so in one order
                self._handed_over()

    def _hand_over(self, step: int, state: TrainState, progress: Progress) -> None:
        if self._kept and not progress.midway:
            self._kept.due = step
        parts = {"state": ocp.args.StandardSave(state), "progress": ocp.args.JsonSave(dataclasses.asdict(progress))}
        self._manager.save(step, args=ocp.args.Composite(**parts), force=True)

    def _handed_over(self) -> None:
        """Waits until orbax has what was saved; a fault is raised once."""
        saving, self._saving = self._saving, None
        with self._writing():
            if saving is not None:
                saving.result()

    def chosen(self, step: int | None) -> int:
        """The step asked for, or the last; raises UserError where it was not saved."""
        steps, run = self.steps(), self._manager.directory.parent
        if not steps:
            raise UserError(f"{run} holds no checkpoint yet; training.resume=<its folder> continues it and writes one.")
        if step is not None and step not in steps:
            raise UserError(f"{run} has no checkpoint of step {step}; the steps kept are {', '.join(map(str, steps))}.")
        return steps[-1] if step is None else step

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, Progress]:
        """The state at a step (default: the last) in the structure of `like`, and the progress saved with it."""
        _quiet_others()
        self.settle()
        step = self.chosen(step)
        self._check_shapes(like, step)
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=args)
            if not _finite(restored.state):  # an update that would make it so is not applied
                raise ArithmeticError("NaN or infinity among its numbers")
            return restored.state, Progress.from_json(restored.progress)
        except Exception as fault:  # orbax and tensorstore raise many kinds
            if mistake_of(fault):
                raise
            raise self._unreadable(step, fault) from fault

    def last_due(self) -> int | None:
        """The last step that was not saved midway, if there is one: a run that rolls back does so as if nothing had
        interrupted it.
        """
        self.settle()
        return next((step for step in reversed(self.steps()) if not self._midway(step)), None)

    def _midway(self, step: int) -> bool:
        found = self.progress(step)
        return found is not None and found.midway

    def progress(self, step: int) -> Progress | None:
        """The progress saved with a step; None where it cannot be read, as to restore it will fail too, and say why."""
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))
            return Progress.from_json(found.progress)
        except Exception:
            return None

    def forget_after(self, step: int) -> None:
        """Deletes what was saved later: the run went back to that step, and will come by another way."""
        self.settle()
        for later in [saved for saved in self.steps() if saved > step]:
            self._manager.delete(later)

    def _check_shapes(self, like: TrainState, step: int) -> None:
        """Refuses arrays of other shapes before any is read: orbax would stop at the first, amid errors of other readers."""
        try:
            with ocp.StandardCheckpointer() as reader:
                saved = reader.metadata(self._manager.directory / str(step) / "state").item_metadata.tree
        except Exception:  # reading it will fail too, and say why
            return
        there, wanted = (collections.Counter(leaf.shape for leaf in jax.tree.leaves(tree)) for tree in (saved, like))
        for shape in there | wanted:
            if there[shape] != wanted[shape]:
                counts = f"{there[shape]} arrays of shape {shape} in it, {wanted[shape]} in the run to be continued"
                raise self._unreadable(step, ValueError(counts))

    def _unreadable(self, step: int, fault: Exception) -> UserError:
        with contextlib.suppress(Exception):  # reads under way are given up; their own errors add nothing
            self._manager.close()
        folder = self._manager.directory / str(step)
        why = OF_TENSORSTORE.split(str(fault).splitlines()[0])[0] if str(fault) else repr(fault)
        told = isinstance(fault, json.JSONDecodeError) or re.match("[A-Z_]+: ", why) is not None  # tensorstore's style
        of_files = told or not (folder / "state" / "_METADATA").exists()
        if isinstance(fault, ValueError) and not of_files:
            return UserError(
                f"The checkpoint of step {step} does not fit this configuration ({why}).\n"
                "Model, adapters and optimizer must be those the run was started with."
            )
        if may_not_be_read(fault):
            return UserError(
                f"The checkpoint of step {step} may not be read ({why}).\nCheck owner and permissions of {folder}."
            )
        return UserError(
            f"The checkpoint of step {step} cannot be read; it may be damaged ({why}).\n"
            f"Remove {folder} to go on from the one before, or from the start where there is none."
        )

    def settle(self) -> None:
        """Waits until all that was saved is on disk; a fault of writing it is raised here, or by the next save."""
        self._handed_over()
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        self._handed_over()
        with self._writing():
            self._manager.close()

    def _check_room(self, size: int) -> None:
        """Raises what a full disk would, before many threads find it full at once."""
        folder = self._manager.directory
        if not folder.exists():
            raise UserError(f"{folder} was removed while its run went on; training.resume={folder.parent} begins it again.")
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns a disk's fault, which orbax reports as text, back into an OSError."""
        try:
            yield
        except ValueError as fault:
            if not (code := re.search(r"os_error_code='(\d+)'", str(fault))):
                raise
            number = int(code[1])
            raise OSError(number, os.strerror(number), str(self._manager.directory)) from fault
