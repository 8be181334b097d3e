"""Reinforcement learning visibly works, and not by accident: the same run on shuffled advantages learns nothing.

Half of a demo's batches are enough to tell; of the demo with a tool, whose steps take longer, a quarter at twice its rate.
"""

from __future__ import annotations

import json

import pytest

from agent_tunix.training.run_folder import read_records

LONG_RUNS = 2  # they take longest


HALF = ["training.num_batches=20"]
QUARTER = ["training.num_batches=10", "optimizer.learning_rate=2e-5", "evaluation.num_examples=64"]


def accuracies(command, tmp_path, experiment: str, given: list[str] = HALF) -> list[dict]:
    only_ends = "training.eval_every_n_steps=null"
    outcome = command("train", f"+experiment={experiment}", *given, only_ends, f"hydra.run.dir={experiment}")
    assert outcome.code == 0, outcome.err
    return read_records(tmp_path / experiment / "evals.jsonl")


def test_the_demo_learns(command, tmp_path):
    before, after = accuracies(command, tmp_path, "quick_test")
    assert 0.2 <= before["accuracy"] <= 0.4
    assert after["accuracy"] >= 0.8
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.2
    summary = json.loads((tmp_path / "quick_test" / "summary.json").read_text())
    assert [summary[f"{which}_eval"] for which in ("first", "best", "final")] == [before, after, after]


def test_the_control_does_not(command, tmp_path):
    before, after = accuracies(command, tmp_path, "control")
    assert after["accuracy"] <= before["accuracy"] + 0.1
    assert after["sampled_accuracy"] <= before["sampled_accuracy"] + 0.1


@pytest.mark.parametrize("given", [QUARTER, pytest.param(HALF, marks=pytest.mark.parity)], ids=["quarter", "half"])
def test_the_demo_learns_to_call_its_tool(command, tmp_path, given):
    before, after = accuracies(command, tmp_path, "tool_quick_test", given)
    assert before["accuracy"] <= 0.4
    assert after["accuracy"] >= 0.7
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.2
    assert before["episode/calling"] < 0.8
    assert after["episode/calling"] > 0.9


@pytest.mark.parity  # it takes long
@pytest.mark.parametrize("given", [QUARTER, HALF], ids=["quarter", "half"])
def test_its_control_does_not(command, tmp_path, given):
    before, after = accuracies(command, tmp_path, "tool_control", given)
    assert after["accuracy"] <= before["accuracy"] + 0.1
    assert after["sampled_accuracy"] <= before["sampled_accuracy"] + 0.1
