"""A run of a stranger's making: what it holds is read by every verb, and obeyed by none."""

from __future__ import annotations

import functools
import json
import operator
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from agent_tunix.training.run_folder import read_records

SECRET = "hf_SECRET"


@pytest.fixture
def run(oldest_run, tmp_path) -> Path:
    return shutil.copytree(oldest_run, tmp_path / "run")


def set_value(run: Path, key: str, value: object) -> None:
    """Writes a value into config.yaml as it stands."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    *sections, name = key.split(".")
    functools.reduce(operator.getitem, sections, config)[name] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))


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
    set_value(run, "data.system_prompt", "${oc.env:HF_TOKEN}")
    outcome = command(*VERBS[verb])
    assert outcome.code == 2, outcome.out
    assert "run/config.yaml: " in outcome.err
    assert "  data.system_prompt=${oc.env:HF_TOKEN}\n" in outcome.err
    assert SECRET not in outcome.out + outcome.err
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]


TRACE = """
from pathlib import Path
Path({trace!r}).write_text("")
def reward(prompt, completion, answer):
    return 1.0
"""


@pytest.mark.parametrize("cwd", [".", "run", "run/checkpoints"])
@pytest.mark.parametrize("place", ["run", "."])
def test_no_verb_runs_what_came_with_it(cwd, place, command, run, tmp_path, monkeypatch):
    """Also where the user stands inside it, and Python searches there."""
    trace, searched = tmp_path / "trace", {tmp_path / place, tmp_path / cwd}
    for folder in searched:
        (folder / "theirs.py").write_text(TRACE.format(trace=str(trace)))
    monkeypatch.setattr(sys, "path", ["", *map(str, searched), *sys.path])
    set_value(run, "reward.functions.answer", "theirs.reward")
    monkeypatch.chdir(cwd)
    folder = os.path.relpath(run)
    for verb in ("plan", "train"):
        outcome = command(verb, f"training.resume={folder}")
        said = f"reward.functions.answer=theirs.reward, named by {Path(folder) / 'config.yaml'}, is not imported"
        assert (outcome.code, said in outcome.err) == (2, True), outcome.err
    assert command("doctor", folder).code == 0
    if cwd == place:
        assert command("evaluate", f"run={folder}", "evaluation.num_examples=8").code == 0
    assert not trace.exists()


@pytest.mark.parametrize("verb", ["resume", "plan", "evaluate"])
def test_no_verb_has_its_problems_judged_by_what_came_with_it(verb, command, run, tmp_path):
    trace = tmp_path / "trace"
    (tmp_path / "theirs_too.py").write_text(TRACE.format(trace=str(trace)))
    set_value(run, "data.scorer", "theirs_too.reward")
    outcome = command(*VERBS[verb])
    assert (outcome.code, "data.scorer=theirs_too.reward, named by run/config.yaml, is not imported" in outcome.err) == (
        2,
        True,
    )
    assert not trace.exists()


def test_files_of_configuration_that_came_with_it_are_not_the_users_own(command, run, monkeypatch):
    (run / "conf" / "optimizer").mkdir(parents=True)
    (run / "conf" / "optimizer" / "adamw.yaml").write_text("learning_rate: ${oc.env:HF_TOKEN}\n")
    monkeypatch.chdir(run)
    outcome = command("plan", "training.resume=.")
    assert outcome.code == 0, outcome.err
    assert "conf/ is not searched" in outcome.err


def test_a_function_of_the_users_is_named_before_it_is_imported(command, run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    set_value(run, "reward.functions.answer", "runs_own_rewards.reward")
    trace, theirs = tmp_path / "trace", tmp_path / "elsewhere"
    theirs.mkdir()
    (theirs / "runs_own_rewards.py").write_text(TRACE.format(trace=str(trace)) + "raise RuntimeError('seen')\n")
    sys.path.append(str(theirs))
    planned = command("plan", "training.resume=run")
    assert planned.code == 0, planned.err
    assert "training imports runs_own_rewards.reward, named by run/config.yaml; the plan does not\n" in planned.out
    assert not trace.exists()
    trained = command("train", "training.resume=run")
    assert "imports runs_own_rewards.reward, named by run/config.yaml\n" in trained.out
    assert trace.exists()
    assert (trained.code, "RuntimeError: seen" in trained.err) == (2, True)
    trace.unlink()
    own = command("plan", "training.resume=run", "reward.functions.answer=runs_own_rewards.reward")
    assert trace.exists(), "as the user's own are"
    assert (own.code, "named by" in own.out) == (2, False)


def test_a_search_and_a_job_of_a_sweep_are_read_the_same(command, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    set_value(run, "data.system_prompt", "${oc.env:HF_TOKEN}")
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
    set_value(run, "data.system_prompt", r"\${oc.env:HF_TOKEN}")
    outcome = command("plan", "training.resume=run")
    assert outcome.code == 2
    assert "does not know all words of data.system_prompt='${oc.env:HF_TOKEN}'" in outcome.err


HOSTILE = "\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\r\x08\x7f\u202eX"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def hostile_records(run: Path) -> None:
    """Terminal escapes in every text of a run's records, and in the names of their fields."""
    summary = {"status": "failed", "fault": HOSTILE, "advice": [HOSTILE], "overrides": [f"{HOSTILE}=1"], HOSTILE: HOSTILE}
    more = {
        "metrics": {"reward/" + HOSTILE: 1.0, "status": HOSTILE},
        "evals": {"set": HOSTILE, "split": HOSTILE},
        "samples": {"prompt": HOSTILE, "completion": HOSTILE, "answer": HOSTILE, "rewards": {HOSTILE: 1.0}},
    }
    for name, fields in more.items():
        file = run / f"{name}.jsonl"
        file.write_text("".join(json.dumps(record | {HOSTILE: HOSTILE} | fields) + "\n" for record in read_records(file)))
    (run / "summary.json").write_text(json.dumps(json.loads((run / "summary.json").read_text()) | summary))


def hostile_configuration(run: Path) -> None:
    set_value(run, f"data.{HOSTILE}", HOSTILE)
    set_value(run, HOSTILE, HOSTILE)
    set_value(run, "optimizer.optimizer_name", HOSTILE)
    set_value(run, "model.model_size", HOSTILE)


def hostile_data(run: Path) -> None:
    (run.parent / "rows.jsonl").write_text(json.dumps({HOSTILE: HOSTILE, "answer": HOSTILE}) + "\n")
    set_value(run, "data.source", "table")
    set_value(run, "data.path", "rows.jsonl")
    set_value(run, "data.question_field", HOSTILE)
    set_value(run, "reward.functions.answer", f"json.{HOSTILE}")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("hostile", [hostile_records, hostile_configuration, hostile_data])
def test_no_verb_sends_the_terminal_what_a_text_would_have_it_obey(hostile, verb, command, run):
    hostile(run)
    outcome = command(*VERBS[verb])
    assert outcome.out or outcome.err
    assert outcome.code in (0, 2)
    assert not OBEYED.search(outcome.out + outcome.err)
    if hostile is hostile_configuration and outcome.code == 2:
        assert r"\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\r\x08\x7f\u202eX" in outcome.err


def test_nor_do_names_of_folders_and_jobs(command, run, tmp_path):
    for job in ("0", "1"):
        hostile_records(shutil.copytree(run, tmp_path / HOSTILE / job))
    set_value(tmp_path / HOSTILE / "1", "data.system_prompt", HOSTILE)
    jobs = [{"job": job, "overrides": [f"{HOSTILE}={job}"], "status": HOSTILE} for job in ("0", "1", "2")]
    (tmp_path / HOSTILE / "sweep.json").write_text(json.dumps({"mode": HOSTILE, "jobs": jobs}))
    for verb in (("doctor", HOSTILE), ("report", HOSTILE), ("doctor", f"{HOSTILE}x"), (HOSTILE,), ("train", f"{HOSTILE}=1")):
        outcome = command(*verb)
        assert outcome.code in (0, 2)
        assert r"\x1b]52;c;aGk=" in outcome.out + outcome.err
        assert not OBEYED.search(outcome.out + outcome.err)
