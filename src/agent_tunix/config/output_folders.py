"""Folders: those of runs, keeping one to a single process, and removing again those that nothing was written to.

Hydra makes the folder of a run before the run has checked its configuration, and writes `multirun.yaml` into that of a
sweep before it has composed a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

MULTIRUN = "multirun.yaml"
INDEXES = ("sweep.json", "tune.json")  # of what holds the folders of runs
_to_come: list[Path] = []


def note(path: Path) -> None:
    """Remembers which files and folders Hydra is about to make."""
    _to_come[:] = missing(path)


def missing(path: Path) -> list[Path]:
    """A path and the folders around it, as far as they are not there; the innermost first."""
    return [place for place in (path.absolute(), *path.absolute().parents) if not os.path.exists(place)]


def remove_unused() -> None:
    """Removes what Hydra has made for this command, where it holds nothing; in the folder of a sweep, those of jobs too."""
    for folder in (path.parent for path in _to_come if path.name == MULTIRUN and path.parent in _to_come):
        with contextlib.suppress(OSError):  # it is not there, or another process keeps it for itself
            claimed = claim(folder)
            remove_empty(job for job in folder.iterdir() if job.is_dir())
            os.close(claimed)
    remove_empty(_to_come)


def remove_empty(paths: Iterable[Path]) -> None:
    """Removes folders that hold nothing, and Hydra's file where it is all that its folder holds."""
    for path in paths:
        with contextlib.suppress(OSError):  # it is not there, holds something, or another process keeps it for itself
            if path.name != MULTIRUN:
                os.close(claim(path))
                path.rmdir()
            elif os.listdir(path.parent) == [MULTIRUN]:
                os.close(claim(path.parent))
                path.unlink()


def of_a_run(folder: Path) -> bool:
    """Whether a folder is, or lies in, that of a run, a sweep or a search; it must be resolved."""
    return any(map(_holds_runs, (folder, *folder.parents)))


def whole(run: Path) -> Path:
    """The folder of a run, resolved; of a job, that of the sweep that it belongs to, or of the search that this does."""
    folder = run.resolve()
    while any((folder.parent / index).exists() for index in INDEXES):
        folder = folder.parent
    return folder


def _holds_runs(folder: Path) -> bool:
    of_one = (folder / "config.yaml").exists() and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints"))
    return of_one or any((folder / index).exists() for index in INDEXES)


def of_the_shell() -> Path:
    """The working directory of the user's shell, which Hydra leaves for the run's folder under hydra.job.chdir=true."""
    gone = HydraConfig.initialized() and HydraConfig.get().job.chdir
    return Path(HydraConfig.get().runtime.cwd if gone else os.getcwd())


def relative(path: Path) -> Path:
    """The path from the working directory, where it lies below; under hydra.job.chdir=true it does not, and stays whole."""
    return path.resolve().relative_to(Path.cwd()) if Path.cwd() in path.resolve().parents else path


def claim(folder: Path) -> int:
    """Locks a folder until the file descriptor returned is closed; raises BlockingIOError where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a disk that knows no locks, as some shared ones do not
        pass
    return descriptor


def is_claimed(folder: Path) -> bool:
    """Whether another process keeps a folder to itself."""
    try:
        os.close(claim(folder))
    except BlockingIOError:
        return True
    except OSError:  # it is gone
        return False
    return False
