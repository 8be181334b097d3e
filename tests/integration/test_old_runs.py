"""A run that an earlier version has made is read by all verbs, and goes on."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

import agent_tunix
from agent_tunix.training.run_folder import read_records

CHECKSUMS = {"arrays", "checksum"}


@pytest.fixture
def run(oldest_run, tmp_path):
    return shutil.copytree(oldest_run, tmp_path / "run")


def test_it_is_judged_and_reported_on(command, run):
    judged = command("doctor", "run", "--json")
    assert (judged.code, json.loads(judged.out)["verdict"]) == (0, "too short"), judged.err
    assert command("report", "run").code == 0
    assert "Interrupted, too short to judge so far" in (run / "report.html").read_text()


def test_it_is_evaluated(command, run):
    outcome = command("evaluate", "run=run", "evaluation.num_examples=8")
    assert outcome.code == 0, outcome.err
    record = read_records(run / "evals.jsonl")[-1]
    assert (record["step"], record["split"], record["n"]) == (2, "test", 8)


def test_it_is_exported(command, run):
    outcome = command("export", "run=run", "output=adapter")
    assert outcome.code == 0, outcome.err
    tensors = load_file("adapter/adapter_model.safetensors")
    assert sorted(shape for shape in {tensor.shape for tensor in tensors.values()}) == [(1, 128), (128, 1)]
    assert all(tensor.any() for tensor in tensors.values()), "the updates have moved all of them"


def test_it_answers(run):
    learnt, base = agent_tunix.load(adapter=run), agent_tunix.load("package:tiny")
    ids = base.encode("How many books does Tom have?")
    assert np.abs(learnt.logits(ids) - base.logits(ids)).max() > 1e-3
    assert agent_tunix.Run(run).summary["status"] == "interrupted"


def test_it_is_resumed(command, run):
    """Its checkpoint has no checksum, and is taken as it is; those that follow have one."""
    began = (run / "metrics.jsonl").read_text()
    outcome = command("train", "training.resume=run")
    assert outcome.code == 0, outcome.err
    lines = (run / "metrics.jsonl").read_text()
    assert lines.startswith(began)
    assert [record["step"] for record in read_records(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["status"] == "completed"
    saved = {step: json.loads((run / f"checkpoints/{step}/progress/metadata").read_text()) for step in (2, 4)}
    assert not CHECKSUMS & saved[2].keys()
    assert saved[4].keys() > CHECKSUMS
