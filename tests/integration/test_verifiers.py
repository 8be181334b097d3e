"""A run whose episodes verifiers plays: trained, interrupted, resumed and evaluated, with a tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from same_runs import interrupted_at

from agent_tunix.training.run_folder import read_records

pytest.importorskip("verifiers.v1", reason="verifiers comes with the extra `verifiers`")

RUN = [
    "data=verifiers",
    "data.task=pears",
    "data.settings={taskset: {problems: 40}}",
    "model=gemma3_tiny_tool",
    "environment=verifiers",
    "environment.tool_format=tags",
    "training.micro_batch_size=2",
    "grpo.num_generations=4",
    "training.num_batches=3",
    "evaluation.num_examples=4",
    "evaluation.sampled=false",
    "optimizer.learning_rate=1e-5",
]
TIMES = {"tokens_per_second", "memory/peak_gb"}


def numbers(run, name):
    return [
        {key: value for key, value in record.items() if key not in TIMES and not key.startswith("time/")}
        for record in read_records(run / name)
    ]


def test_a_run_goes_on_as_if_nothing_had_been_and_is_evaluated(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    straight = command("train", *RUN, "hydra.run.dir=straight")
    assert straight.code == 0, straight.err
    with interrupted_at(1):
        assert command("train", *RUN, "hydra.run.dir=run").code == 0
    resumed = command("train", "training.resume=run", "data.task=pears")
    assert resumed.code == 0, resumed.err
    for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
        assert numbers(tmp_path / "run", name) == numbers(tmp_path / "straight", name)

    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    assert all(record["mismatch/kl"] < 1e-9 and record["reward/mean"] == record["reward/right"] for record in metrics)
    transcripts = [json.loads(line)["transcript"] for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    called = [transcript for transcript in transcripts if any(message["role"] == "tool" for message in transcript)]
    assert called, "the tool was called by none"
    assert all(transcript[1]["content"].startswith("<calculator>") for transcript in called)

    evaluated = command(
        "evaluate", "run=run", "data=verifiers", "data.task=pears", "data.settings={taskset: {problems: 12}}"
    )
    assert evaluated.code == 0, evaluated.err
    record = read_records(tmp_path / "run" / "evals.jsonl")[-1]
    assert (record["n"], record["set"]) == (12, "verifiers pears"), "all of another set"
