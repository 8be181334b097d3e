"""`agent-tunix compare`: which evaluations are set side by side, and what is said of them."""

from __future__ import annotations

import json
import shutil

import pytest

GREEDILY = {"inference": "greedy", "num_passes": 1}
NAMES = [f"problem {i}" for i in range(40)]


@pytest.fixture
def runs(write_run, tmp_path):
    """Runs by name, of which each gives the answers of its evaluations."""

    def write(**answers):
        for number, (name, records) in enumerate(answers.items()):
            folder = write_run(tmp_path / name, steps=4, optimizer__learning_rate=10.0 ** -(number + 5))
            lines = [{"step": 4, "split": "validation", **GREEDILY, "problems": NAMES} | record for record in records]
            (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    return write


def solves(number):
    return [int(i < number) for i in range(40)]


def test_the_better_of_two_is_named_with_its_interval_and_test(command, runs):
    runs(a=[{"right": solves(20)}], b=[{"right": solves(32)}])
    said = command("compare", "a", "b").out
    assert "optimizer.learning_rate: 1e-05, 1e-06" in said
    assert "A  step 4       50.0%  (95 % interval 35.2 to 64.8)" in said
    assert "only A solves 0; only B solves 12" in said
    assert "B is better than A by 30.0 points" in said
    assert "exact McNemar test" in said


def test_what_may_be_chance_is_called_so(command, runs):
    runs(a=[{"right": solves(20)}], b=[{"right": solves(22)}])
    said = command("compare", "a", "b").out
    assert "B is ahead by 5.0 points" in said
    assert "which may be chance (p = 0.5, exact McNemar test)" in said


def test_a_program_reads_it_as_json(command, runs):
    runs(a=[{"right": solves(20)}], b=[{"right": solves(32)}])
    found = json.loads(command("compare", "a", "b", "--json").out)
    (one,) = found["comparisons"]
    assert (one["set"], one["n"], one["a"], one["b"], one["only_b"]) == ("validation", 40, 0.5, 0.8, 12)
    assert one["difference"] == pytest.approx(0.3)
    assert one["low"] < 0.3 < one["high"]


def test_problems_are_told_by_their_names_and_only_shared_ones_count(command, runs):
    """B was asked others too, in another order, one of them twice."""
    asked = [*reversed(NAMES), "another", NAMES[0]]
    runs(a=[{"right": solves(20)}], b=[{"problems": asked, "right": [*reversed(solves(20)), 1, 1]}])
    (one,) = json.loads(command("compare", "a", "b", "--json").out)["comparisons"]
    assert (one["n"], one["asked"], one["only_a"], one["only_b"]) == (40, [40, 42], 0, 0)


def test_the_last_evaluation_counts_unless_a_step_is_named(command, runs):
    steps = [{"step": step, "right": solves(10 * (step + 1))} for step in (2, 0)]
    runs(a=steps, b=[{"right": solves(30)}])
    found = {}
    for given in (("a", "b"), ("a@0", "b"), ("a",)):
        (one,) = json.loads(command("compare", *given, "--json").out)["comparisons"]
        found[given] = (one["steps"], one["a"])
    assert found == {("a", "b"): ([2, 4], 0.75), ("a@0", "b"): ([0, 4], 0.25), ("a",): ([0, 2], 0.25)}


def test_only_what_was_drawn_in_one_way_is_compared_also_where_a_set_has_another_name(command, runs):
    sampled = {"inference": "4 completions at temperature 1", "num_passes": 4, "split": "test"}
    runs(
        a=[{"split": "test", "right": solves(20)}, sampled | {"right": [3] * 40}],
        b=[{"split": "test", "set": "mine", "right": solves(20)}, sampled | {"inference": "other", "right": [1] * 40}],
    )
    (one,) = json.loads(command("compare", "a", "b", "--json").out)["comparisons"]
    assert (one["set"], one["inference"]) == ("test", "greedy")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a", "old"], "old does not say which problems were solved"),
        (["a", "a@3"], "the steps that were evaluated are 4"),
        (["a", "other"], "have not been asked the same problems"),
        (["a", "nowhere"], "nowhere is not a folder"),
        (["a"], "was evaluated at one step only"),
        (["a", "b", "c"], "usage: agent-tunix compare"),
        (["a@x", "a"], "a step is a number"),
    ],
)
def test_what_cannot_be_compared_is_told_with_what_to_do(command, runs, oldest_run, tmp_path, given, said):
    runs(a=[{"right": solves(20)}], other=[{"problems": NAMES[:1], "right": [1], "inference": "another"}])
    shutil.copytree(oldest_run, tmp_path / "old")
    outcome = command("compare", *given)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    if given[1:] == ["old"]:
        assert "evaluate run=old" in outcome.err
