from __future__ import annotations

import fcntl
import os
from pathlib import Path

from agent_tunix.config.output_folders import MULTIRUN, missing, note, relative, remove_unused


def test_what_was_there_before_stays_and_so_does_what_holds_something(tmp_path):
    (tmp_path / "mine").mkdir()
    note(run := tmp_path / "mine" / "runs" / "1")
    run.mkdir(parents=True)
    (run / "config.yaml").touch()
    remove_unused()
    assert (run / "config.yaml").exists()
    (run / "config.yaml").unlink()
    remove_unused()
    assert list((tmp_path / "mine").iterdir()) == []


def test_hydras_file_goes_where_it_is_alone(tmp_path):
    note(tmp_path / "sweep" / MULTIRUN)
    for job in ("0", "1"):
        (tmp_path / "sweep" / job).mkdir(parents=True)
    (tmp_path / "sweep" / MULTIRUN).touch()
    (tmp_path / "sweep" / "1" / "config.yaml").touch()
    remove_unused()
    assert (tmp_path / "sweep" / MULTIRUN).exists()
    assert not (tmp_path / "sweep" / "0").exists(), "nothing came of that job"
    (tmp_path / "sweep" / "1" / "config.yaml").unlink()
    remove_unused()
    assert list(tmp_path.iterdir()) == []


def test_folders_in_one_that_was_there_before_are_not_ours(tmp_path):
    (tmp_path / "sweep" / "mine").mkdir(parents=True)
    note(tmp_path / "sweep" / MULTIRUN)
    (tmp_path / "sweep" / MULTIRUN).touch()
    remove_unused()
    assert (tmp_path / "sweep" / "mine").exists()


def test_a_path_through_a_file_is_missing(tmp_path):
    (tmp_path / "file").touch()
    assert missing(tmp_path / "file" / "run") == [tmp_path / "file" / "run"]


def test_a_folder_that_another_process_has_claimed_stays(tmp_path):
    """Both have found it missing; one of them claimed it first, and has written nothing yet."""
    note(tmp_path / "sweep" / MULTIRUN)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / MULTIRUN).touch()
    claim = os.open(tmp_path / "sweep", os.O_RDONLY)
    fcntl.flock(claim, fcntl.LOCK_EX)
    remove_unused()
    assert (tmp_path / "sweep" / MULTIRUN).exists()
    os.close(claim)
    remove_unused()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_named_as_the_users_shell_takes_it_also_where_hydra_has_gone_there(monkeypatch, tmp_path):
    run = tmp_path / "runs" / "1"
    run.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert relative(run) == Path("runs/1")
    monkeypatch.chdir(run)
    assert relative(run) == run
