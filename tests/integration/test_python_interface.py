"""`agent_tunix` from Python: the same runs, records and policies as by the command line."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import agent_tunix
from agent_tunix.engine.engine import Inference
from agent_tunix.environments.stream import left_pad
from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import loading
from agent_tunix.training.run_folder import read_records

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "python.md"
TRAIN = {
    "model": "gemma3_tiny",
    "training": {"num_batches": 2, "micro_batch_size": 2, "save_interval_steps": 1, "max_kl": 1000.0},
    "optimizer": {"learning_rate": 1e-3, "warmup_ratio": 0, "max_grad_norm": 10.0},
    "scheduler": "constant",
    "evaluation": {"num_examples": 8, "sampled": False},
    "data.num_examples": 64,
}
QUESTION = "Ben has 18 coins. Ben wants 40. How many more coins does Ben need?"


def brevity(prompt: str, completion: str, answer: str) -> float:
    return 1 / (1 + len(completion))


def of_no_module(prompt: str, completion: str, answer: str) -> float:
    return float(completion.count("<answer>") == 1)


of_no_module.__module__ = "__main__"  # as that of a function in a notebook
OWN = {"brevity": brevity, "tags": of_no_module}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> agent_tunix.Run:
    streams = sys.stdout, sys.stderr
    run = agent_tunix.train({**TRAIN, "hydra.run.dir": tmp_path_factory.mktemp("kept") / "run"}, OWN)
    assert (sys.stdout, sys.stderr) == streams
    return run


@pytest.fixture
def copied(run, tmp_path) -> agent_tunix.Run:
    return agent_tunix.Run(shutil.copytree(run, tmp_path / "run"))


def test_a_run_is_trained_with_functions_of_the_program(run):
    assert (run.summary["status"], run.summary["steps"], len(run.metrics)) == ("completed", 2, 2)
    assert 0 < run.metrics[0]["reward/brevity"] < 1
    assert 0 < run.metrics[0]["reward/tags"] <= 1
    functions = run.config["reward"]["functions"]
    assert functions["brevity"] == f"{__name__}.brevity"
    assert functions["tags"] == "python:__main__.of_no_module"
    assert "optimizer.learning_rate=0.001" in run.summary["overrides"]
    assert (run.path / "report.html").exists()


def test_a_run_does_not_go_on_without_its_functions(copied, command):
    longer = {"training.resume": copied, "training.num_epochs": 2}
    before = sorted(copied.path.rglob("*"))
    with pytest.raises(UserError, match=r"reward.functions.tags=python:__main__.of_no_module: .* handed over"):
        agent_tunix.train(longer)
    outcome = command("train", f"training.resume={copied.path}", "training.num_epochs=2")
    assert outcome.code == 2
    assert "this function was handed over by a Python program" in outcome.err
    assert sorted(copied.path.rglob("*")) == before
    resumed = agent_tunix.train(longer, {"tags": of_no_module}, quiet=True)
    assert resumed.path.samefile(copied.path)
    assert [record["step"] for record in resumed.metrics] == [1, 2, 3, 4]
    assert all("reward/tags" in record for record in resumed.metrics)


def logits_by_hand(folder: Path, step: int | None) -> np.ndarray:
    cfg = loading.saved_config(str(folder), "run")
    model = loading.load_model(cfg)
    trainable, _ = loading.load_trained(str(folder), cfg, model, step)
    inference = Inference(model)
    ids = model.tokenizer.begun(QUESTION)
    return np.asarray(inference.logits(inference.policy(trainable), left_pad([ids], len(ids), 0)))[0]


def test_an_adapter_is_what_the_run_has_learnt(run):
    policies = {step: agent_tunix.load(adapter=run, step=step) for step in (None, 1, 0)}
    ids = policies[None].encode(QUESTION)
    found = {step: policy.logits(ids) for step, policy in policies.items()}
    for step in (None, 1):
        np.testing.assert_allclose(found[step], logits_by_hand(run.path, step), atol=1e-4)
    np.testing.assert_array_equal(found[0], agent_tunix.load("package:tiny").logits(ids))
    np.testing.assert_array_equal(found[None], agent_tunix.load("package:tiny", adapter=run).logits(ids))
    assert np.abs(found[None] - found[1]).max() > 0.1, "training changed too little for this test to mean anything"
    assert np.abs(found[1] - found[0]).max() > 0.1
    rounded = agent_tunix.load(adapter=run, dtype="bfloat16").logits(ids)
    assert 0 < np.abs(rounded - found[None]).max() < 0.5


def test_an_adapter_for_peft_is_what_the_run_has_learnt(run, command, tmp_path):
    outcome = command("export", f"run={run.path}", "format=peft", "output=peft")
    assert outcome.code == 0, outcome.err
    of_run = agent_tunix.load(adapter=run)
    ids = of_run.encode(QUESTION)
    for weights in ("package:tiny", None):
        policy = agent_tunix.load(weights, adapter=tmp_path / "peft")
        np.testing.assert_array_equal(policy.logits(ids), of_run.logits(ids))


def test_a_chat_has_the_system_prompt_that_the_run_was_trained_with(copied):
    config = (copied.path / "config.yaml").read_text()
    changed = config.replace("system_prompt: ''", "system_prompt: How many").partition("\n")[2]  # without its checksum
    (copied.path / "config.yaml").write_text(changed)
    policy = agent_tunix.load(adapter=copied)
    assert policy.system_prompt == "How many"
    asked = load_tokenizer(find_checkpoint("package:tiny")).chat.prompt(QUESTION, "How many")
    (expected,) = policy.generate([asked], max_new_tokens=16)
    assert policy.chat([{"role": "user", "content": QUESTION}], max_new_tokens=16) == expected


def test_an_evaluation_gives_the_record_that_the_command_writes(copied, command, capsys):
    given = {"run": copied, "evaluation.num_examples": 8}
    record = agent_tunix.evaluate(given, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert command("evaluate", f"run={copied.path}", "evaluation.num_examples=8").code == 0
    assert read_records(copied.path / "evals.jsonl")[-2:] == copied.evals[-2:] == [record, record]


def test_a_divergence_is_raised_and_its_run_can_be_read(tmp_path):
    def nothing(prompt: str, completion: str, answer: str) -> float:
        return float("nan")

    with pytest.raises(agent_tunix.DivergenceError, match="'nothing' returned nan") as raised:
        agent_tunix.train({**TRAIN, "hydra.run.dir": tmp_path / "run"}, {"nothing": nothing}, quiet=True)
    assert isinstance(raised.value, UserError)
    assert agent_tunix.Run(tmp_path / "run").summary["status"] == "diverged"


def test_the_example_of_the_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    assert PAGE.read_text().split("\n\n", 1)[1].startswith(f"```python\n{example}"), "the page begins with it"
    small = """num_batches": 2, "training.micro_batch_size": 2, "grpo.num_generations": 4"""
    for number, fewer in {'num_batches": 10': small, 'num_examples": 64': 'num_examples": 8'}.items():
        assert number in example
        example = example.replace(number, fewer)  # it is only to run, by the programs of the other runs
    exec(compile(example, PAGE.name, "exec"), {"__name__": "__main__"})
    assert "</answer>" in capsys.readouterr().out
    assert os.listdir("runs")
