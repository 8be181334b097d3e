"""A run in an environment of the user's own: trained, interrupted, resumed and evaluated, over several turns."""

from __future__ import annotations

import json

import pytest
from same_runs import interrupted_at

from agent_tunix.training.run_folder import read_records

WORLD = """
from agent_tunix.environments.base import Environment

class Again(Environment):
    "Asks a second time where there is a 1 in the first answer."
    def reply(self, transcript):
        return transcript[0] if len(transcript) == 2 and "1" in transcript[1]["content"] else None
    def reward(self, transcript):
        return {"short": 1.0 / len(transcript)}
    def solved(self, transcript):
        return float(len(transcript) == 2)
"""
RUN = [
    "model=gemma3_tiny",
    "model.lora_module_path=q_proj",  # fewer adapters are compiled faster
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "grpo.num_generations=4",
    "training.num_batches=2",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
    "optimizer.learning_rate=1e-5",
    "generation.max_generation_steps=96",
    "reward=environment",
    "environment.name=my_world.Again",
    "environment.settings={}",
]
TIMES = {"tokens_per_second", "memory/peak_gb"}


@pytest.fixture
def world(tmp_path, monkeypatch):
    (tmp_path / "my_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(str(tmp_path))


def numbers(run, name):
    return [
        {key: value for key, value in record.items() if key not in TIMES and not key.startswith("time/")}
        for record in read_records(run / name)
    ]


def test_an_interrupted_run_goes_on_as_if_nothing_had_been(command, world, tmp_path):
    straight = command("train", *RUN, "hydra.run.dir=straight")
    assert straight.code == 0, straight.err
    assert json.loads((tmp_path / "straight" / "summary.json").read_text())["status"] == "completed"
    with interrupted_at(1):
        assert command("train", *RUN, "hydra.run.dir=run").code == 0
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1
    resumed = command("train", "training.resume=run")
    said = "environment.name=my_world.Again, named by run/config.yaml, is not imported"
    assert (resumed.code, said in resumed.err) == (2, True)
    assert command("train", "training.resume=run", "environment.name=my_world.Again").code == 0
    for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
        assert numbers(tmp_path / "run", name) == numbers(tmp_path / "straight", name)

    metrics = read_records(tmp_path / "run" / "metrics.jsonl")
    assert all(1 < record["episode/turns"] < 2 for record in metrics), "some are asked again, and some are not"
    assert all(record["reward/mean"] == pytest.approx(record["reward/short"]) for record in metrics)
    (first, last) = read_records(tmp_path / "run" / "evals.jsonl")
    assert (first["step"], last["step"]) == (0, 2)
    assert first["accuracy"] == pytest.approx(2 - first["episode/turns"]), "solved is what the environment says"
    sample = read_records(tmp_path / "run" / "samples.jsonl")[0]
    assert [message["role"] for message in sample["transcript"]][:2] == ["user", "assistant"]
    assert sample["completion"] == sample["transcript"][-1]["content"]

    greedy = ["evaluation.num_examples=8", "inference_config=greedy"]
    evaluated = command("evaluate", "run=run", *greedy, "environment.name=my_world.Again")
    assert evaluated.code == 0, evaluated.err
    assert read_records(tmp_path / "run" / "evals.jsonl")[-1]["episode/turns"] >= 1
    for verb in ("doctor", "report"):
        assert command(verb, "run").code == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["environment.name=my_world.Absent"], "environment.name=my_world.Absent"),
        (["environment.tool_format=hermess"], "did you mean hermes?"),
        (["environment.name=null"], "there is no environment.name to give rewards"),
        (["reward.weights={long: 2.0}"], "reward.weights.long: neither a function nor the environment gives"),
        (["training.method=supervised", "reward=default"], "does not go together with training.method=supervised"),
    ],
)
def test_what_cannot_be_played_is_told_without_a_traceback(command, world, given, said, tmp_path):
    outcome = command("train", *RUN, *given, "hydra.run.dir=run")
    assert (outcome.code, said in outcome.err) == (2, True), outcome.err


def test_a_plan_knows_the_world(command, world):
    planned = command("plan", *RUN)
    assert planned.code == 0, planned.err
    assert command("plan", *RUN, "environment.name=my_world.Absent").code == 2
