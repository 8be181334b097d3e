"""Reward functions of every shape, in the run's own process and in one of theirs."""

from __future__ import annotations

import asyncio
import sys

import pytest

from agent_tunix.environments.reward_call import Problem
from agent_tunix.environments.rewards import Scorer, checked, load_call
from agent_tunix.errors import DivergenceError, UserError

FUNCTIONS = """
import asyncio

def with_row(prompt, completion, answer, row):
    return len(completion) * row["difficulty"]

def batch(prompts, completions, rows):
    assert len(prompts) == len(completions) == len(rows)
    return [len(completions) * row["difficulty"] for row in rows]

async def judge(prompt, completion, answer):
    judge.waiting += 1
    while judge.waiting < 3:  # which none but calls made at the same time would end
        await asyncio.sleep(0.001)
    return float(len(completion))
judge.waiting = 0

async def judge_with_row(prompt, completion, answer, *, row):
    return row["difficulty"]

async def judge_all(prompts, completions, rows):
    await asyncio.sleep(0)
    return (len(completion) for completion in completions)

one_at_a_time = asyncio.Semaphore(1)

async def waits_its_turn(prompt, completion, answer):
    async with one_at_a_time:
        await asyncio.sleep(0)
        return 1.0

async def leaves(prompt, completion, answer):
    raise SystemExit("bye")

async def fails_on_b(prompt, completion, answer):
    if completion == "b":
        raise KeyError("lost")
    return 1.0

async def hangs(prompt, completion, answer):
    await asyncio.sleep(1e6)

def too_few(prompts, completions, rows):
    return [1.0]

def none(prompts, completions, rows):
    return None

def no_numbers(prompts, completions, rows):
    return ["high"] * len(rows)

def infinite_on_b(prompts, completions, rows):
    return [float("inf") if completion == "b" else 0.0 for completion in completions]

def fails(prompts, completions, rows):
    raise KeyError("lost")

def misplaced(prompt, completion, row): ...
def crossed(completions, prompts, rows): ...
"""


@pytest.fixture(autouse=True)
def shapes(tmp_path, monkeypatch):
    (tmp_path / "shapes.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "shapes", raising=False)


def called(function: str, timeout: float | None = None) -> list[float]:
    return all_called({"mine": function}, timeout)["mine"]


def all_called(functions: dict[str, str], timeout: float | None) -> dict[str, list[float]]:
    completions, rows = ["a", "b", "cc"], [{"difficulty": d, "source": "mine"} for d in (1, 2, 3)]
    scorer = Scorer({name: f"shapes.{function}" for name, function in functions.items()}, {}, timeout=timeout)
    return {name: values.tolist() for name, values in scorer(["q"] * 3, completions, ["7"] * 3, rows).items()}


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_each_shape_is_called_as_its_parameters_say(timeout):
    wanted = {"with_row": [1, 2, 6], "batch": [3, 6, 9], "judge": [1, 1, 2], "judge_with_row": [1, 2, 3]}
    wanted["judge_all"] = [1, 1, 2]
    assert all_called({name: name for name in wanted}, timeout) == wanted


FAULTS = [
    ("fails_on_b", r"raised KeyError: 'lost' \(shapes.py, line \d+\)\non the completion 'b'"),
    ("leaves", r"raised SystemExit: bye \(shapes.py, line \d+\)\non the completion 'a'"),
    ("fails", r"raised KeyError: 'lost' \(shapes.py, line \d+\)\non the completion 'a'"),
    ("too_few", "returned 1 numbers for 3 completions"),
    ("none", "returned a NoneType, not a list"),
    ("no_numbers", "returned a str, not a number"),
]
APART = ("leaves", "too_few")  # the others are told of by the same code, and each takes a process


@pytest.mark.parametrize(
    ("function", "said", "timeout"),
    [
        pytest.param(*fault, timeout, marks=[pytest.mark.parity] if timeout and fault[0] not in APART else [])
        for fault in FAULTS
        for timeout in (None, 60.0)
    ],
)
def test_what_fails_is_named(function, said, timeout):
    with pytest.raises(UserError, match=f"The reward function 'mine' {said}"):
        called(function, timeout)


def test_a_value_of_a_batch_that_is_not_finite_is_named_with_its_completion():
    with pytest.raises(DivergenceError, match="'mine' returned inf on the completion 'b'"):
        called("infinite_on_b")


def test_calls_that_are_awaited_have_one_limit_of_time():
    with pytest.raises(UserError, match=r"took longer than reward\.timeout=0\.5 s"):
        called("hangs", 0.5)


def test_what_a_function_keeps_is_good_for_the_next_batch():
    scorer = Scorer({"mine": "shapes.waits_its_turn"}, {})
    for _ in range(2):
        assert scorer(["q"] * 3, ["a"] * 3, ["7"] * 3)["mine"].tolist() == [1, 1, 1]


def test_it_works_where_a_loop_is_at_work_already():
    """As in a notebook."""

    async def cell() -> list[float]:
        return called("judge_all")

    assert asyncio.run(cell()) == [1, 1, 2]


@pytest.mark.parametrize("function", ["misplaced", "crossed"])
def test_parameters_in_another_order_are_refused_before_they_are_mixed_up(function):
    with pytest.raises(UserError, match=r"a reward is called with \(prompt, completion, answer\), also with row"):
        load_call("reward.functions.mine", f"shapes.{function}")


PROBLEMS = [
    Problem("q1", "first", "1", {"level": 1, "only": 0}),
    Problem("q2", "second", "2", {"level": 2}),
]


def by_columns(prompts, completions, level, **kwargs):
    """As TRL has them: the parser of a column, and what it does not need."""
    assert (prompts, level, kwargs) == (["q1", "q2"], [1, 2], {"answer": ["1", "2"]})
    return [len(text) for text in completions]


def completions_alone(completions):
    return [None if text == "first" else 1.0 for text in completions]


async def later(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(completions))] * len(completions)


@pytest.mark.parametrize(("function", "values"), [(by_columns, [5, 6]), (completions_alone, [0, 1]), (later, [2, 2])])
def test_a_function_as_trl_has_them_is_called_by_name_with_the_fields_of_the_rows(function, values):
    call = checked("reward.functions.mine", "mine", function)
    assert [value for part in call.parts(PROBLEMS) for value in call.values(part)] == values


def test_it_has_messages_and_environments_where_there_are_some():
    def of_episodes(prompts, completions, environments, **kwargs):
        each = zip(environments, prompts, completions, strict=True)
        return [world + len(asked) + len(said) for world, asked, said in each]

    played = [problem._replace(asked=[{}], said=[{}, {}], environment=10) for problem in PROBLEMS]
    assert checked("reward.functions.mine", "mine", of_episodes).values(played) == [13, 13]


def test_a_column_that_no_row_has_is_named():
    def of_colour(completions, colour):
        return [0.0] * len(completions)

    with pytest.raises(UserError, match="colour"):
        checked("reward.functions.mine", "mine", of_colour).values(PROBLEMS)
