"""Reward functions: those here give one completion a number from 0 to 1; `conf/reward` gives each its weight.

A user's own function has the same signature, `(prompt, completion, answer) -> float`, or another of those in
`reward_call.py`, and is named by its import path: `+reward.functions.mine=my_module.my_reward`. One that Python hands over
and that cannot be imported, as it stands in a notebook or a script, is named `python:__main__.my_reward`. That says what it
was, and finds nothing: whoever goes on with such a run hands it over again.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agent_tunix.config import imports
from agent_tunix.config.imports import OWN, Origin
from agent_tunix.environments import answers
from agent_tunix.environments.reward_call import (
    COLUMNS,
    EACH,
    REWARD_FAULT,
    ROW,
    TOGETHER,
    Problem,
    RewardCall,
    RewardFunction,
    mistake,
)
from agent_tunix.environments.reward_process import CallStopped, RewardProcess
from agent_tunix.errors import DivergenceError, UserError, calling, named
from agent_tunix.models.chat import ANSWER, REASONING

if TYPE_CHECKING:
    from agent_tunix.environments.stream import Example

TAKEN = ("mean", "std")  # names of metrics under reward/
LARGEST = 1e18  # size of a reward: the spread of a group is made of squares in float32
SCORER = "data.scorer"
PYTHON = "python:"  # before the name of a function that cannot be imported
Notice = Callable[[str], None]


def format_exact(prompt: str, completion: str, answer: str) -> float:
    """1 for reasoning, then answer, each in its tags, and nothing else."""
    return float(answers.well_formed(completion))


def format_approximate(prompt: str, completion: str, answer: str) -> float:
    """The share of the four tags that appear exactly once."""
    tags = REASONING + ANSWER
    return sum(completion.count(tag) == 1 for tag in tags) / len(tags)


def answer_correct(prompt: str, completion: str, answer: str) -> float:
    """1 if the completion is well formed and its answer block states the truth."""
    found = answers.tagged_answer(completion)
    return float(found is not None and answers.well_formed(completion) and answers.same_answer(found, answer))


def number_in_answer(prompt: str, completion: str, answer: str) -> float:
    """1 if the number in an answer block is right, whatever the rest of the completion looks like."""
    found = answers.tagged_answer(completion)
    return float(found is not None and answers.same_numbers(found, answer))


class Scorer:
    """The weighted sum of named reward functions, each call of which may take so many seconds.

    Those under the names of `handed_over` are these, where they are named as functions that cannot be imported.
    """

    def __init__(
        self,
        functions: Mapping[str, str],
        weights: Mapping[str, float],
        origin: Origin = OWN,
        notice: Notice = print,
        timeout: float | None = None,
        handed_over: Mapping[str, RewardFunction] | None = None,
    ):
        _refuse_taken(functions)
        self._given = dict(weights)
        self.weights = {name: weights.get(name, 1.0) for name in functions}
        self._calls: dict[str, RewardCall] = {}
        self._process = None
        if timeout is None:
            for name, path in functions.items():
                function = (handed_over or {}).get(name)
                key = key_of(name)
                found = load_call(key, path, origin, notice) if function is None else checked(key, path, function)
                self._calls[name] = found
        else:
            _refuse_unimportable(functions)
            self._process = RewardProcess(functions, origin, notice, timeout)

    def weighing(self, weights: Mapping[str, float]) -> Scorer:
        """The same functions with other weights."""
        other = copy.copy(self)
        other._given = dict(weights)
        other.weights = {name: weights.get(name, 1.0) for name in self.weights}
        return other

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        answers: Sequence[str],
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, np.ndarray]:
        """Every function's value for every completion, unweighted."""
        columns = prompts, completions, answers, rows or [{}] * len(prompts)
        return self.of_problems([Problem(*one) for one in zip(*columns, strict=True)])

    def of_problems(self, problems: Sequence[Problem]) -> dict[str, np.ndarray]:
        """Every function's value for every completion, unweighted."""
        return {name: np.array(self._values(name, problems), np.float32) for name in self.weights}

    def total(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The reward itself, of the functions' values and of what an environment gives."""
        if stray := [name for name in self._given if name not in values]:
            raise UserError(
                f"reward.weights.{stray[0]}: neither a function nor the environment gives a reward of that name; there is "
                f"{', '.join(values) or 'none'}.\nAn environment gives all its rewards for every episode."
            )
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.asarray(sum(self._given.get(name, 1.0) * value for name, value in values.items()), np.float32)
        if (wrong := total[~(abs(total) <= LARGEST)]).size:
            raise DivergenceError(f"{REWARD_FAULT}s with their weights sum up to {wrong[0]:g}, not within +-{LARGEST:g}")
        return total

    def _values(self, name: str, problems: Sequence[Problem]) -> list[float]:
        if self._process is None:
            call = self._calls[name]
            return [value for part in call.parts(problems) for value in call.values(part)]
        try:
            return self._process.values(name, [problem._replace(environment=None) for problem in problems])
        except CallStopped as fault:
            remedy = "Mend the function, give it more time by reward.timeout"
            raise mistake(key_of(name), str(fault), fault.problem, remedy) from None


class Judge:
    """Whether completions solve their problems: by the function that `data.scorer` names, or by the answer block."""

    def __init__(self, scorer: str | None = None, origin: Origin = OWN, notice: Notice = print):
        self._scores = load_call(SCORER, scorer, origin, notice) if scorer else None

    def __call__(self, examples: Sequence[Example], texts: Sequence[str]) -> np.ndarray:
        """How far each completion solves its problem, from 0 to 1; 1 is solved."""
        if self._scores is None:
            return np.array([answer_correct("", text, e.answer) for e, text in zip(examples, texts, strict=True)])
        problems = [Problem(e.question, text, e.answer, e.row) for e, text in zip(examples, texts, strict=True)]
        return np.clip([value for part in self._scores.parts(problems) for value in self._scores.values(part)], 0, 1)

    @property
    def by_tags(self) -> bool:
        """Whether it is the answer block that counts, and not what a function makes of a completion."""
        return self._scores is None


def is_fault_of_reward(fault: str) -> bool:
    """Whether a run diverged by a reward that is not a finite number, for which no learning rate is to blame."""
    return fault.startswith(REWARD_FAULT)


def foreseen(functions: Mapping[str, str], origin: Origin, scorer: str | None = None) -> list[str]:
    """As for a `Scorer` and a `Judge`, less what a run's folder names: that is not imported, and what is said of it is
    returned.
    """
    _refuse_taken(functions)
    notes = []
    keys = {key_of(name): path for name, path in functions.items()} | ({SCORER: scorer} if scorer else {})
    for key, path in keys.items():
        file = origin.saved_in(key, path)
        if path.startswith(PYTHON):
            notes.append(f"training takes {path} from the Python program that hands it over")
        elif file:
            imports.find_elsewhere(key, path, file)
            notes.append(f"training imports {path}, named by {file}; the plan does not")
        else:
            load_call(key, path)
    return notes


def path_of(function: RewardFunction) -> str:
    """How a configuration names a function: by its import path, if that leads to this very function."""
    named_by = function if hasattr(function, "__qualname__") else type(function)
    module, name = named_by.__module__, named_by.__qualname__
    found = sys.modules.get(module)
    importable = getattr(found, "__spec__", None) is not None and module != "__main__"  # which is another one elsewhere
    path = f"{module}.{name}"
    return path if importable and getattr(found, name, None) is function else f"{PYTHON}{path}"


def load_call(key: str, path: str, origin: Origin = OWN, notice: Notice = print) -> RewardCall:
    """Imports `package.module.function`; modules in the working directory are found, unless a run's folder names them."""
    if path.startswith(PYTHON):
        name = key.rpartition(".")[2]
        raise UserError(
            f"{key}={path}: this function was handed over by a Python program, and cannot be imported.\n"
            f"Hand it over again, as in agent_tunix.train(..., reward_functions={{{name!r}: ...}}), or put it into a\n"
            f"module and name that, as in {key}=my_module.{path.rpartition('.')[2]}."
        )
    wanted = "a function (prompt, completion, answer) -> float, as in my_module.my_reward"
    function = imports.load(key, path, wanted, origin, notice)
    call = checked(key, path, function)
    signature = _signature(key, path, function)
    meant = _first_parameters(signature) in (EACH, TOGETHER) or COLUMNS in (signature.parameters if signature else ())
    if (file := origin.saved_in(key, path)) and not meant:
        raise UserError(
            f"{key}={path}, named by {file}, is not called: its parameters are not those of a reward (prompt, completion,\n"
            f"answer), so the texts of the run may have it do anything. If you trust it, give {key}={path} yourself."
        )
    return call


def checked(key: str, path: str, function: RewardFunction) -> RewardCall:
    """The call of the function that a path names, if it can be called as a reward is."""
    if not callable(function):
        raise UserError(f"{key}={path} is not a function.")
    if signature := _signature(key, path, function):
        refusal = UserError(
            f"{key}={path} takes {signature}; a reward is called with (prompt, completion, answer), also with row where it\n"
            "has that parameter, or with (prompts, completions, rows), or as TRL calls one, by names such as completions."
        )
        first = _first_parameters(signature)
        if COLUMNS in signature.parameters and TOGETHER[2] not in signature.parameters:
            return RewardCall(key, function, signature)  # which columns it needs is seen when there are some
        if first != TOGETHER and {ROW, *TOGETHER} & set(first):
            raise refusal
        with calling(lambda fault: refusal):
            signature.bind("", "", "", **({ROW: {}} if ROW in [*signature.parameters][3:] else {}))
    return RewardCall(key, function, signature)


def _first_parameters(signature: inspect.Signature | None) -> list[str]:
    return [*(signature.parameters if signature else ())][:3]


def _signature(key: str, path: str, function: RewardFunction) -> inspect.Signature | None:
    """What a function takes; None for some that are not written in Python, which do not say it."""
    with calling(lambda fault: UserError(f"{key}={path} does not say what it takes: {named(fault)}.")):
        try:
            return inspect.signature(function)
        except ValueError:
            return None


def _refuse_unimportable(functions: Mapping[str, str]) -> None:
    """For a process of their own, which has none of the program's objects."""
    if unknown := [f"{key_of(name)}={path}" for name, path in functions.items() if path.startswith(PYTHON)]:
        raise UserError(
            f"reward.timeout runs reward functions in a process of their own, which cannot import {', '.join(unknown)}.\n"
            "Put the function into a module and import it from there, or leave reward.timeout out."
        )


def _refuse_taken(names: Iterable[str]) -> None:
    if taken := [name for name in names if name in TAKEN]:
        raise UserError(f"reward.functions.{taken[0]}: the metric reward/{taken[0]} is taken; choose another name.")


def key_of(name: str) -> str:
    """The key under which a configuration names a reward function."""
    return f"reward.functions.{name}"


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions with their rewards, on the host; `texts` holds, by row, those that this process has scored."""

    texts: Mapping[int, str]
    values: dict[str, np.ndarray]
    rewards_PG: np.ndarray
    penalty_B: np.ndarray | None = None  # of long completions, which the rewards include
    kept_PG: np.ndarray | None = None  # of episodes: those that did not leave their group; None: all


def _problem(example: Example, text: str) -> Problem:
    """An answer as reward functions ask for it."""
    said = [{"role": "assistant", "content": text}] if example.messages else None
    return Problem(example.question, text, example.answer, example.row, example.messages or None, said)


def score(scorer: Scorer, examples: Sequence[Example], texts: Mapping[int, str], G: int) -> Scored:
    """Rewards of G completions per example; each process scores the texts that it holds, given by row."""
    from agent_tunix.engine import distributed  # here, as a process that only calls rewards starts without JAX

    of = [examples[row // G] for row in texts]
    problems = [_problem(example, text) for example, text in zip(of, texts.values(), strict=True)]
    own = distributed.agreed(lambda: scorer.of_problems(problems))
    values = distributed.gather_rows(list(texts), own, G * len(examples))
    return Scored(texts, values, scorer.total(values).reshape(-1, G))
