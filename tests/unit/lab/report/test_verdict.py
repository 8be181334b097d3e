"""The first sentence says what happened, how sure that is, and whether it is over."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.doctor.examination import examine
from agent_tunix.lab.doctor.finding import Finding, Severity
from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.report.verdict import Standing, listed, run_verdict, sweep_verdict
from agent_tunix.training.intervals import Z95


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_s_interval_ends_where_the_share_seen_is_just_not_surprising(counts):
    """Its definition, solved for by no formula: at each end p the share lies z standard errors of p away."""
    hits, n = counts
    share = hits / n
    for end in Accuracy(0, share, n).interval:
        assert 0 <= end <= 1
        assert (share - end) ** 2 == pytest.approx(Z95**2 * end * (1 - end) / n, abs=1e-9)


def verdict(folder):
    run = doctor.read(folder)
    return run_verdict(run, examine(run))


def test_a_healthy_run(write_run, tmp_path):
    said = verdict(write_run(tmp_path / "run"))
    assert (said.mood, said.lead) == ("good", "Healthy")
    assert said.text == "held-out accuracy rose from 40.0 % to 80.0 % (95 % interval 73.9 to 85.0 %) in 24 updates."


def test_an_ill_run_names_its_illness_first(write_run, tmp_path):
    said = verdict(write_run(tmp_path / "run", accuracies=(0.5, 0.3, 0.1)))
    assert said.mood == "bad"
    assert said.lead.startswith("Ill (")
    assert "fell from 50.0 % to 10.0 %" in said.text


def test_what_may_be_noise_is_called_so(write_run, tmp_path):
    assert "went from 40.0 % to 42.0 %" in verdict(write_run(tmp_path / "run", accuracies=(0.4, 0.42))).text
    assert "which may be noise" in verdict(tmp_path / "run").text


@pytest.mark.parametrize(
    ("status", "mood", "lead", "ending"),
    [
        (None, "going", "Unfinished, healthy so far", "still at work"),
        ("interrupted", "unsure", "Interrupted, healthy so far", "resumed"),
        ("paused", "unsure", "Paused, healthy so far", "search"),
        ("failed", "bad", "Failed, healthy so far", "error"),
        ("diverged", "bad", "Ill (diverging)", "guard"),
    ],
)
def test_how_it_ended_is_said(write_run, tmp_path, status, mood, lead, ending):
    said = verdict(write_run(tmp_path / "run", status=status))
    assert (said.mood, said.lead) == (mood, lead)
    assert ending in said.text


def test_what_ended_a_run_that_failed_is_said(write_run, tmp_path):
    folder = write_run(tmp_path / "run", status="failed")
    summary = json.loads((folder / "summary.json").read_text()) | {"fault": "The reward function\n'mine' raised"}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert verdict(folder).text.endswith(" It ended in an error: The reward function 'mine' raised")
    assert examine(doctor.read(folder)).vitals["ended by"] == "The reward function 'mine' raised"


def test_a_run_that_went_on_after_its_summary_has_not_ended(write_run, tmp_path):
    folder = write_run(tmp_path / "run", status="interrupted")
    assert doctor.read(folder).status == "interrupted"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 25, "lr": 1e-5}\n')
    assert doctor.read(folder).status == "unfinished"
    assert verdict(folder).mood == "going"


def test_runs_with_few_or_no_evaluations(write_run, tmp_path):
    assert "the only evaluation" in verdict(write_run(tmp_path / "one", accuracies=(0.4,))).text
    assert "the reward went from" in verdict(write_run(tmp_path / "none", accuracies=())).text
    empty = verdict(write_run(tmp_path / "empty", steps=0, accuracies=()))
    assert empty.lead == "Too short to judge"
    assert "nothing was evaluated in 0 updates" in empty.text


def standing(label: str, end: float | None, status: str = "completed") -> Standing:
    return Standing(label, status, Accuracy(0, 0.4, 200), None if end is None else Accuracy(40, end, 200))


def test_a_sweep_names_its_best_and_what_noise_does_not_tell_from_it():
    a, b, c = standing("a", 0.9), standing("b", 0.88), standing("c", None, "diverged")
    said = sweep_verdict([a, b, c], a, [b])
    assert (said.mood, said.lead) == ("good", "Best of 3: a")
    assert "Noise does not tell it from b." in said.text
    assert "Every other candidate is worse" in sweep_verdict([a, c], a, []).text


def test_the_best_of_a_grid_that_is_ill_is_not_praised():
    a, b = standing("a", 0.9), standing("b", None, "diverged")
    missed, mild = (Finding("stepped over", severity, "", "") for severity in (Severity.SERIOUS, Severity.MILD))
    said = sweep_verdict([a, b], a, [], [missed])
    assert (said.mood, said.lead) == ("unsure", "Best of 2: a (stepped over)")
    assert sweep_verdict([a, b], a, [], [mild]) == sweep_verdict([a, b], a, [])
    assert sweep_verdict([b], None, [], [missed]).lead == "No best candidate (stepped over)"


def test_a_sweep_that_is_not_over_or_has_no_best():
    a, waiting = standing("a", 0.9), standing("b", None, "waiting")
    said = sweep_verdict([a, waiting], a, [])
    assert said.mood == "going"
    assert "so far" in said.lead
    assert "Not ended yet: 1 of 2" in said.text
    assert "Every other" not in said.text
    assert sweep_verdict([standing("c", None, "diverged")], None, []).mood == "bad"
    assert sweep_verdict([waiting], None, []).lead == "Under way"
    failed = sweep_verdict([standing("e", None, "failed"), waiting], None, [])  # which no one is at work on
    assert (failed.mood, failed.lead) == ("bad", "Ended in an error")
    assert "An error, which the table names, has ended e." in failed.text
    assert sweep_verdict([standing("e", None, "failed"), standing("f", None, "running")], None, []).lead == "Under way"
    assert "no gain beyond noise" in sweep_verdict([flat := standing("d", 0.41)], flat, []).text


@pytest.mark.parametrize("status", ["interrupted", "failed", "paused"])
def test_a_candidate_that_was_cut_short_is_not_called_worse(status):
    a, cut = standing("a", 0.9), standing("b", 0.4, status)
    said = sweep_verdict([a, cut], a, [])
    assert (said.mood, said.lead) == ("unsure", "Best of 2 so far: a")
    assert "Not ended yet: 1 of 2" in said.text
    assert "Every other" not in said.text
    assert "Not ended yet: 1 of 1" in sweep_verdict([standing("b", None, status)], None, []).text


def test_long_lists_are_cut():
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(list("abcdefgh")) == "a, b, c, d and 4 others"
