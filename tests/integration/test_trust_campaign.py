"""The campaign of kills, damages and bad inputs: a few cases of it, and that its judges see what they are to see."""

from __future__ import annotations

import importlib
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
FEW = "inputs:0,inputs:3,inputs:4"  # of the command line, which soon end


@pytest.fixture
def campaign(monkeypatch):
    """A module of the campaign, by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return lambda name: importlib.import_module(f"campaign.{name}")


def test_a_few_cases_end_as_promised(tmp_path):
    command = [sys.executable, str(SCRIPTS / "trust_campaign.py"), "--only", FEW, "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\| inputs: overrides \| 3 \|.*\| 0 \|$", done.stdout, re.MULTILINE), done.stdout


def test_a_case_is_the_same_whenever_its_seed_is(campaign):
    for kind in ("kills", "damages", "bad_inputs"):
        case = campaign(kind).case
        assert case(7, random.Random("5 x 7")) == case(7, random.Random("5 x 7"))
        assert len({case(7, random.Random(seed)) for seed in range(9)}) > 1
        assert {case(number, random.Random(0)).kind for number in range(20)} == {*campaign(kind).TURNS}


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ({"code": -11}, "died of SIGSEGV"),
        ({"code": -9, "exceeded": "60 s"}, "took more than 60 s"),
        ({"code": 1, "err": "Traceback (most recent call last)"}, "it said 'Traceback"),
        ({"code": 2, "err": "\x1b[2J is no number"}, "it sent '\\x1b'"),
        ({"code": 2, "err": "\x9b31m"}, "it sent '\\x9b'"),
        ({"code": 2, "out": "\x1b[2Kdrawn\x1b[2J", "on_terminal": True}, "it sent '\\x1b[2J'"),
        ({"code": 0, "megabytes": 9e4}, "took 90000 MB"),
        ({"code": 2, "err": "x" * 10**6}, "said 1000000 characters"),
    ],
)
def test_what_no_command_may_do_is_seen(campaign, found, fault):
    usual = {"out": "", "err": "", "seconds": 1.0, "megabytes": 99.0}
    told = [*campaign("commands").Outcome(**usual | found).faults()]
    assert len(told) == 1
    assert fault in told[0]
    assert not [*campaign("commands").Outcome(code=2, **usual | {"err": "one\n\ttwo: é"}).faults()]


@pytest.mark.parametrize(("code", "err"), [(1, "?"), (0, ""), (2, "")])
def test_an_input_that_is_neither_refused_nor_used_has_failed(campaign, monkeypatch, tmp_path, code, err):
    bad_inputs, outcome = campaign("bad_inputs"), campaign("commands").Outcome

    def run(arguments, folder, real, terminal):
        (folder / "half.tmp").touch()
        return outcome(code, "", err, 1.0, 99.0)

    monkeypatch.setattr(bad_inputs, "run", run)
    monkeypatch.setitem(bad_inputs.FAMILIES, "overrides", lambda rng, folder: ["plan"])
    faults = bad_inputs.judged(bad_inputs.case(0, random.Random(1)), None, tmp_path).faults
    assert "half.tmp is left" in faults
    assert any("exit code 1" in fault for fault in faults) == (code == 1)
    assert any("said nothing" in fault for fault in faults) == (code == 2)


def test_a_run_with_another_bit_or_another_record_is_told_apart(campaign, monkeypatch, oldest_run, tmp_path):
    runs = campaign("runs")
    monkeypatch.setattr(runs, "apart", lambda work: work())
    straight, other = (shutil.copytree(oldest_run, tmp_path / name) for name in ("straight", "other"))
    for run in (straight, other):
        (run / "summary.json").write_text('{"status": "completed"}')
    assert runs.differences(other, straight) == []
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"time/update": ', '"time/update": 3'))
    assert runs.differences(other, straight) == [], "times are no numbers of a run"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1, "was": '))
    assert runs.differences(other, straight) == ["metrics.jsonl differs"]
    monkeypatch.setattr(runs, "_stored", lambda state: {"trainable.a": str(state)})
    assert "the weights or moments of step 2 differ" in runs.differences(other, straight)
    shutil.rmtree(other / "checkpoints" / "2")
    (other / "config.yaml.tmp").touch()
    assert {"there is no checkpoint of step 2", "config.yaml.tmp is left"} <= {*runs.differences(other, straight)}


def test_what_a_checkpoint_restores_to_is_read_without_the_code_that_is_judged(campaign, oldest_run, tmp_path):
    stored = campaign("runs")._stored(oldest_run / "checkpoints" / "2" / "state")
    assert any(name.startswith("trainable.a.q_proj/") for name in stored)
    assert any(name.startswith("optimizer.") for name in stored)


def test_a_kill_after_which_a_run_does_not_go_on_has_failed(campaign, monkeypatch, tmp_path):
    kills, outcome = campaign("kills"), campaign("commands").Outcome
    answers = [outcome(-signal.SIGTERM, "", "", 1.0, 99.0, struck=1), outcome(2, "", "damaged", 1.0, 99.0)]
    monkeypatch.setattr(kills, "run", lambda *_: answers.pop(0))
    scene = campaign("runs").Scene(tmp_path, {"train": 1.0}, {}, {}, {})
    kill = kills.Kill("training", "train", (signal.SIGTERM,), 0.5, 0.0, 2, False)
    faults = kills.judged(kill, scene, tmp_path).faults
    assert "it ended with exit code -15" in faults
    assert "given again, it ended with exit code 2: damaged" in faults


def test_a_refusal_that_does_not_name_what_is_damaged_has_failed(campaign, tmp_path):
    damages, outcome = campaign("damages"), campaign("commands").Outcome
    named = outcome(2, "", "The checkpoint of step 4 is damaged", 1.0, 99.0)
    damaged = ["checkpoints/4/state/d/abc"]
    assert not [*damages._refusal_faults(named, damaged, tmp_path)]
    unnamed = outcome(2, "", "Something is wrong", 1.0, 99.0)
    assert [*damages._refusal_faults(unnamed, damaged, tmp_path)] == ["the message does not name what is damaged"]
