from __future__ import annotations

import importlib
import json
import os
import sys

import pytest

from agent_tunix.errors import UserError
from agent_tunix.training.run_reader import Run


def test_a_run_is_read_as_plain_python(write_run, tmp_path):
    run = Run(write_run(tmp_path / "run", steps=3))
    assert run.config["seed"] == 42
    assert [record["step"] for record in run.metrics] == [1, 2, 3]
    assert [record["accuracy"] for record in run.evals] == [0.4, 0.6, 0.8]
    assert run.samples[0]["rewards"] == {"answer": 1.0, "format_exact": 1.0}
    assert run.summary["status"] == "completed"
    assert os.fspath(run) == str(tmp_path / "run")


def test_what_a_run_that_is_under_way_writes_is_seen_by_the_next_look(write_run, tmp_path):
    run = Run(write_run(tmp_path / "run", steps=3, status=None))
    assert run.summary == {}
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4}) + '\n{"step": 5, "lo')
    assert [record["step"] for record in run.metrics] == [1, 2, 3, 4]


def test_a_run_of_an_earlier_version_has_the_keys_that_came_later(oldest_run):
    run = Run(oldest_run)
    assert run.config["grpo"]["objective"] == "grpo"
    assert [record["step"] for record in run.metrics] == [1, 2]
    assert run.summary["status"] == "interrupted"
    assert run.samples


def test_what_a_run_names_is_not_imported(write_run, tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", reward__functions={"theirs": "their_module.reward"})
    (folder / "their_module.py").write_text("raise SystemExit")
    monkeypatch.chdir(folder)
    assert Run(folder).config["reward"]["functions"]["theirs"] == "their_module.reward"
    assert "their_module" not in sys.modules


def test_a_folder_that_holds_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="this is not the folder of a run"):
        Run(tmp_path)


def test_frames_have_a_row_for_each_record(write_run, tmp_path):
    pytest.importorskip("pandas")
    run = Run(write_run(tmp_path / "run", steps=3))
    assert run.frame("metrics")["reward/mean"].tolist() == [record["reward/mean"] for record in run.metrics]
    assert run.frame("samples")["rewards/answer"].tolist() == [1.0, 1.0, 1.0]


def test_frames_without_pandas_say_what_to_install(write_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError):
        importlib.import_module("pandas")
    run = Run(write_run(tmp_path / "run"))
    with pytest.raises(UserError, match="pip install pandas"):
        run.frame("metrics")
    with pytest.raises(UserError, match="must be one of metrics, evals, samples"):
        run.frame("metric")
