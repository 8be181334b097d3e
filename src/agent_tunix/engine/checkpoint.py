"""Checkpoints by orbax: what is trained, the optimizer's state, the step and the position in the data.

The state is copied to the host, and orbax writes it while the run goes on, to a temporary folder that it renames when all is
on disk: a kill at any moment leaves the last good one. Orbax does not notice numbers that have changed on the disk since, so
beside the progress lies a checksum of every array, and of that record itself; what is restored must agree with them.
Checkpoints of earlier versions have none.
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
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from agent_tunix.engine.checksum import described, digest, summed
from agent_tunix.engine.progress import Progress
from agent_tunix.errors import UserError, error_number, may_not_be_read, mistake_of, of_system, said, unparsed
from agent_tunix.files import read_json, refuse_traps
from agent_tunix.types import TrainState

HALF = "*.orbax-checkpoint-tmp*"  # what orbax calls a checkpoint of which not all is on disk
SAVER = concurrent.futures.ThreadPoolExecutor(1)  # of all runs: several at once would keep Python from the one that trains
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
    reader = getattr(getattr(found.object, "cr_code", None), "co_filename", "")
    half_made = getattr(found.object, "__qualname__", "") == "BaseEventLoop.__del__"  # where too many files are open
    if "Event loop is closed" not in str(found.exc_value) and not half_made and f"{os.sep}orbax{os.sep}" not in reader:
        hook(found)


def _quiet_others() -> None:
    """Orbax stops at the first array that it cannot read or write; the errors of others, which end later, are not shown."""
    if getattr(sys.unraisablehook, "func", None) is not _unless_late:
        sys.unraisablehook = partial(_unless_late, sys.unraisablehook)
        warnings.filterwarnings("ignore", "coroutine '.*' was never awaited", RuntimeWarning)


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


def _of_files(fault: BaseException) -> bool:
    """Whether a ValueError tells of a file, in tensorstore's style, rather than of what was asked for."""
    return isinstance(fault, json.JSONDecodeError) or re.match("[A-Z_]+: ", str(fault)) is not None


def _named_steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


@jax.jit
def _finite(state: TrainState) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]).all()


def _make_way(folder: Path) -> None:
    """Removes what a killed process was writing: orbax renames a checkpoint when all of it is there.

    Refuses what lies where a checkpoint is to be: renaming would fail only when that step is reached.
    """
    there = folder.iterdir() if folder.exists() else ()
    if strange := [path for path in there if path.name.isdecimal() and not path.is_dir()]:
        raise UserError(f"{strange[0]} is not a folder, and the checkpoint of that step is to lie there. Move it away.")
    for half in folder.glob(HALF):
        if half.is_dir() and not half.is_symlink():
            shutil.rmtree(half, ignore_errors=True)
        else:
            half.unlink(missing_ok=True)


class DamagedError(Exception):
    """A checkpoint holds something else than what was saved."""


class MisfitError(Exception):
    """A checkpoint holds other arrays than those that are asked for."""


@dataclasses.dataclass
class Kept:
    """Which checkpoints stay, as orbax asks: the last few; the last due, which interruptions do not push out; the best."""

    keep: int
    due: int | None = None
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        older = len(checkpoints) - self.keep
        return [place >= older or info.step in (self.due, self.best) for place, info in enumerate(checkpoints)]


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, keep: int | None = None):
        """Makes the folder and keeps the last `keep` checkpoints, the last due, the best; with None they are only read."""
        folder = Path(os.path.realpath(folder))
        if folder.is_symlink():
            raise UserError(f"{folder} is a link that leads back to itself. Remove it, or have it lead to the checkpoints.")
        if folder.exists() and not folder.is_dir():  # found only by the first save, a run would have begun anew by then
            raise UserError(f"{folder} is not a folder, and a run's checkpoints lie in one of that name. Move it away.")
        if "\\" in str(folder):
            raise UserError(f"{folder}: checkpoints cannot be kept below a folder with a backslash in its name.")
        # Made in the background, a folder that cannot be made keeps orbax's threads waiting, and Python for them.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        self._kept = Kept(keep) if keep else None
        if self._kept and jax.process_index() == 0:
            _make_way(folder)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            read_only=self._kept is None,
            async_options=at_once,
            lightweight_initialize=True,  # what one checkpoint says of itself, which may be damaged, keeps no other from use
        )
        self._manager = ocp.CheckpointManager(folder, options=options)
        self._saving: concurrent.futures.Future | None = None
        if self._kept:
            self._kept.due = self.last_due()

    def steps(self) -> list[int]:
        """The steps that can be restored, oldest first."""
        self._handed_over()
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, progress: Progress, *, best: int | None = None, used_up: bool = True) -> None:
        """Saves a step once, by a thread: a tenth of a second passes before orbax has taken a state over.

        The checkpoint of the step `best`, which may be this one, stays until another save names a better one.

        A state that the next update uses up is copied before the device is asked for anything else; one that none follows
        is fetched by the thread.
        """
        _quiet_others()
        step = int(state.step)
        if step not in self.steps():
            self._check_room(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
            copied = _on_host(state) if used_up else None
            self._saving = SAVER.submit(lambda: self._hand_over(step, copied or _fetched(state), progress, best))
            if jax.process_count() > 1:  # they wait for each other in there, and must do so in one order
                self._handed_over()

    def _hand_over(self, step: int, state: TrainState, progress: Progress, best: int | None) -> None:
        if self._kept:
            self._kept.best = best
            self._kept.due = self._kept.due if progress.midway else step
        record = dataclasses.asdict(progress) | {"step": step, "arrays": summed(state)}
        record["checksum"] = digest(record)
        parts = {"state": ocp.args.StandardSave(state), "progress": ocp.args.JsonSave(record)}
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
            raise UserError(
                f"{self._manager.directory} holds no checkpoint yet; training.resume={run} continues the run and writes one."
            )
        if step is not None and step not in steps:
            raise UserError(f"{run} has no checkpoint of step {step}; the steps kept are {', '.join(map(str, steps))}.")
        return steps[-1] if step is None else step

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, Progress]:
        """The state at a step (default: the last) in the structure of `like`, and the progress saved with it.

        Raises UserError for a checkpoint that is damaged; the message names those that are whole.
        """
        _quiet_others()
        self.settle()
        step = self.chosen(step)
        try:
            return self._read(like, step)
        except Exception as fault:  # orbax and tensorstore raise many kinds
            mistake = None if isinstance(fault, OSError) else mistake_of(fault)
            if mistake:
                raise
            traceback.clear_frames(fault.__traceback__)  # which hold what was read: others are to be read in its place
            raise self._unreadable(like, step, fault) from fault

    def _read(self, like: TrainState, step: int) -> tuple[TrainState, Progress]:
        record = self._record(step)
        saved = record.get("arrays")  # which earlier versions did not save
        self._check_fit(like, step, saved)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like)))
        try:
            state = self._manager.restore(step, args=args).state
        except ValueError as fault:
            if saved or _of_files(fault) or not (self._folder(step) / "state" / "_METADATA").exists():
                raise
            raise MisfitError(said(fault)) from fault
        if not _finite(state):  # an update that would make it so is not applied
            raise DamagedError("NaN or infinity among its numbers")
        if saved and (differing := [name for name, found in summed(state).items() if found != saved[name]]):
            more = f" and {len(differing) - 1} more arrays are" if len(differing) > 1 else " is"
            raise DamagedError(f"{differing[0]}{more} not what was saved")
        return state, Progress.from_json(record)

    def _record(self, step: int) -> dict[str, Any]:
        """What was saved beside the state: the progress and, since versions that do so, the checksums."""
        refuse_traps(self._folder(step))
        record = read_json(self._folder(step) / "progress" / "metadata")
        if not isinstance(record, dict):
            raise DamagedError("its record of progress is not what was saved")
        if {"arrays", "checksum"} & record.keys():
            expected = record.pop("checksum", None)
            if expected != digest(record) or record["step"] != step:
                raise DamagedError("its record of progress is not what was saved")
        return record

    def _folder(self, step: int) -> Path:
        return Path(self._manager.directory) / str(step)

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
            return Progress.from_json(self._record(step))
        except Exception:
            return None

    def forget_after(self, step: int) -> None:
        """Deletes what was saved later: the run went back to that step, and will come by another way."""
        self.settle()
        for later in [saved for saved in self.steps() if saved > step]:
            self._manager.delete(later)

    def _check_fit(self, like: TrainState, step: int, saved: dict[str, Any] | None) -> None:
        """Refuses other arrays before any is read: orbax would stop at the first, amid errors of other readers."""
        wanted = described(like)
        try:
            if saved is None:
                with ocp.StandardCheckpointer() as reader:
                    tree = reader.metadata(self._manager.directory / str(step) / "state").item_metadata.tree
                there = collections.Counter(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))
            else:
                there = collections.Counter(tuple(shape) for _, shape, _ in saved.values())
        except Exception:  # reading it will fail too, and say why
            return
        here = collections.Counter(tuple(shape) for _, shape in wanted.values())
        for shape in there | here:
            if there[shape] != here[shape]:
                raise MisfitError(f"{there[shape]} arrays of shape {shape} in it, {here[shape]} in the run to be continued")
        if saved is not None and (others := {name: kind for name, (*kind, _) in saved.items()}) != wanted:
            name = next(name for name in others | wanted if others.get(name) != wanted.get(name))
            raise MisfitError(f"{name} is not the same array in it and in the run to be continued")

    def _unreadable(self, like: TrainState, step: int, fault: Exception) -> UserError:
        folder, why = self._folder(step), unparsed(fault)
        if isinstance(fault, MisfitError):
            return UserError(
                f"The checkpoint of step {step} does not fit this configuration ({why}).\n"
                "Model, adapters and optimizer must be those the run was started with."
            )
        if may_not_be_read(fault):
            return UserError(
                f"The checkpoint of step {step} may not be read ({why}).\nCheck owner and permissions of {folder}."
            )
        if of_system(fault):
            return UserError(f"The checkpoint of step {step} could not be read ({why}).\nMend that, and start again.")
        state = "is damaged" if isinstance(fault, DamagedError) else "cannot be read; it may be damaged"
        return UserError(f"The checkpoint of step {step} {state} ({why}).\n{self._way_on(like, step)}")

    def _way_on(self, like: TrainState, damaged: int) -> str:
        """What is left beside a damaged checkpoint, and how to go on from the last that is whole."""
        run, steps = Path(self._manager.directory).parent, self.steps()
        found = {step: self._whole(like, step) for step in steps if step != damaged} | {damaged: False}
        with contextlib.suppress(Exception):  # reads under way are given up; their own errors add nothing
            self._manager.close()
        whole, unknown = ([step for step in steps if found[step] is kind] for kind in (True, None))
        last = max([*whole, *unknown], default=-1)
        away = [step for step in steps if found[step] is False and step > last] or [damaged]
        command = shlex.join(["rm", "-r", *(str(self._folder(step)) for step in away)])
        lines = [f"Whole: {_named_steps(whole)}." if whole else "" if unknown or len(steps) == 1 else "No other is whole."]
        lines += [f"Not looked at: {_named_steps(unknown)}."] if unknown else []
        if last < 0:
            lines += [f"Remove it to have training.resume={run} begin from the start: {command}"]
        else:
            lines += [f"Remove it to have training.resume={run} go on from step {last}: {command}"]
            lines += [f"evaluate and export take step={last}; training.init_from takes training.init_step={last}."]
        return "\n".join(filter(None, lines))

    def _whole(self, like: TrainState, step: int) -> bool | None:
        """Whether a checkpoint restores to what was saved; None where that cannot be found out here.

        Of several processes one may have found the damage, and the others do not read with it.
        """
        if jax.process_count() > 1:
            return None
        try:
            self._read(like, step)
        except Exception as fault:
            told = mistake_of(fault) or isinstance(fault, MisfitError) or may_not_be_read(fault) or of_system(fault)
            return None if told else False
        return True

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
            if (number := error_number(fault)) is None:
                raise
            raise OSError(number, os.strerror(number), str(self._manager.directory)) from fault
