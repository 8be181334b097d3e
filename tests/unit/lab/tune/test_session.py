from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_tunix.errors import UserError
from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.sweep import sweep
from agent_tunix.lab.sweep.sweep import Job
from agent_tunix.lab.sweep.sweep_folder import Group, write_index
from agent_tunix.lab.tune.halving import Price
from agent_tunix.lab.tune.session import Session, Trial


def trial(begun: bool, measured: bool = False) -> Any:
    folder = SimpleNamespace(exists=lambda: begun)
    accuracy = Accuracy(20, 0.5, 200) if measured else None
    return SimpleNamespace(accuracy=lambda step: accuracy, job=SimpleNamespace(folder=folder))


@pytest.mark.parametrize(
    ("trials", "seconds"),
    [([trial(begun=True)], 13), ([trial(begun=False)], 23), ([trial(True, measured=True)], 0), ([trial(True)] * 2, 26)],
)
def test_a_rung_takes_what_is_left_of_the_way_to_it(trials, seconds):
    """From the rung before, or from the start; what has been there takes nothing."""
    search: Any = SimpleNamespace(places=[10, 20, 40], price=Price(update=1.0, rung=3.0))
    assert Session._need(search, trials, 20) == seconds


@pytest.mark.parametrize(("jobs", "at_once", "fuse"), [("01", 1, "never"), ("0", 1, "auto"), ("01", 2, "auto")])
def test_what_one_candidate_does_says_nothing_of_several(tmp_path, monkeypatch, jobs, at_once, fuse):
    """One alone is trained one after another wherever it is. What was measured, by this process or by an earlier one that
    it goes on from, need not be measured again.
    """
    write_index(tmp_path, groups=[Group(tuple(jobs), 20, at_once, 32)])
    monkeypatch.setattr(sweep, "train_all", lambda jobs, *_: [{"status": "paused"} for _ in jobs])
    stopped = SimpleNamespace(requested=False)
    search: Any = SimpleNamespace(fuse="auto", console=None, loaded=None, interruption=stopped)
    ended = SimpleNamespace(accuracy=lambda step: None, job=Job(None, tmp_path / "0", ()))  # type: ignore[arg-type]
    Session.run(search, [ended], 20)  # type: ignore[list-item]
    assert search.fuse == fuse


def test_an_evaluation_that_is_lost_is_not_taken_for_divergence(tmp_path):
    """A candidate that has been at a rung was evaluated there, unless it diverged."""
    one = Trial({}, SimpleNamespace(folder=tmp_path))  # type: ignore[arg-type]
    (tmp_path / "summary.json").write_text('{"status": "diverged"}')
    assert one.measured(20) is None
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    with pytest.raises(UserError, match=r"evals\.jsonl lacks the evaluation after 20 updates"):
        one.measured(20)
    spoilt = '{"step": 20}\n{"split": "validation"}\n{"step": 20, "split": "validation", "accuracy": null, "n": 200}\n'
    (tmp_path / "evals.jsonl").write_text(spoilt)
    with pytest.raises(UserError, match=r"evals\.jsonl lacks the evaluation after 20 updates"):
        one.measured(20)
    (tmp_path / "evals.jsonl").write_text(spoilt + '{"step": 20, "split": "validation", "accuracy": 0.5, "n": 200}\n')
    assert one.measured(20) == Accuracy(20, 0.5, 200)
