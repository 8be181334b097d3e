"""A run, its continuation, its evaluation and a sweep, told to the real packages of the services, offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_tunix.training.loggers.base import PACKAGES, is_installed, kept
from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
FEW = ["model=gemma3_tiny", "data.num_examples=64", "training.num_batches=2", "training.micro_batch_size=2"]
FEW += ["training.save_interval_steps=1", "evaluation.num_examples=8", "evaluation.sampled=false"]
MISSING = [package for package in PACKAGES if not is_installed(package)]

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    import trackio.utils
    import wandb
    from trackio import sqlite_storage

    for module in (trackio.utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    wandb.teardown()


def test_a_run_its_continuation_and_its_evaluation_are_one_run_of_each_service(command, tmp_path):
    import mlflow
    from trackio.sqlite_storage import SQLiteStorage

    outcome = command("train", *FEW, "training.loggers=[wandb,trackio,mlflow]", "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    assert "failed" not in outcome.out
    ids = {service: kept(Path("run"), service) for service in PACKAGES}
    assert command("train", "training.resume=run", "training.num_epochs=2").code == 0
    assert command("evaluate", "run=run", "evaluation.num_examples=8").code == 0
    assert {service: kept(Path("run"), service) for service in PACKAGES} == ids

    client, losses = mlflow.MlflowClient(), [r["loss"] for r in read_records(Path("run/metrics.jsonl"))]
    history = client.get_metric_history(ids["mlflow"]["id"], "train/loss")
    assert [m.value for m in sorted(history, key=lambda m: m.step)] == pytest.approx(losses)
    assert client.get_run(ids["mlflow"]["id"]).info.status == "FINISHED"
    test = [record for record in read_records(Path("run/evals.jsonl")) if record["split"] == "test"]
    assert client.get_metric_history(ids["mlflow"]["id"], "test/accuracy")[0].value == test[0]["accuracy"]
    rows = SQLiteStorage.get_logs("agent-tunix", ids["trackio"]["name"])
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses)
    (held_out,) = [row["test/completions"]["_value"] for row in rows if "test/completions" in row]
    assert len(held_out) == 8
    assert SQLiteStorage.get_runs("agent-tunix") == [ids["trackio"]["name"]]
    assert {path.name.rpartition("-")[2] for path in Path("run/wandb").glob("offline-run-*")} == {ids["wandb"]["id"]}


def test_each_job_of_a_fused_sweep_is_a_run_of_its_own(command, tmp_path):
    rates = "optimizer.learning_rate=1e-5,3e-5"
    fused = ["hydra.launcher.fuse=always", "hydra.sweep.dir=sweep"]
    outcome = command("train", "--multirun", *FEW, rates, "training.loggers=[wandb]", *fused)
    assert outcome.code == 0, outcome.err
    assert json.loads(Path("sweep/sweep.json").read_text())["mode"] == "fused"
    found = [kept(Path("sweep") / job, "wandb")["id"] for job in "01"]
    assert len(set(found)) == 2
    for job, name in zip("01", found, strict=True):
        assert list((Path("sweep") / job / "wandb").glob(f"offline-run-*-{name}/*.wandb"))


def test_a_service_that_cannot_be_reached_does_not_end_a_run(command, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    outcome = command("train", *FEW, "training.loggers=[mlflow]", "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("warning: the logger MLflow, of training.loggers, failed: ") == 1
    assert json.loads(Path("run/summary.json").read_text())["status"] == "completed"
