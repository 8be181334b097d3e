"""Where a run's numbers go beside its own files: one small class a place, named in `training.loggers`.

A logger never ends a run: `Guarded` says once what it raised, and the run goes on without it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.config import imports
from agent_tunix.config.imports import Origin
from agent_tunix.errors import UserError, named
from agent_tunix.files import JSON, read_text
from agent_tunix.types import Record

HERE = "agent_tunix.training.loggers."
LOGGERS = {
    "tensorboard": f"{HERE}tensorboard.TensorBoard",
    "wandb": f"{HERE}wandb.WandB",
    "trackio": f"{HERE}trackio.Trackio",
    "mlflow": f"{HERE}mlflow.MLflow",
}
PACKAGES = ("wandb", "trackio", "mlflow")  # each of which is the name of a logger, of a package and of an extra
METHODS = ("scalars", "rewind", "close")
PROJECT = "agent-tunix"  # where a run names none
PATIENCE = 60.0  # seconds that a run waits at its end for a logger in the background
MOST_WAITING = 10_000  # calls that such a logger may be behind
Notice = Callable[[str], None]
Row = Mapping[str, Any]


class Logger:
    """What a logger has. A user's own class need not inherit this one, and is named by its import path."""

    in_background = False  # True: it is called in a thread of its own, so that no step waits for a network
    place = ""  # where its numbers can be seen, which the run says once

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """Opens it for a run, by its folder and its configuration; a run that goes on opens it again."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step: those of training are named train/..., those of evaluations by their split."""

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Completions of held-out problems at a step, or of training since the last table. May be left out."""

    def rewind(self, step: int) -> None:
        """The run goes back to a step: what was said of later ones will be said again."""

    def summary(self, record: Record) -> None:
        """How the run ended, as its summary.json says it. May be left out."""

    def close(self) -> None:
        """The run has ended."""


class Guarded:
    """A logger as a run calls it: the first fault is said, and the run goes on without it."""

    def __init__(self, kind: type[Logger], folder: Path, config: dict[str, Any], notice: Notice) -> None:
        self._name, self._notice = kind.__name__, notice
        self._open = lambda: kind(folder, config)
        self._logger: Any = None
        self._fault = self._said = ""  # the first may be set by the logger's thread, the second by the run's alone
        self._told_of_place = False
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        if getattr(kind, "in_background", False):
            self._thread = threading.Thread(target=self._work, name=f"logger {self._name}", daemon=True)
            self._thread.start()
        self._tell("open")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._tell("scalars", step, values)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self._tell("table", name, step, rows)

    def rewind(self, step: int) -> None:
        self._tell("rewind", step)

    def summary(self, record: Record) -> None:
        self._tell("summary", record)

    def close(self) -> None:
        """Waits for a logger in the background, but not for ever."""
        self._tell("close")
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._fault = self._fault or f"it has not ended within {PATIENCE:g} s, and may lack the last numbers"
        self._say()

    def _tell(self, method: str, *given: Any) -> None:
        if self._thread is None:
            self._call(method, given)
        else:
            try:
                self._calls.put_nowait((method, given))
            except queue.Full:
                self._fault = self._fault or f"it is {MOST_WAITING} calls behind"
        self._say()

    def _work(self) -> None:
        method = ""
        while method != "close":
            method, given = self._calls.get()
            self._call(method, given)

    def _call(self, method: str, given: Sequence[Any]) -> None:
        if self._fault and (method != "close" or self._logger is None):
            return
        try:
            if method == "open":
                self._logger = self._open()
            elif (call := getattr(self._logger, method, None)) is not None:  # not all have tables
                call(*given)
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # a user's own may raise anything
            self._fault = self._fault or named(fault)

    def _say(self) -> None:
        """In the thread of the run, as in a notebook no other may print over a bar."""
        if self._fault and not self._said:
            self._said = self._fault
            self._notice(
                f"warning: the logger {self._name}, of training.loggers, failed: {self._fault}\n"
                "The run goes on without it; its own files have every number."
            )
        place = getattr(self._logger, "place", "")
        if place and not self._fault and not self._told_of_place:
            self._told_of_place = True
            self._notice(f"{self._name}: {place}")


def logger_class(name: str, origin: Origin, notice: Notice) -> type[Logger]:
    """The class that a name of `training.loggers` stands for."""
    if name in PACKAGES and not is_installed(name):
        raise UserError(f"training.loggers={name} needs {name}: pip install 'agent-tunix[{name}]'; or leave it out.")
    path = LOGGERS.get(name, name)
    wanted = f"a class with {', '.join(METHODS)}, or a name: {', '.join(LOGGERS)}"
    found = imports.load("training.loggers", path, wanted, origin, notice)
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if isinstance(found, type) else "it is no class"
        raise UserError(f"training.loggers: {path} is no logger: {lacks}. See agent_tunix.training.loggers.base.Logger.")
    return found


def is_installed(package: str) -> bool:
    """Whether a package is there. W&B makes a folder of its own name, which Python would take for an empty package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a service calls a run."""

    project: str | None  # None: the service's own default, or what its variables in the environment say
    name: str
    group: str | None  # that of the other jobs of a sweep
    tags: tuple[str, ...]
    description: str | None

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any]) -> Labels:
        """By the metadata of the configuration as far as there is any, and by the run's folder; jobs have numbers."""
        path = folder.resolve()
        is_job = path.name.isdecimal()
        begins = config.get("experiment_name") or (path.parent.name if is_job else path.name)
        return cls(
            project=config.get("project_name"),
            name=f"{begins}/{path.name}" if is_job else begins,
            group=path.parent.name if is_job else None,
            tags=tuple(map(str, config.get("tags") or ())),
            description=config.get("description"),
        )


def kept(folder: Path, service: str) -> dict[str, str]:
    """What a service calls this run, as `keep` has written it; nothing where the run is new to it, or the file damaged."""
    try:
        found = json.loads(read_text(_file(folder, service), JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}


def keep(folder: Path, service: str, **values: str) -> None:
    """Writes down what a service calls this run, so that it is the same run when it goes on."""
    path = _file(folder, service)
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(values) + "\n")
    os.replace(beside, path)


def _file(folder: Path, service: str) -> Path:
    return folder / "loggers" / f"{service}.json"
