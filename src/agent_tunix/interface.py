"""The Python interface, whose functions stand in `agent_tunix/__init__.py` with their documentation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from agent_tunix import verbs
from agent_tunix.config import hydra_messages
from agent_tunix.config.commands import value_text
from agent_tunix.config.load import leaves, unsearched
from agent_tunix.config.schema import StepOrBest
from agent_tunix.console import Screen
from agent_tunix.environments.rewards import RewardFunction, path_of
from agent_tunix.errors import UserError, mistake_of
from agent_tunix.training import policy
from agent_tunix.training.policy import Policy
from agent_tunix.training.run_reader import Run
from agent_tunix.types import Record

Overrides = Sequence[str] | Mapping[str, Any]
Folder = str | PathLike[str]


def load(weights: Folder | None, dtype: str | None, adapter: Folder | None, step: StepOrBest | None) -> Policy:
    with _mistakes():
        return policy.load(_text(weights), _text(adapter), dtype, step, Screen())


def train(overrides: Overrides, reward_functions: Mapping[str, RewardFunction] | None, quiet: bool) -> Run:
    with _mistakes():
        paths = {name: path_of(function) for name, function in (reward_functions or {}).items()}
        if strange := [name for name in paths if not name.isidentifier()]:
            raise UserError(f"reward_functions: {strange[0]!r} is no name; it has letters, digits and underscores.")
        given = [*_overrides(overrides), *_overrides({f"reward.functions.{name}": path for name, path in paths.items()})]
        screen = _screen(quiet)
        request = _request("config", given, screen)
        cfg, origin = verbs.training_of(request)
        if cfg.dry_run:
            raise UserError("dry_run=true trains nothing; `agent-tunix plan` shows what a run would do.")
        folder, _ = verbs.train(request, cfg, origin, screen, reward_functions)
        return Run(folder)


def evaluate(overrides: Overrides, quiet: bool) -> Record:
    with _mistakes():
        screen = _screen(quiet)
        own, *others = verbs.evaluate(_request("evaluate", _overrides(overrides), screen), screen)
        return own | ({"sets": {record["set"]: record for record in others}} if others else {})


def _request(name: str, overrides: list[str], screen: Screen) -> verbs.Request:
    """What Hydra makes of overrides; its complaints about them become messages, as on the command line."""
    if said := unsearched():
        screen.print(said)
    try:
        return verbs.Request.of(name, overrides)
    except Exception as mistake:
        if (told := hydra_messages.answer(mistake, overrides)) is None:
            raise
        raise UserError(told) from mistake


def _overrides(given: Overrides) -> list[str]:
    """Overrides as the command line takes them."""
    if isinstance(given, str):
        raise UserError(f"overrides={given!r}: give a list of them, as in [{given!r}], or a mapping of keys to values.")
    if isinstance(given, Mapping):
        plain = {key: fspath(value) if isinstance(value, PathLike) else value for key, value in leaves(given).items()}
        return [f"{key}={value_text(value)}" for key, value in plain.items()]
    if options := [override for override in given if override.startswith("-")]:
        raise UserError(f"{options[0]} is an option of the command line; here a call makes one run.")
    return list(given)


def _text(folder: Folder | None) -> str | None:
    return None if folder is None else fspath(folder)


def _screen(quiet: bool) -> Screen:
    screen = Screen()
    screen.quiet = quiet
    return screen


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """Raises what the user can mend as a `UserError`, with the message that the command line would show."""
    try:
        yield
    except Exception as fault:
        mistake = mistake_of(fault)
        if mistake is None or mistake is fault:
            raise
        raise mistake from fault
