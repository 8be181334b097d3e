"""`agent-tunix runs`: what lies in a folder, and what became of it."""

from __future__ import annotations

import json
import os

import pytest

from agent_tunix.config import output_folders
from agent_tunix.lab.report.contents import contents
from agent_tunix.lab.runs.runs import ago


@pytest.fixture
def three(write_run, tmp_path):
    """A run that has ended, one that a process is at work on, one that was killed; and the job of a sweep."""
    write_run(tmp_path / "runs" / "done", accuracies=(0.4, 0.9, 0.8))
    write_run(tmp_path / "runs" / "killed", status=None)
    write_run(tmp_path / "runs" / "working", status=None)
    write_run(tmp_path / "multirun" / "today" / "0", status="diverged", accuracies=())
    held = output_folders.claim(tmp_path / "runs" / "working")
    yield
    os.close(held)


def test_every_run_has_its_status_its_best_accuracy_and_its_age(command, three):
    found = {one["folder"]: one for one in json.loads(command("runs", "--json").out)}
    assert {folder: one["status"] for folder, one in found.items()} == {
        "runs/done": "completed",
        "runs/killed": "crashed",
        "runs/working": "running",
        "multirun/today/0": "diverged",
    }
    best = found["runs/done"]["best"]
    assert (best["accuracy"], best["step"], best["n"]) == (0.9, 12, 200)
    assert best["interval"][0] < 0.9 < best["interval"][1]
    assert 0 <= found["runs/done"]["age"] < 3600
    assert found["multirun/today/0"]["best"] is None


def test_the_table_fits_a_terminal_and_says_how_to_go_on(command, three):
    lines = command("runs", "runs").out.splitlines()
    assert all(len(line) <= 80 for line in lines[:4])
    assert lines[1].split()[:7] == ["runs/done", "completed", "24", "90.0%", "(85.1", "to", "93.4)"]
    assert lines[-1].endswith("training.resume=runs/killed")


def test_the_newest_comes_last(command, three, tmp_path):
    for name in os.listdir(tmp_path / "runs" / "killed"):
        os.utime(tmp_path / "runs" / "killed" / name, (1e9, 1e9))
    first, *_ = json.loads(command("runs", "runs", "--json").out)
    assert first["folder"] == "runs/killed"
    assert first["age"] > 1e8


def test_what_cannot_be_read_is_listed_as_such(command, three, tmp_path):
    (tmp_path / "runs" / "killed" / "config.yaml").write_text("a: [")
    found = {one["folder"]: one["status"] for one in json.loads(command("runs", "--json").out)}
    assert found["runs/killed"] == "unreadable"


def test_where_there_is_none_it_says_how_to_make_one(command):
    assert "agent-tunix train +experiment=quick_test" in command("runs").out
    assert command("runs", "nowhere").code == 2


@pytest.mark.parametrize(("seconds", "said"), [(3, "3 s"), (150, "2 min"), (7200, "2 h"), (200000, "2 d")])
def test_an_age_is_said_in_the_unit_that_suits_it(seconds, said):
    assert ago(seconds) == said


def test_what_its_user_has_said_of_a_run_is_shown_wherever_it_is_named(command, write_run, tmp_path):
    said = {"experiment_name": "first try", "tags": ["lora", "small"], "description": "Is the rate too high?"}
    folder = write_run(tmp_path / "runs" / "mine", **said)
    (listed,) = json.loads(command("runs", "--json").out)
    assert listed["metadata"] == said | {"tags": "lora, small"}
    assert "first try; Is the rate too high?; lora, small" in command("runs").out
    assert "experiment" in (shown := command("doctor", "runs/mine").out)
    assert "Is the rate too high?" in shown
    assert ["experiment", "first try", "Is the rate too high?, lora, small"] in contents(folder)["tiles"]
