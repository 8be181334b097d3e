"""Reinforcement learning visibly works, and not by accident: the same run on shuffled advantages learns nothing.

Half of a demo's batches are enough to tell.
"""

from __future__ import annotations

import json

from agent_tunix.training.run_folder import read_records

LONG_RUNS = True


def accuracies(command, tmp_path, experiment: str) -> list[dict]:
    half = ["training.num_batches=20", "training.eval_every_n_steps=null"]
    outcome = command("train", f"+experiment={experiment}", *half, f"hydra.run.dir={experiment}")
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


def test_the_demo_learns_to_call_its_tool(command, tmp_path):
    before, after = accuracies(command, tmp_path, "tool_quick_test")
    assert before["accuracy"] <= 0.4
    assert after["accuracy"] >= 0.7
    assert after["sampled_accuracy"] >= before["sampled_accuracy"] + 0.2
    assert before["episode/calling"] < 0.8
    assert after["episode/calling"] > 0.9


def test_its_control_does_not(command, tmp_path):
    before, after = accuracies(command, tmp_path, "tool_control")
    assert after["accuracy"] <= before["accuracy"] + 0.1
    assert after["sampled_accuracy"] <= before["sampled_accuracy"] + 0.1
