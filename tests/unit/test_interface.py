"""`import agent_tunix`: what it costs, and how its functions are given things. That they work is in tests/integration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import agent_tunix
from agent_tunix import interface
from agent_tunix.errors import UserError


def test_importing_it_loads_nothing_else():
    code = "import sys; before = {*sys.modules}; import agent_tunix; print(*sorted({*sys.modules} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["__future__", "agent_tunix"]


def test_every_name_that_it_promises_is_there_and_no_other():
    assert {name: getattr(agent_tunix, name).__name__ for name in agent_tunix.__all__} == {n: n for n in agent_tunix.__all__}
    assert set(agent_tunix.__all__) <= set(dir(agent_tunix))
    with pytest.raises(AttributeError, match="has no attribute 'tarin'"):
        agent_tunix.tarin  # noqa: B018


def test_overrides_are_written_as_on_the_command_line_or_given_by_keys():
    written = ["+experiment=quick_test", "optimizer.learning_rate=1e-05", "training.resume=runs/1", "grpo.epsilon_high=null"]
    by_keys = {
        "+experiment": "quick_test",
        "optimizer": {"learning_rate": 1e-5},
        "training.resume": Path("runs/1"),
        "grpo.epsilon_high": None,
    }
    assert interface._overrides(by_keys) == interface._overrides(written) == written


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: agent_tunix.train("seed=3"), r"give a list of them, as in \['seed=3'\]"),
        (lambda: agent_tunix.train(["--multirun", "seed=1,2"]), "--multirun is an option of the command line"),
        (lambda: agent_tunix.train(["model=gemma3_tiny", "dry_run=true"]), "dry_run=true trains nothing"),
        (lambda: agent_tunix.train({"model": "tiny"}), "model=tiny: there is no such option"),
        (lambda: agent_tunix.train({"sed": 3}), "sed: unknown key; did you mean seed?"),
        (lambda: agent_tunix.train([], {"a.b": len}), "'a.b' is no name"),
        (lambda: agent_tunix.evaluate({"run": "nowhere"}), "run=nowhere: this is not the folder of a run"),
        (lambda: agent_tunix.load(), r"load\('package:tiny'\)"),
        (lambda: agent_tunix.load("package:tiny", dtype="int8"), "dtype=int8: must be one of float32, bfloat16"),
        (lambda: agent_tunix.load("package:tiny", step=3), "step=3: a step of which run?"),
        (lambda: agent_tunix.load(adapter="nowhere"), "adapter=nowhere: this is not the folder of a run"),
    ],
)
def test_a_mistake_is_raised_with_the_message_of_the_command_line(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        call()
    assert not any(tmp_path.iterdir())


def test_a_fault_of_the_system_is_a_users_error_too(monkeypatch):
    monkeypatch.setattr(interface.policy, "load", lambda *_: Path("/dev/null/x").read_text())
    with pytest.raises(UserError, match="Not a directory") as raised:
        agent_tunix.load("package:tiny")
    assert isinstance(raised.value.__cause__, NotADirectoryError)
