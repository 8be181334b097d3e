from __future__ import annotations

import functools
import sys

import numpy as np
import pytest

from agent_tunix.config.imports import OWN, Origin
from agent_tunix.environments import rewards
from agent_tunix.environments.rewards import PYTHON, Scorer, foreseen, load_call, path_of
from agent_tunix.errors import DivergenceError, UserError

GOOD = "<reasoning>3+4</reasoning><answer>7</answer>"
MODULE = """
import json

def length(prompt, completion, answer):
    return len(completion)

def echo(prompt, completion, answer):
    return float(prompt == "q" and answer == "7")

def fails(prompt, completion, answer):
    raise KeyError("lost")

def nothing(prompt, completion, answer):
    return None

def leaves(prompt, completion, answer):
    raise SystemExit("bye")

class Failed(BaseException):
    pass

def gives_up(prompt, completion, answer):
    raise Failed("no")

class Silent(Exception):
    def __str__(self):
        raise SystemExit("no word")

def unprintable(prompt, completion, answer):
    raise Silent

class Ends:
    def __float__(self):
        raise SystemExit(5)

def ends_as_a_number(prompt, completion, answer):
    return Ends()

def of_two(completion, answer):
    return 1.0

def of_any(*texts, **more):
    return 1.0

def not_a_number(prompt, completion, answer):
    return float("nan")

def huge(prompt, completion, answer):
    return 1e39

def deep(prompt, completion, answer):
    return json.loads(completion)

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's own module in the working directory."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("def oops(:\n")
    (tmp_path / "failing_rewards.py").write_text("1 / 0\n")
    (tmp_path / "leaving_rewards.py").write_text("raise SystemExit\n")
    (tmp_path / "base_rewards.py").write_text("raise BaseException('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("completion", "exact", "approximate", "answer", "number"),
    [
        (GOOD, 1, 1, 1, 1),
        ("<reasoning>3+4</reasoning><answer>8</answer>", 1, 1, 0, 0),
        ("<reasoning>3+4</reasoning><answer>7.0 pears</answer>", 1, 1, 1, 1),
        ("3+4 <answer>7</answer>", 0, 0.5, 0, 1),
        ("<answer>7", 0, 0.25, 0, 0),
        (GOOD + GOOD, 0, 0, 0, 1),
        ("7", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_shipped_rewards(completion, exact, approximate, answer, number):
    assert rewards.format_exact("q", completion, "7") == exact
    assert rewards.format_approximate("q", completion, "7") == approximate
    assert rewards.answer_correct("q", completion, "7") == answer
    assert rewards.number_in_answer("q", completion, "7") == number


def test_an_answer_that_is_no_number_is_compared_as_text():
    completion = "<reasoning>x</reasoning><answer> Paris </answer>"
    assert rewards.answer_correct("", completion, "Paris") == 1
    assert rewards.answer_correct("", completion, "Rome") == 0
    assert rewards.number_in_answer("", completion, "Paris") == 0


def test_of_several_numbers_all_must_be_right():
    completion = "<reasoning>x</reasoning><answer>(2, {})</answer>"
    for function in (rewards.answer_correct, rewards.number_in_answer):
        assert [function("", completion.format(y), "(2, 3)") for y in (3, 5)] == [1, 0]


def test_the_reward_is_the_weighted_sum_and_a_weight_not_given_is_one(mine):
    scorer = Scorer({"length": "my_rewards.length", "echo": "my_rewards.echo"}, {"length": 0.5})
    values = scorer(["q", "q"], ["ab", "abcd"], ["7", "8"])
    assert {name: value.tolist() for name, value in values.items()} == {"length": [2, 4], "echo": [1, 0]}
    total = scorer.total(values)
    assert total.tolist() == [2, 2]
    assert total.dtype == np.float32


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_function_cannot_have_the_name_of_what_all_of_them_make(mine, name):
    with pytest.raises(UserError, match=f"reward.functions.{name}: .* choose another name"):
        Scorer({name: "my_rewards.length"}, {})


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("fails", "KeyError: 'lost'"),
        ("fails", "(my_rewards.py, line "),
        ("leaves", "SystemExit: bye"),
        ("gives_up", "Failed: no"),
        ("unprintable", "raised Silent, which cannot be printed"),
        ("ends_as_a_number", "returned a Ends, not a number (SystemExit: 5)"),
        ("nothing", "TypeError"),
        ("nothing", "returned a NoneType, not a number"),
        ("not_a_number", "returned nan"),
        ("huge", "returned inf"),
    ],
)
def test_a_reward_that_raises_or_is_not_finite_stops_with_name_completion_and_fault(mine, function, fault):
    scorer = Scorer({"mine": f"my_rewards.{function}"}, {})
    with pytest.raises(UserError) as stop:
        scorer(["q"], ["the completion"], ["7"])
    for part in ("'mine'", fault, "'the completion'", "'7'"):
        assert part in str(stop.value)


def test_of_a_long_completion_beginning_and_end_are_shown(mine):
    with pytest.raises(UserError) as stop:
        Scorer({"mine": "my_rewards.fails"}, {})(["q"], ["begun" + "x" * 5000 + "done"], ["7"])
    assert "'begunxxx" in str(stop.value)
    assert "xxxdone'" in str(stop.value)
    assert len(str(stop.value)) < 1500


def test_the_line_named_is_one_of_the_functions_own_file(mine):
    """Where it fails in a library, the line that called that says more."""
    line = 1 + MODULE.splitlines().index("    return json.loads(completion)")
    with pytest.raises(UserError, match=rf"JSONDecodeError: .* \(my_rewards.py, line {line}\)\n"):
        Scorer({"mine": "my_rewards.deep"}, {})(["q"], ["no JSON"], ["7"])


@pytest.mark.parametrize("weight", [1e39, 1e30, -1e19])
@pytest.mark.filterwarnings("error")
def test_a_reward_too_large_to_be_compared_is_none(weight):
    scorer = Scorer({"format": "agent_tunix.environments.rewards.format_exact"}, {"format": weight})
    with pytest.raises(DivergenceError) as stop:
        scorer.total({"format": np.array([0, 1], np.float32)})
    assert rewards.is_fault_of_reward(str(stop.value))


@pytest.mark.parametrize(
    "path",
    [
        "my_rewards.missing",
        "my_rewards.number",
        "no_such_module.f",
        "length",
        ".my_rewards.length",
        "",
        "broken_rewards.oops",
        "failing_rewards.f",
        "leaving_rewards.f",
        "base_rewards.f",
    ],
)
def test_a_function_that_cannot_be_imported_is_named_with_its_path(mine, path):
    with pytest.raises(UserError, match=rf"reward\.functions\.mine={path.replace('.', '[.]')}"):
        load_call("reward.functions.mine", path)


def test_a_function_that_takes_something_else_is_refused_before_it_is_called(mine):
    with pytest.raises(UserError, match=r"mine=my_rewards.of_two takes \(completion, answer\); a reward is called with"):
        load_call("reward.functions.mine", "my_rewards.of_two")
    for path in ("my_rewards.of_any", "builtins.max"):  # the second says nothing of what it takes
        assert callable(load_call("reward.functions.mine", path).function)


def test_lists_of_different_lengths_are_a_fault():
    with pytest.raises(ValueError, match="zip"):
        Scorer({"f": "agent_tunix.environments.rewards.format_exact"}, {})(["q"], ["a", "b"], ["7"])


def test_of_what_a_run_names_only_what_is_meant_for_a_runs_texts_is_called(mine, tmp_path):
    """Any library may have a function of three arguments that runs the first of them."""
    (tmp_path / "gadgets.py").write_text("def run(statement, filename, sort):\n    exec(statement)\n")
    run = tmp_path / "runs" / "x"
    run.mkdir(parents=True)
    assert load_call("reward.functions.mine", "my_rewards.echo", Origin(run), print).function("q", "", "7") == 1
    for path in ("gadgets.run", "my_rewards.of_any"):
        with pytest.raises(UserError, match=r"named by .*x/config\.yaml, is not called"):
            load_call("reward.functions.mine", path, Origin(run), print)
        assert load_call("reward.functions.mine", path, Origin(run, frozenset({"reward.functions.mine"})), print)


def test_a_plan_imports_the_users_own_functions_and_says_what_else_training_would(mine, tmp_path):
    run = tmp_path / "runs" / "x"
    functions = {"theirs": "failing_rewards.f", "ours": "agent_tunix.environments.rewards.format_exact"}
    (note,) = rewards.foreseen(functions, Origin(run))
    assert note == f"training imports failing_rewards.f, named by {run}/config.yaml; the plan does not"
    for origin in (OWN, Origin(run, frozenset({"reward.functions.theirs"}))):
        with pytest.raises(UserError, match="ZeroDivisionError"):
            rewards.foreseen(functions, origin)
    with pytest.raises(UserError, match="is not imported"):
        rewards.foreseen({"theirs": "no_such_module.f"}, Origin(run))


def two_letters(prompt, completion, answer):
    return float(len(completion) == 2)


def test_a_function_is_named_by_the_path_that_leads_to_it_and_by_none_if_none_does(mine, monkeypatch):
    length = load_call("reward.functions.mine", "my_rewards.length").function
    assert path_of(length) == "my_rewards.length"
    assert load_call("reward.functions.mine", path_of(two_letters)).function is two_letters
    monkeypatch.setattr(sys.modules["my_rewards"], "length", two_letters)
    assert path_of(length) == "python:my_rewards.length", "another function has its name now"
    monkeypatch.setattr(two_letters, "__module__", "__main__")
    assert path_of(two_letters) == "python:__main__.two_letters"
    for function in (lambda *texts: 1.0, functools.partial(two_letters), Callable()):
        assert path_of(function).startswith(PYTHON)


class Callable:
    def __call__(self, prompt, completion, answer):
        return 1.0


def test_a_function_that_no_path_leads_to_is_called_where_it_is_handed_over_and_missed_where_it_is_not():
    named = {"mine": "python:__main__.mine"}
    scorer = Scorer(named, {}, handed_over={"mine": two_letters})
    assert scorer(["q"] * 2, ["ab", "c"], ["7"] * 2)["mine"].tolist() == [1, 0]
    with pytest.raises(UserError, match=r"Hand it over again.*reward_functions=\{'mine'.*\n.*my_module.mine"):
        Scorer(named, {}, handed_over={"other": two_letters})
    with pytest.raises(UserError, match=r"takes .completion, answer.; a reward is called with"):
        Scorer(named, {}, handed_over={"mine": lambda completion, answer: 1.0})
    assert "from the Python program that hands it over" in foreseen(named, OWN)[0]


def test_a_process_of_their_own_cannot_have_functions_that_no_path_leads_to(mine):
    with pytest.raises(UserError, match=r"reward.timeout runs .* cannot import reward.functions.mine=python:__main__.mine"):
        Scorer({"mine": "python:__main__.mine"}, {}, timeout=5.0, handed_over={"mine": two_letters})
    length = load_call("reward.functions.mine", "my_rewards.length").function
    scorer = Scorer({"mine": path_of(length)}, {}, timeout=5.0, handed_over={"mine": length})
    assert scorer(["q"], ["abc"], ["7"])["mine"].tolist() == [3]
