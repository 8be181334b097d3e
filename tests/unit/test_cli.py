from __future__ import annotations

import runpy
import sys

import pytest

from agent_tunix import cli


@pytest.mark.parametrize(
    ("own", "worth"),
    [
        ({}, 0.5),
        ({"status": "interrupted"}, 0.5),
        ({"status": "diverged"}, 0.0),
        ({"rollbacks": [{"step": 3}]}, 0.0),
        ({"final_eval": None}, 0.0),
    ],
    ids=str,
)
def test_a_run_that_diverged_is_worth_nothing_to_a_search_even_where_it_went_on_at_another_rate(own, worth):
    assert cli._accuracy({"status": "completed", "final_eval": {"accuracy": 0.5}, "rollbacks": [], **own}) == worth


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command_is_a_module_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["python -m", "trian"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("agent_tunix.cli", run_name="__main__")
    assert "did you mean train?" in capsys.readouterr().err
