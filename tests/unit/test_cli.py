from __future__ import annotations

import runpy
import subprocess
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


def test_a_ctrl_c_that_the_garbage_collector_would_swallow_stops_the_command():
    """JAX has a callback there, and a signal that comes during a collection is raised in the first Python that follows."""
    script = """
import gc, signal, time
from agent_tunix.cli import answering
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have been started without one
def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal(signal.SIGINT)
with answering():
    gc.callbacks.append(callback)
    gc.collect()
    for _ in range(300):  # a signal may come just before a sleep begins, which it then does not end
        time.sleep(0.1)
    print("it went on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("Interrupted.")
