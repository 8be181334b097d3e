"""How a reward function is called, which its parameters say.

    (prompt, completion, answer) -> float           for each completion; with a fourth parameter `row`, the whole row of data
    (prompts, completions, rows) -> list of floats  once for a batch, as a judge behind an endpoint is asked
    (completions, **columns) -> list of floats      as TRL calls one: by name, with the fields of the rows as lists

Either may be `async`. Those of the first kind are then awaited for all completions of a batch at the same time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import math
import threading
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agent_tunix.errors import DivergenceError, UserError, calling, kind_of, named

REWARD_FAULT = "the reward function"  # how a divergence by a reward begins; a mistake in a function has a capital there
SHOWN = 1000  # characters of a completion in a message
EACH = ["prompt", "completion", "answer"]
TOGETHER = ["prompts", "completions", "rows"]
COLUMNS = "completions"  # a parameter of those that are called as TRL calls them
ROW = "row"
TURN = 0.2  # seconds
RewardFunction = Callable[..., Any]
Outcome = tuple[Any, BaseException | None]  # what a function returned, or what it raised


class Problem(NamedTuple):
    """What a reward function may ask for of one completion; `row` has all fields of its row of data.

    An episode has its messages too, those that it began with and all others, and what TRL would call its environment.
    """

    prompt: str
    completion: str
    answer: str
    row: Mapping[str, Any]
    asked: Sequence[Mapping[str, Any]] | None = None
    said: Sequence[Mapping[str, Any]] | None = None
    environment: Any = None


class RewardCall:
    """A reward function, and how it is called; `key` is that of the configuration which names it."""

    def __init__(self, key: str, function: RewardFunction, signature: inspect.Signature | None) -> None:
        self.key, self.function = key, function
        parameters = list(signature.parameters) if signature else []
        self._together = parameters[:3] == TOGETHER
        self._by_columns = COLUMNS in parameters and TOGETHER[2] not in parameters
        self._names = None if signature and _takes_anything(signature) else {*parameters}
        self._takes_row = ROW in parameters[3:]
        called = getattr(function, "__call__", None)  # noqa: B004  of an object that is called as a function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)

    def parts(self, problems: Sequence[Problem]) -> list[Sequence[Problem]]:
        """The problems of each call; calls that are awaited are made at the same time, and count as one."""
        return [problems] if self._together or self._by_columns or self._is_async else [[problem] for problem in problems]

    def values(self, problems: Sequence[Problem]) -> list[float]:
        """What the function gives to each completion; whatever it raises is a mistake that the user is told of."""
        if self._together or self._by_columns:
            return self._values_together(problems)
        return [self._number(value, problem) for value, problem in zip(self._each(problems), problems, strict=True)]

    def _each(self, problems: Sequence[Problem]) -> list[Any]:
        if not self._is_async:
            return [self._called(self._given(problem), self._extra(problem), problem) for problem in problems]
        outcomes = _awaited([invoke_async(self.function, self._given(p), self._extra(p)) for p in problems])
        return [self._returned(outcome, problem) for outcome, problem in zip(outcomes, problems, strict=True)]

    def _values_together(self, problems: Sequence[Problem]) -> list[float]:
        first = problems[0]
        columns = ([p.prompt for p in problems], [p.completion for p in problems], [dict(p.row) for p in problems])
        given, named_ = ((), self._columns(problems)) if self._by_columns else (columns, {})
        if self._is_async:
            (outcome,) = _awaited([invoke_async(self.function, given, named_)])
            returned = self._returned(outcome, first)
        else:
            returned = self._called(given, named_, first)
        with calling(lambda fault: self._mistake(f"returned a {kind_of(returned)}, not a list ({named(fault)})", first)):
            values = list(returned)
        if len(values) != len(problems):
            raise self._mistake(f"returned {len(values)} numbers for {len(problems)} completions", first)
        return [self._number(value, problem) for value, problem in zip(values, problems, strict=True)]

    def _columns(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """What a function takes by name: as in TRL, prompts and completions are messages where the data's prompts are."""
        fields = [key for key in problems[0].row if all(key in problem.row for problem in problems)]
        found: dict[str, Any] = {key: [problem.row[key] for problem in problems] for key in fields}
        found.setdefault("answer", [problem.answer for problem in problems])
        found |= {
            "prompts": [problem.prompt if problem.asked is None else [*problem.asked] for problem in problems],
            COLUMNS: [problem.completion if problem.said is None else [*problem.said] for problem in problems],
        }
        if problems[0].environment is not None:
            found["environments"] = [problem.environment for problem in problems]
        return {key: value for key, value in found.items() if self._names is None or key in self._names}

    def _given(self, problem: Problem) -> Sequence[Any]:
        return problem[:3]

    def _extra(self, problem: Problem) -> dict[str, Any]:
        return {ROW: dict(problem.row)} if self._takes_row else {}

    def _called(self, given: Sequence[Any], extra: Mapping[str, Any], problem: Problem) -> Any:
        with calling(lambda fault: self._raised(fault, problem)):
            return invoke(self.function, given, extra)

    def _returned(self, outcome: Outcome, problem: Problem) -> Any:
        value, fault = outcome
        if fault is not None:
            raise self._raised(fault, problem) from fault
        return value

    def _number(self, returned: Any, problem: Problem) -> float:
        if returned is None and self._by_columns:  # by which TRL's functions say that this is none of theirs
            return 0.0

        def no_number(fault: BaseException) -> UserError:
            return self._mistake(f"returned a {kind_of(returned)}, not a number ({named(fault)})", problem)

        with calling(no_number), np.errstate(over="ignore"):
            value = float(np.float32(float(returned)))
        if not math.isfinite(value):
            on = f"the completion {shortened(problem.completion)!r} (answer {problem.answer!r})"
            raise DivergenceError(f"{REWARD_FAULT} '{_name(self.key)}' returned {value} on {on}")
        return value

    def _raised(self, fault: BaseException, problem: Problem) -> UserError:
        return self._mistake(f"raised {named(fault)}{_where(fault)}", problem)

    def _mistake(self, said: str, problem: Problem) -> UserError:
        return mistake(self.key, said, problem)


def _takes_anything(signature: inspect.Signature) -> bool:
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def invoke(function: RewardFunction, given: Sequence[Any], extra: Mapping[str, Any]) -> Any:
    """The one place from which a function is called, by whose name a traceback says where the function's own part begins."""
    return function(*given, **extra)


async def invoke_async(function: RewardFunction, given: Sequence[Any], extra: Mapping[str, Any]) -> Outcome:
    """What it returns, or its fault: a SystemExit that came out of here would end the loop, and the others with it."""
    try:
        return await function(*given, **extra), None
    except BaseException as fault:
        return None, fault


CALLERS = (invoke.__name__, invoke_async.__name__)


def _awaited(coroutines: Sequence[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    async def gathered() -> list[Outcome]:
        return await asyncio.gather(*coroutines)

    running = asyncio.run_coroutine_threadsafe(gathered(), event_loop())
    try:
        while not running.done():  # in short turns, between which a thread hears what others raise in it
            wait([running], TURN)
        return running.result()
    finally:
        running.cancel()


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One for all calls, so that a function may keep a client or a semaphore; in a thread, as a notebook's own is busy."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
    return loop


def mistake(key: str, said: str, problem: Problem, remedy: str = "Mend the function") -> UserError:
    return UserError(
        f"The reward function '{_name(key)}' {said}\n"
        f"on the completion {shortened(problem.completion)!r} (answer {problem.answer!r}).\n"
        f"{remedy}, or go on without {key}."
    )


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def shortened(completion: str) -> str:
    """The beginning and the end of a long text."""
    left_out = len(completion) - SHOWN
    return completion if left_out <= 0 else f"{completion[: SHOWN // 2]} [{left_out} characters] {completion[-SHOWN // 2 :]}"


def _where(fault: BaseException) -> str:
    """The line of the function's own file at which it failed."""
    whole = traceback.extract_tb(fault.__traceback__)
    frames = list(itertools.dropwhile(lambda frame: frame.name not in CALLERS, whole))[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
