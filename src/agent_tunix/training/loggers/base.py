"""Where a run's numbers go beside its own files: one small class a place, named in `training.loggers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from agent_tunix.config import imports
from agent_tunix.config.imports import Origin
from agent_tunix.errors import UserError, calling, kind_of, named

LOGGERS = {"tensorboard": "agent_tunix.training.loggers.tensorboard.TensorBoard"}
METHODS = ("scalars", "rewind", "close")


class Logger:
    """What a logger has. A user's own class need not inherit this one, and is named by its import path."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """Opens it for a run, by its folder and its configuration; a run that goes on opens it again."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step: those of training are named train/..., those of evaluations by their split."""

    def rewind(self, step: int) -> None:
        """The run goes back to a step: what was said of later ones will be said again."""

    def close(self) -> None:
        """The run has ended."""


def logger_class(name: str, origin: Origin, notice: Callable[[str], None]) -> type[Logger]:
    """The class that a name of `training.loggers` stands for."""
    path = LOGGERS.get(name, name)
    wanted = f"a class with {', '.join(METHODS)}, or a name: {', '.join(LOGGERS)}"
    found = imports.load("training.loggers", path, wanted, origin, notice)
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        lacks = f"it lacks {', '.join(missing)}" if isinstance(found, type) else "it is no class"
        raise UserError(f"training.loggers: {path} is no logger: {lacks}. See agent_tunix.training.loggers.base.Logger.")
    return found


def working(logger: object) -> AbstractContextManager[None]:
    """Around a call of a logger: what a user's own raises becomes a message with its name."""
    name = kind_of(logger)

    def answer(fault: BaseException) -> BaseException:
        if type(logger).__module__.startswith("agent_tunix.") or isinstance(fault, UserError):
            return fault
        return UserError(f"The logger {name}, of training.loggers, raised {named(fault)}.\nMend it, or leave it out.")

    return calling(answer)
