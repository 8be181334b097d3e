"""Numbers out of hand never reach the weights, and what happens next is what `training.on_divergence` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
RUN = [
    "model=gemma3_tiny",
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "training.num_batches=6",
    "training.save_interval_steps=2",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
    "hydra.run.dir=run",
]
ABSURD = ["optimizer.learning_rate=1", "optimizer.warmup_ratio=0.0"]
OVERFLOW = ["grpo.beta=1e38"]  # near the largest float32, so that the gradient overflows


def summary(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def steps_written(tmp_path: Path) -> list[int]:
    return [record["step"] for record in read_records(tmp_path / "run" / "metrics.jsonl")]


@pytest.fixture
def nan_reward(tmp_path, monkeypatch):
    """A reward function that gives NaN for the first prompt of the fourth batch of two."""
    (tmp_path / "nan_reward.py").write_text(
        "seen = {}\n"
        "def mine(prompt, completion, answer):\n"
        "    return float('nan') if seen.setdefault(prompt, len(seen)) == 6 else 0.0\n"
    )
    monkeypatch.delitem(sys.modules, "nan_reward", raising=False)
    return ["+reward.functions.mine=nan_reward.mine"]


def finite_weights(tmp_path: Path) -> bool:
    import jax
    import orbax.checkpoint as ocp

    saved = sorted((tmp_path / "run" / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore((saved[-1] / "state").resolve())
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def test_an_absurd_rate_stops_with_the_remedy_of_the_reference(command, tmp_path):
    folder = tmp_path / "more files"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "own.yaml").write_text("# @package _global_\nscheduler: {lr_min: 0.5}\n")
    outcome = command("train", *RUN, *ABSURD, "--config-dir", str(folder), "+experiment=own")
    assert outcome.code == 3
    assert "diverged at step" in outcome.err
    assert "Ill (diverging" in (tmp_path / "run" / "report.html").read_text()
    own = " ".join([f"'--config-dir={folder}'", *RUN[:4]])
    assert f"train {own}" in outcome.err, "the command to try is that of this run"
    assert "optimizer.learning_rate=0.1 scheduler.lr_min=0.01" in outcome.err, "a rate below lr_min would be refused"
    assert "optimizer.max_grad_norm=0.01" in outcome.err
    assert "Traceback" not in outcome.err
    assert summary(tmp_path)["status"] == "diverged"


def test_a_nan_reward_stops_with_the_functions_name_and_the_last_checkpoint_is_kept(command, tmp_path, nan_reward):
    outcome = command("train", *RUN, *nan_reward)
    assert outcome.code == 3
    assert "reward function 'mine' returned nan" in outcome.err
    assert summary(tmp_path)["status"] == "diverged"
    assert "learning rate" not in outcome.err, "no rate has to do with it"
    [advice] = summary(tmp_path)["advice"]
    assert advice.endswith("training.on_divergence=ignore")
    assert advice in outcome.err
    assert advice.split()[-1] in command("doctor", "run").out
    assert steps_written(tmp_path) == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")) == ["2"]


def test_rollback_goes_on_without_the_batch_at_a_tenth_of_the_rate(command, tmp_path, nan_reward):
    outcome = command("train", *RUN, *nan_reward, "training.on_divergence=rollback")
    assert outcome.code == 0, outcome.err
    report = summary(tmp_path)
    assert report["status"] == "completed"
    assert [(event["step"], event["batch"]) for event in report["rollbacks"]] == [(4, 3)]
    assert (tmp_path / "run" / "checkpoints" / "4").exists(), "which is due, though nothing was learnt in that step"
    assert report["rollbacks"][0]["rate_scale"] == pytest.approx(0.1)
    assert steps_written(tmp_path) == [1, 2, 3, 5, 6]
    rates = {record["step"]: record["lr"] for record in read_records(tmp_path / "run" / "metrics.jsonl")}
    assert rates[3] < 0.2 * rates[2]
    assert finite_weights(tmp_path)


def test_rollback_gives_up_after_three(command, tmp_path):
    outcome = command("train", *RUN, *OVERFLOW, "training.on_divergence=rollback")
    assert outcome.code == 3
    assert "after 3 rollbacks" in outcome.err
    tries = outcome.err.split("in this order:\n")[1].splitlines()
    assert len(tries) == 2, "the third that is usually advised is what was done"
    report = summary(tmp_path)
    assert report["status"] == "diverged"
    assert [event["rate_scale"] for event in report["rollbacks"]] == pytest.approx([0.1, 0.01, 0.001])


def test_ignore_drops_the_batch_and_goes_on(command, tmp_path, nan_reward):
    outcome = command("train", *RUN, *nan_reward, "training.on_divergence=ignore", "training.eval_every_n_steps=4")
    assert outcome.code == 0, outcome.err
    assert [record["step"] for record in read_records(tmp_path / "run" / "evals.jsonl")] == [0, 4, 6]
    assert (tmp_path / "run" / "checkpoints" / "4").exists(), "which is due, though nothing was learnt in that step"
    assert "the batch is dropped" in outcome.out
    assert summary(tmp_path)["status"] == "completed"
    assert steps_written(tmp_path) == [1, 2, 3, 5, 6]


def test_a_run_whose_batches_were_all_dropped_has_diverged(command, tmp_path, nan_reward):
    (tmp_path / "nan_reward.py").write_text("def mine(prompt, completion, answer):\n    return float('nan')\n")
    outcome = command("train", *RUN, *nan_reward, "training.on_divergence=ignore")
    assert outcome.code == 3
    assert "Mend the function" in outcome.err
    assert summary(tmp_path)["status"] == "diverged"
    [advice] = summary(tmp_path)["advice"]
    assert advice.endswith("training.on_divergence=stop"), "dropping them was tried"
    examined = command("doctor", "run").out
    assert "diverging (grave)" in examined
    assert advice.split()[-1] in examined


@pytest.mark.usefixtures("hardly_optimized")
def test_so_has_one_none_of_whose_updates_was_applied(command, tmp_path):
    """Their numbers were written, but nothing was learnt."""
    outcome = command("train", *RUN, "model.lora_alpha=1e38", "training.on_divergence=ignore")
    assert outcome.code == 3
    assert outcome.out.count("the batch is dropped") == 5
    assert steps_written(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert summary(tmp_path)["status"] == "diverged"


def test_an_exploding_kl_counts_as_divergence(command, tmp_path):
    outcome = command("train", *RUN, "optimizer.learning_rate=1e-5", "training.max_kl=1e-9")
    assert outcome.code == 3
    assert "above training.max_kl=1e-09" in outcome.err


def test_an_overflowing_gradient_does_not_reach_the_weights(command, tmp_path):
    outcome = command("train", *RUN, *OVERFLOW, "training.on_divergence=ignore")
    assert outcome.code == 0, outcome.err
    assert "the norm of the gradient is" in outcome.out or "the loss is" in outcome.out
    assert finite_weights(tmp_path)
    overflowed = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if record["grad_norm"] is None]
    assert len(overflowed) >= 5, "all but the first, in which the policy is the reference"
    assert all(record["update_survival"] == 0 for record in overflowed)


def test_one_diverging_candidate_does_not_end_a_sweep(command, tmp_path):
    sweep = ["--multirun", "optimizer.learning_rate=1,1e-6", "optimizer.warmup_ratio=0.0", "hydra.sweep.dir=sweep"]
    outcome = command("train", *RUN[:-1], *sweep)
    assert outcome.code == 0, outcome.err
    statuses = [json.loads((tmp_path / "sweep" / job / "summary.json").read_text())["status"] for job in "01"]
    assert statuses == ["diverged", "completed"]
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert "Best of 2: learning_rate=1e-06" in page, "the page of the sweep is renewed by its last job"


def test_a_sweep_in_which_all_diverge_ends_as_one_run_that_does(command, tmp_path):
    sweep = ["--multirun", "optimizer.learning_rate=0.5,1", "optimizer.warmup_ratio=0.0", "hydra.sweep.dir=sweep"]
    outcome = command("train", *RUN[:-1], *sweep)
    assert outcome.code == 3
    assert "All jobs diverged" in outcome.err
    assert "Traceback" not in outcome.err
    assert (tmp_path / "sweep" / "report.html").exists(), "it is summed up all the same"
