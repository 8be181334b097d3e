"""How a sweep finds out whether its jobs are to be one program, and what is left to do for each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import ahead_of_time
from agent_tunix.lab.sweep import sweep
from agent_tunix.lab.sweep.sweep_folder import Group
from agent_tunix.training.setup import Loaded, prepare


@pytest.fixture
def run():
    overrides = ["+experiment=quick_test", "training.micro_batch_size=2", "grpo.num_generations=2"]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", overrides), Config)
    return prepare(cfg, Loaded(), lambda text: None)


def test_what_is_measured_was_begun_before_all_else_that_is_foreseen(run, monkeypatch):
    begun, ran = [], []
    monkeypatch.setattr(ahead_of_time, "begin", lambda program, context: begun.append(program.signature()))
    run_program = ahead_of_time.run
    monkeypatch.setattr(ahead_of_time, "run", lambda program: ran.append(program.signature()) or run_program(program))
    said: list[str] = []
    assert sweep._fused_size([run] * 3, said.append, "always") == 3
    assert len(set(ran)) == 2, "a step of all jobs, and of one"
    assert begun[:2] == list(dict.fromkeys(ran))
    assert len(begun) > 2
    assert said[0].startswith("3 jobs run as one program: a decode step of 3 jobs at once takes ")


def test_a_job_is_called_by_what_tells_it_from_the_others():
    given = (("a.rate=1", "seed=7"), ("a.rate=2", "seed=7"), ("seed=7",))
    jobs = [sweep.Job(None, Path(str(number)), overrides) for number, overrides in enumerate(given)]
    assert [job.label for job in sweep._labelled(jobs)] == ["rate=1", "rate=2", "2"]


def test_a_job_has_passed_its_rest_where_it_was_evaluated_there_whatever_else_its_records_say(tmp_path):
    (tmp_path / "checkpoints" / "8").mkdir(parents=True)
    spoilt, there = '{"split": "validation"}\n{"step": 4}\n', '{"step": 4, "split": "validation", "accuracy": 0.5}\n'
    for records, passed in ((spoilt, False), (spoilt + there, True)):
        (tmp_path / "evals.jsonl").write_text(records)
        assert sweep._passed(sweep.Job(None, tmp_path, (), stop_after=4)) is passed


def test_a_job_that_was_killed_beyond_its_rest_has_been_there_if_it_was_evaluated_and_saved(tmp_path):
    job = sweep.Job(None, tmp_path, (), stop_after=2)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    record = '{"step": %d, "split": "validation", "accuracy": 0.5}\n'
    (tmp_path / "evals.jsonl").write_text(record % 4)
    assert not sweep._passed(job), "nothing is known of it at its rest"
    (tmp_path / "evals.jsonl").write_text(record % 2)
    assert sweep._passed(job)
    (tmp_path / "checkpoints" / "4").rename(tmp_path / "checkpoints" / "1")
    assert not sweep._passed(job), "it would begin again before its rest"


def test_a_page_older_than_the_summary_is_that_of_an_earlier_attempt(tmp_path):
    page, summary = tmp_path / "report.html", tmp_path / "summary.json"
    assert not sweep._lacks_report(tmp_path)
    summary.touch()
    assert sweep._lacks_report(tmp_path)
    for age, lacks in ((1, True), (-1, False)):
        page.touch()
        os.utime(page, ns=(0, summary.stat().st_mtime_ns - age))
        assert sweep._lacks_report(tmp_path) is lacks


@pytest.mark.parametrize(("at_once", "said"), [(3, "go on by a program of 3"), (1, "go on one after another")])
def test_what_was_decided_is_kept_when_some_have_ended(run, monkeypatch, at_once, said):
    monkeypatch.setattr(sweep, "cost_of_many", lambda r, members: pytest.fail("measured again"))
    earlier, notices = Group(("0", "1", "2"), None, at_once, 64), list[str]()
    assert sweep.decide(jobs_of(run, "02"), [run] * 2, notices.append, earlier=earlier) == earlier
    assert said in notices[0]


@pytest.mark.parametrize(("at_once", "fuse", "size"), [(3, "never", 1), (1, "always", 2)])
def test_a_user_may_ask_for_something_else_than_was_decided_and_is_told_what_that_changes(
    run, monkeypatch, at_once, fuse, size
):
    monkeypatch.setattr(sweep, "_fused_size", lambda runs, *_: len(runs))
    notices: list[str] = []
    found = sweep.decide(jobs_of(run, "02"), [run] * 2, notices.append, fuse, Group(("0", "1", "2"), None, at_once, 64))
    assert (found.jobs, found.at_once) == (("0", "2"), size)
    assert "last digits will be others" in notices[0]


def test_what_another_device_held_is_decided_anew_where_this_one_cannot(run, monkeypatch):
    monkeypatch.setattr(sweep, "card", lambda: ("a small card", 1e-9))
    notices: list[str] = []
    found = sweep.decide(jobs_of(run, "02"), [run] * 2, notices.append, "auto", Group(("0", "1", "2"), None, 3, 64))
    assert found.at_once == 1
    assert "memory does not hold here" in notices[0]


def test_a_job_goes_on_by_the_latest_that_was_decided_of_it_on_its_way(run):
    decided = [Group(("0", "1", "2"), 10, 3, 64), Group(("0", "1"), 20, 2, 64), Group(("0", "1"), 20, 1, 64)]
    for until, groups in ((10, [("01", 0), ("3", None)]), (20, [("01", 2), ("3", None)]), (40, [("013", None)])):
        found = sweep.groups(jobs_of(run, "013", until), decided)
        wanted = [(names, None if index is None else decided[index]) for names, index in groups]
        assert [("".join(job.folder.name for job in jobs), earlier) for jobs, earlier in found] == wanted


def jobs_of(run, names: str, until: int | None = None) -> list[sweep.Job]:
    return [sweep.Job(run.cfg, Path(name), (), stop_after=until) for name in names]
