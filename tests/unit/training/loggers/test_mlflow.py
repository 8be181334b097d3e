"""What MLflow's own client reads of a run, from its database and from its store of files."""

from __future__ import annotations

import math

import pytest
from told_runs import CONFIG, tell

from agent_tunix.training.loggers.base import kept

mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")


@pytest.fixture(params=["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def client(request, tmp_path, monkeypatch):
    """MLflow's, where the logger's goes too; what it writes without being asked where goes to the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", request.param.format(tmp_path))
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return mlflow.MlflowClient()


def test_a_run_is_told_whole_and_goes_on_as_the_same_run(client, tmp_path):
    said = tell(tmp_path / "demo", "mlflow", CONFIG | {"project_name": "mine"})
    known = kept(tmp_path / "demo", "mlflow")["id"]
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_id == known
    assert len(said) == 2
    assert known in said[0]
    assert (run.info.run_name, run.info.status, run.data.tags["status"]) == ("demo", "FINISHED", "completed")
    assert run.data.tags.keys() >= {"first", "second"}
    assert run.data.tags["mlflow.note.content"] == "what it is for"
    assert (run.data.params["seed"], run.data.params["model.weights"]) == ("7", "owner/name")
    losses = client.get_metric_history(known, "train/loss")
    assert sorted((m.step, m.value) for m in losses) == [(1, 0.5), (2, 0.4), (2, 0.6)]
    assert [m.value for m in client.get_metric_history(known, "validation/pass_at_8")] == [1.0, 1.0]
    assert all(math.isnan(m.value) for m in client.get_metric_history(known, "train/kl"))
    names = ("validation/completions", "train/samples")
    held_out, samples = (client.load_table(run.info.experiment_id, f"{name}.json", [known]) for name in names)
    assert list(held_out["completion"]) == ["two, at 0", "two, at 2"]
    assert list(samples["completion"]) == ["four, at 1", "four, at 2", "four, at 2"]
    assert "weights: owner/name" in mlflow.artifacts.load_text(f"runs:/{known}/config.yaml")


def test_a_value_that_a_resumed_run_has_changed_does_not_end_it(client, tmp_path):
    tell(tmp_path / "demo", "mlflow")
    said = tell(tmp_path / "demo", "mlflow", CONFIG | {"seed": 8, "more": 1})
    run = client.get_run(kept(tmp_path / "demo", "mlflow")["id"])
    assert not any("failed" in line for line in said)
    assert (run.data.params["seed"], run.data.params["more"]) == ("7", "1")
    assert "seed: 8" in mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/config.yaml")
