"""What Trackio's own database has of a run."""

from __future__ import annotations

import math

import pytest
from told_runs import CONFIG, tell

from agent_tunix.training.loggers.base import kept

pytest.importorskip("trackio", reason="the extra trackio is not installed")


@pytest.fixture
def database(tmp_path, monkeypatch):
    """Trackio's, in a folder of the test's own; it takes the place of the user's when it is imported."""
    from trackio import sqlite_storage, utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (sqlite_storage, utils):
        for name, folder in {"TRACKIO_DIR": tmp_path / "trackio", "MEDIA_DIR": tmp_path / "trackio" / "media"}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, folder)
    (tmp_path / "trackio").mkdir()
    return SQLiteStorage


def test_a_run_is_told_whole_and_goes_on_as_the_same_run(database, tmp_path):
    said = tell(tmp_path / "demo", "trackio", CONFIG | {"project_name": "mine"})
    name = kept(tmp_path / "demo", "trackio")["name"]
    assert name.startswith("demo-")
    assert said == [f"Trackio: `trackio show --project mine` shows {name}"] * 2
    assert database.get_runs("mine") == [name]
    config = database.get_run_config("mine", name)
    assert (config["seed"], config["description"], config["tags"]) == (7, "what it is for", ["first", "second"])
    rows = database.get_logs("mine", name)
    assert [(r["step"], r["train/loss"]) for r in rows if "train/loss" in r] == [(1, 0.5), (2, 0.6), (2, 0.4)]
    assert [(r["step"], r["validation/accuracy"]) for r in rows if "validation/accuracy" in r] == [(0, 0.25), (2, 0.75)]
    assert all(math.isnan(float(r["train/kl"])) for r in rows if "train/kl" in r)
    tables = {(r["step"], k): v["_value"] for r in rows for k, v in r.items() if k.endswith(("completions", "samples"))}
    assert tables[0, "validation/completions"][0]["completion"] == "two, at 0"
    assert tables[2, "validation/completions"][0]["completion"] == "two, at 2"
    assert {row["rewards/answer"] for row in tables[2, "train/samples"]} == {1.0}


def test_another_run_in_a_folder_of_the_same_name_is_another(database, tmp_path):
    for parent in ("one", "two"):
        tell(tmp_path / parent / "demo", "trackio")
    assert len(set(database.get_runs("agent-tunix"))) == 2
