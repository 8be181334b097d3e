"""evaluate.py on a run, on an earlier step of it and on the base model."""

from __future__ import annotations

import pytest

from agent_tunix.engine.metrics import read_records

SMALL = ["evaluation.num_examples=16"]


@pytest.fixture
def trained(command):
    assert command("train", "model=gemma3_tiny", "training.num_batches=2", *SMALL, "hydra.run.dir=run").code == 0
    return "run"


def test_a_run_before_and_after(command, trained, tmp_path):
    known = len(read_records(tmp_path / trained / "evals.jsonl"))
    assert command("evaluate", f"run={trained}", *SMALL).code == 0
    assert command("evaluate", f"run={trained}", "step=0", *SMALL).code == 0
    after, before = read_records(tmp_path / trained / "evals.jsonl")[known:]
    assert (after["step"], before["step"]) == (2, 0)
    assert after["split"] == before["split"] == "test"
    assert after["n"] == 16
    assert not (tmp_path / "evaluations").exists() or not any((tmp_path / "evaluations").iterdir())


@pytest.mark.parametrize("inference", ["standard", "liberal"])
def test_several_passes_give_majority_and_pass_at_k(command, trained, tmp_path, inference):
    outcome = command("evaluate", f"run={trained}", f"inference_config={inference}", "num_passes=4", *SMALL)
    assert outcome.code == 0, outcome.err
    record = read_records(tmp_path / trained / "evals.jsonl")[-1]
    assert record["accuracy"] == pytest.approx(record["pass@1"])
    assert record["pass@1"] <= record["pass@2"] <= record["pass@4"]
    assert 0 <= record["majority_accuracy"] <= record["pass@4"]


def test_the_base_model(command, trained, tmp_path):
    assert command("evaluate", "model=gemma3_tiny", *SMALL, "hydra.run.dir=base").code == 0
    assert command("evaluate", f"run={trained}", "step=0", *SMALL).code == 0
    base = read_records(tmp_path / "base" / "evals.jsonl")[-1]
    start = read_records(tmp_path / trained / "evals.jsonl")[-1]
    assert base["accuracy"] == start["accuracy"]


def test_a_step_without_a_checkpoint_is_refused(command, trained):
    outcome = command("evaluate", f"run={trained}", "step=7", *SMALL)
    assert outcome.code == 2
    assert "there are 2" in outcome.err


def test_a_folder_that_is_no_run_is_refused(command):
    outcome = command("evaluate", "run=nowhere")
    assert outcome.code == 2
    assert "no config.yaml" in outcome.err
