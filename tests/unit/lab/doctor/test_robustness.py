"""Records may be cut short, edited, or of another version: the doctor reads what it can and never raises."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import HEALTHY
from omegaconf import OmegaConf
from rich.console import Console

from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.doctor.examination import diagnose, early_warnings, examine
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.doctor.sweep import examine_sweep


def test_records_cut_short_or_broken_are_read_as_far_as_they_go(tmp_path, config):
    OmegaConf.save(OmegaConf.create(config), tmp_path / "config.yaml")
    assert doctor.diagnose(tmp_path).verdict == "too short"
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": null}\n[1]\nnonsense\n\xff\xfe\n{"step": 2, "lo')
    (tmp_path / "evals.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n{"n": 3}\n')
    (tmp_path / "summary.json").write_text("{")
    report = doctor.diagnose(tmp_path)
    assert report.findings[0].evidence.startswith("loss is not finite at step 1")


def test_a_sweep_is_read_without_the_jobs_that_cannot_be_and_says_so(tmp_path, config, capsys):
    """Job 0 was cut short after its first evaluation, job 1 while its configuration was written, job 2 has not begun."""
    for name in "01":
        (tmp_path / name).mkdir()
    OmegaConf.save(OmegaConf.create(config), tmp_path / "0" / "config.yaml")
    (tmp_path / "1" / "config.yaml").write_text("optimizer: {learning_rate: 1e-5")
    (tmp_path / "0" / "evals.jsonl").write_text('{"step": 0, "split": "validation", "accuracy": 0.5, "n": 200}\n')
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": [{"job": name, "overrides": []} for name in "012"]}))
    doctor.show(tmp_path, doctor.diagnose(tmp_path), Console(width=200))
    said = capsys.readouterr().out
    assert "a sweep of 3 jobs" in said
    assert "too short (unfinished after 0 updates)" in said
    assert "not begun, or unreadable: 1, 2" in said
    assert "Best" not in said
    (tmp_path / "0" / "summary.json").write_text('{"status": "failed", "steps": 0, "fault": "The disk\\nis full."}')
    doctor.show(tmp_path, doctor.diagnose(tmp_path), Console(width=200))
    assert "too short (failed after 0 updates)\n       ended by: The disk is full.\n" in capsys.readouterr().out


def test_the_best_of_a_single_job_has_nothing_to_be_told_apart_by(tmp_path, config, capsys):
    (tmp_path / "0").mkdir()
    OmegaConf.save(OmegaConf.create(config), tmp_path / "0" / "config.yaml")
    (tmp_path / "0" / "evals.jsonl").write_text('{"step": 4, "split": "validation", "accuracy": 0.5, "n": 200}\n')
    (tmp_path / "0" / "summary.json").write_text('{"status": "completed", "steps": 4}')
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": [{"job": "0", "overrides": []}]}))
    doctor.show(tmp_path, doctor.diagnose(tmp_path), Console(width=200))
    said = capsys.readouterr().out
    assert "a sweep of 1 job\n" in said
    assert "Best: job 0  (50.0%)\n" in said


KEYS = ["step", "reward/mean", "reward/answer", *HEALTHY]
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
METRICS = st.lists(st.dictionaries(st.sampled_from(KEYS), NUMBERS, max_size=len(KEYS)), max_size=30)
EVALS = st.lists(
    st.dictionaries(st.sampled_from(["step", "split", "n", "accuracy", "sampled_accuracy", "format_accuracy"]), NUMBERS)
)
CONFIGS = st.dictionaries(
    st.sampled_from(["optimizer", "grpo", "generation", "training", "reward", "scheduler", "model", "data"]),
    NUMBERS
    | st.dictionaries(
        st.sampled_from(
            ["learning_rate", "beta", "num_iterations", "temperature", "method", "functions", "weights", "max_grad_norm"]
        ),
        NUMBERS,
    ),
)
SUMMARIES = st.dictionaries(st.sampled_from(["status", "steps", "rollbacks"]), NUMBERS)


@given(CONFIGS, METRICS, EVALS, SUMMARIES)
def test_no_records_make_it_raise(config, metrics, evals, summary):
    run = RunRecords(config, metrics, evals, summary)
    report = examine(run)
    assert report.verdict in ("ill", "healthy", "undecided", "too short")
    json.dumps([finding.evidence for finding in early_warnings(run)])
    examine_sweep({"0": run, "1": run})


FINITE = st.floats(-1e3, 1e3)
SERIES = st.lists(
    st.fixed_dictionaries({"step": st.integers(1, 99), "reward/mean": FINITE, **dict.fromkeys(HEALTHY, FINITE)})
)


@given(
    SERIES, st.lists(st.tuples(st.floats(0, 1), st.integers(1, 500)), max_size=6), st.sampled_from(["grpo", "supervised"])
)
def test_no_numbers_make_it_raise(metrics, accuracies, method):
    evals = [{"step": i, "accuracy": a, "sampled_accuracy": a, "n": n} for i, (a, n) in enumerate(accuracies)]
    config = {"optimizer": {"learning_rate": 1e-5}, "grpo": {"beta": 0.1}, "training": {"method": method}}
    for finding in diagnose(RunRecords(config, metrics, evals)):
        assert finding.remedy
