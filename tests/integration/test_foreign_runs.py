"""A run of a stranger's making: what it holds is read by every verb, and obeyed by none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

SECRET = "hf_SECRET"


@pytest.fixture
def run(oldest_run, tmp_path) -> Path:
    return shutil.copytree(oldest_run, tmp_path / "run")


def set_text(run: Path, key: str, value: str) -> None:
    """Writes a text into config.yaml as it stands, in place of what the last part of a key had."""
    lines = (run / "config.yaml").read_text().splitlines()
    (place,) = [n for n, line in enumerate(lines) if line.lstrip().startswith(f"{key.rpartition('.')[2]}:")]
    lines[place] = f"{lines[place].partition(':')[0]}: {json.dumps(value)}"
    (run / "config.yaml").write_text("\n".join(lines) + "\n")


VERBS = {
    "resume": ("train", "training.resume=run"),
    "plan": ("plan", "training.resume=run"),
    "begin from it": ("train", "+experiment=quick_test", "training.init_from=run"),
    "evaluate": ("evaluate", "run=run"),
    "export": ("export", "run=run", "output=model"),
    "doctor": ("doctor", "run"),
    "report": ("report", "run"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_looks_anything_up_for_it(verb, command, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    set_text(run, "data.system_prompt", "${oc.env:HF_TOKEN}")
    outcome = command(*VERBS[verb])
    assert outcome.code == 2, outcome.out
    assert "run/config.yaml: " in outcome.err
    assert "  data.system_prompt=${oc.env:HF_TOKEN}\n" in outcome.err
    assert SECRET not in outcome.out + outcome.err
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


def test_a_search_and_a_job_of_a_sweep_are_read_the_same(command, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    set_text(run, "data.system_prompt", "${oc.env:HF_TOKEN}")
    shutil.copytree(run, tmp_path / "sweep" / "0")
    (tmp_path / "tune").mkdir()
    shutil.copy(run / "config.yaml", tmp_path / "tune" / "tune.yaml")
    seen = [
        command("doctor", "sweep"),
        command("train", "-m", "model=gemma3_tiny", "seed=1", "hydra.sweep.dir=sweep"),
        command("tune", "+experiment=quick_test", "hydra.run.dir=tune"),
    ]
    for outcome in seen:
        assert outcome.code == 2, outcome.out
        assert "  data.system_prompt=${oc.env:HF_TOKEN}" in outcome.err
        assert SECRET not in outcome.out + outcome.err


def test_a_text_with_a_dollar_and_a_brace_is_a_text(command, run):
    set_text(run, "data.system_prompt", r"\${oc.env:HF_TOKEN}")
    outcome = command("plan", "training.resume=run")
    assert outcome.code == 2
    assert "does not know all words of data.system_prompt='${oc.env:HF_TOKEN}'" in outcome.err
