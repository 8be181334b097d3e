from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agent_tunix.errors import UserError
from agent_tunix.workflows import sweep
from agent_tunix.workflows.diagnosis.records import Accuracy
from agent_tunix.workflows.sweep import Job
from agent_tunix.workflows.sweep_folder import write_index
from agent_tunix.workflows.tuning.halving import Price
from agent_tunix.workflows.tuning.session import Session, Trial


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


@pytest.mark.parametrize(
    ("measured", "mode", "fuse"),
    [
        ([False] * 2, "one after another", "never"),
        ([False, True], "one after another", "auto"),
        ([False] * 2, "fused", "auto"),
    ],
)
def test_what_one_candidate_does_says_nothing_of_several(tmp_path, monkeypatch, measured, mode, fuse):
    """One alone is trained one after another wherever it is; what was measured need not be measured again."""

    def train_all(jobs, *_) -> list[dict]:
        write_index(tmp_path, mode=mode)
        return [{"status": "paused"} for _ in jobs]

    def one(number: int) -> Any:
        job = Job(None, tmp_path / str(number), ())  # type: ignore[arg-type]
        return SimpleNamespace(accuracy=trial(begun=True, measured=measured[number]).accuracy, job=job)

    monkeypatch.setattr(sweep, "train_all", train_all)
    stopped = SimpleNamespace(requested=False)
    search: Any = SimpleNamespace(fuse="auto", console=None, shelf=None, interruption=stopped)
    Session.run(search, [one(0), one(1)], 20)
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
