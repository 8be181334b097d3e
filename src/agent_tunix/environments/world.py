"""The world of a run: the class that its configuration names, and calls of many episodes at the same time.

What users' code raises in an episode ends that episode, not the run: it is marked, and counted as the configuration says.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from agent_tunix.config import imports
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.config.schema import VERIFIERS, EnvironmentSection
from agent_tunix.environments import verifiers
from agent_tunix.environments.base import Environment, MethodsAsTools, Row
from agent_tunix.environments.tool_formats import FORMATS, Format, format_of
from agent_tunix.environments.tools import Schema, Tool, awaited, schema_of
from agent_tunix.errors import UserError, calling, kind_of, named
from agent_tunix.models.chat import Message

Notice = Callable[[str], None]
Result = TypeVar("Result")
NAME, TOOLS = "environment.name", "environment.tools"
AT_ONCE = 64  # calls of environments that are made at the same time


@dataclasses.dataclass(frozen=True)
class Fault:
    """What ended an episode: its environment raised something, took too long, or gave what is not asked for."""

    said: str


@dataclasses.dataclass(frozen=True)
class World:
    """The class of a run's episodes with all that it is made with, and the limits of its episodes."""

    kind: Callable[..., Any]
    section: EnvironmentSection
    tools: tuple[Tool, ...] = ()

    def make(self) -> Environment:
        """A new instance, for one episode."""
        made = self.kind(**self.section.settings)
        if not isinstance(made, Environment) and not callable(getattr(made, "reply", None)):
            made = MethodsAsTools(made)
        if self.tools:
            made.tools = (*getattr(made, "tools", ()), *self.tools)
        return made

    @cached_property
    def schemas(self) -> tuple[Schema, ...]:
        """What the model is told of the tools, which are those of any instance."""
        return schemas_of(self.make())

    def format(self, template: str) -> Format:
        """How the model writes calls, which its chat template says where the configuration does not."""
        return FORMATS[self.section.tool_format or format_of(template)]


def schemas_of(environment: Any) -> tuple[Schema, ...]:
    """Of all tools that a model may call in an environment."""
    own = tuple(getattr(environment, "schemas", ()))
    return (*own, *(schema_of(tool) for tool in getattr(environment, "tools", ())))


def load_world(section: EnvironmentSection, origin: Origin = OWN, notice: Notice = print) -> World | None:
    """The world that a configuration names, made once to see that it can be; None where an answer is all there is."""
    if not section.is_played:
        return None
    kind: Any = Environment
    if section.name is not None:
        kind = imports.load(NAME, section.name, "a class with reset and reply, as in my_module.MyWorld", origin, notice)
        if not callable(kind):
            raise UserError(f"{NAME}={section.name} is not a class.")
    if section.name == VERIFIERS:
        allow_verifiers(section, origin, notice)
    wanted = "a function with types, as in my_module.search"
    tools = tuple(imports.load(TOOLS, path, wanted, origin, notice) for path in section.tools)
    world = World(kind, section, tools)
    said = f"{NAME}={section.name} cannot be made with environment.settings={section.settings}"
    with calling(lambda fault: fault if isinstance(fault, UserError) else UserError(f"{said}: {named(fault)}.")):
        made = kind(**section.settings)
    if not callable(getattr(made, "reset", None)):
        raise UserError(f"{NAME}={section.name} has no method reset(row). See agent_tunix.environments.base.Environment.")
    _ = world.schemas
    return world


def allow_verifiers(section: EnvironmentSection, origin: Origin, notice: Notice) -> None:
    """Refuses what the settings of an environment of verifiers name, where they are a stranger's."""
    if section.tools:
        raise UserError(f"{TOOLS} does not go together with data=verifiers: its environments have their own tools.")
    if section.settings.get("task") is None:
        raise UserError("data.task=null: give the id of the taskset of verifiers that is to be played.")
    path, names_more = verifiers.code_named_in(section.settings)
    if names_more and (file := origin.saved_in("data.settings", path)):
        said = "its settings name more code, as a harness, which a stranger may have chosen"
        raise UserError(f"data.settings, as {file} has them, are not used: {said}.\nIf you trust them, give data.settings.")
    imports.allow("data.task", path, origin, notice)


def foreseen(section: EnvironmentSection, origin: Origin) -> list[str]:
    """As for `load_world`, less what a run's folder names: that is not imported, and what is said of it is returned."""
    named_paths = [(NAME, section.name)] if section.name else []
    named_paths += [(TOOLS, path) for path in section.tools]
    if section.name == VERIFIERS and section.settings.get("task"):
        named_paths.append(("data.task", verifiers.code_named_in(section.settings)[0]))
    theirs = [(key, path, file) for key, path in named_paths if (file := origin.saved_in(key, path))]
    for key, path, file in theirs:
        imports.find_elsewhere(key, path, file)
    if not theirs:
        load_world(section)
    return [f"training imports {path}, named by {file}; the plan does not" for _, path, file in theirs]


class Calls:
    """Calls of users' code, each in a thread of its own and at most so many at once; those that hang are left behind."""

    def __init__(self, timeout: float | None):
        self._timeout = timeout

    def made(self, calls: Sequence[Callable[[], Result]]) -> list[Result | Fault]:
        """What each returned, or what was wrong with it, in their order."""
        results: list[Any] = [None] * len(calls)
        begun: dict[int, float] = {}
        ended, free = [threading.Event() for _ in calls], threading.Semaphore(AT_ONCE)

        def work(index: int) -> None:
            begun[index] = time.monotonic()
            try:
                found: Any = awaited(calls[index]())
            except BaseException as fault:
                found = Fault(f"raised {named(fault)}")
            if not ended[index].is_set():
                results[index] = found
                ended[index].set()
                free.release()

        def give_up_late() -> None:
            for index, since in list(begun.items()):
                if self._timeout is not None and time.monotonic() - since > self._timeout and not ended[index].is_set():
                    results[index] = Fault(f"took longer than environment.timeout={self._timeout:g} s")
                    ended[index].set()
                    free.release()

        for index in range(len(calls)):
            while not free.acquire(timeout=0.1):
                give_up_late()
            threading.Thread(target=work, args=(index,), daemon=True).start()
        for event in ended:
            while not event.wait(0.1):
                give_up_late()
        return results


def messages_of(given: Any) -> list[Message] | Fault:
    """What a method gave, if it is a message or a list of some."""
    messages = [given] if isinstance(given, Mapping) else list(given) if isinstance(given, list | tuple) else None
    if messages is None:
        return Fault(f"gave a {kind_of(given)}, not messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            return Fault(f"gave {message!r:.200}, which has no role or no content")
    return messages


def reset(environment: Environment, row: Row) -> list[Message] | Fault:
    return messages_of(awaited(environment.reset(row)))


def reply(environment: Environment, transcript: Sequence[Message]) -> list[Message] | Fault:
    """What the world says; nothing where the episode is over."""
    given = awaited(environment.reply(transcript))
    return [] if given is None else messages_of(given)


def rewards_of(environment: Any, transcript: Sequence[Message]) -> tuple[dict[str, float], float | None]:
    """What an episode was worth, by name, and how far it was solved."""
    rewarding, solving = getattr(environment, "reward", None), getattr(environment, "solved", None)
    given = awaited(rewarding(transcript)) if rewarding else {}
    solved = awaited(solving(transcript)) if solving else None
    if not isinstance(given, Mapping):
        raise TypeError(f"reward gave a {kind_of(given)}, not numbers by name")
    return {str(name): float(value) for name, value in given.items()}, None if solved is None else float(solved)
