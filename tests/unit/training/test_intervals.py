"""Intervals of shares; that they are Wilson's is tested with the report's verdict."""

from __future__ import annotations

from agent_tunix.training.intervals import interval_text, intervals, wilson


def test_every_share_of_an_evaluation_has_its_interval_and_nothing_else_has():
    record = {
        "step": 3,
        "n": 200,
        "accuracy": 0.5,
        "pass@4": 0.75,
        "episode/calling": 0.0,
        "episode/turns": 1.5,
        "num_passes": 4,
    }
    found = intervals(record)
    assert found.keys() == {"accuracy", "pass@4", "episode/calling"}
    assert found["accuracy"] == [round(end, 4) for end in wilson(0.5, 200)]


def test_an_interval_is_written_in_percent():
    assert interval_text(0.0, 10) == "0.0 to 27.8"
