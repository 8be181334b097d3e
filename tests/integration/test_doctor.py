"""Real short runs of the tiny model, each made ill in one way: the doctor must name it, and call no healthy run ill."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from agent_tunix import cli
from agent_tunix.engine import calls

LONG_RUNS = 2  # they take long, and share no program with the others
SMALL = (
    "+experiment=quick_test",
    "training.micro_batch_size=8",
    "training.num_batches=12",
    "training.eval_every_n_steps=null",
    "training.save_interval_steps=null",
    "evaluation.num_examples=100",
)
ONE_OF_MINE = "def always_negative(prompt, completion, answer):\n    return -1.0 - len(completion) / 100\n"
# The run, a finding expected of it, and a part of its remedy.
ILL = {
    "absurd rate": (["optimizer.learning_rate=1e-2"], "diverging", "optimizer.learning_rate=0.0001"),
    "high rate": (["optimizer.learning_rate=1e-4"], "KL runaway", "optimizer.learning_rate=1e-05 grpo.beta=0.08"),
    "slow": (
        ["optimizer.learning_rate=1e-6", "training.micro_batch_size=16", "training.num_batches=40"],
        "slow convergence",
        "optimizer.learning_rate=",
    ),
    "low rate": (["optimizer.learning_rate=1e-7"], "not learning", "optimizer.learning_rate=1e-06"),
    "no weights": (["reward.weights.format_exact=0", "reward.weights.answer=0"], "no signal", "evaluation.num_examples=100"),
    "short answers": (
        [
            "generation.max_generation_steps=6",
            "training.num_batches=5",
            "evaluation.sampled=false",
        ],
        "answers truncated",
        "generation.max_generation_steps=24",
    ),
    "cold": (["generation.temperature=0.05", "training.num_batches=5"], "no signal", "generation.temperature=1.0"),
    "negative": (
        [
            "+reward.functions.mine=mine_of_the_doctor.always_negative",
            "+reward.weights.mine=1.0",
            "reward.weights.format_exact=0",
            "reward.weights.answer=0",
        ],
        "reward against accuracy",
        "reward.weights.mine=0.0",
    ),
    "format only": (
        ["reward.weights.format_exact=1.0", "reward.weights.answer=0"],
        "format learnt but not arithmetic",
        "reward.weights.answer=1.0",
    ),
    "nothing holds it": (
        ["grpo.beta=0", "optimizer.learning_rate=2e-4"],
        "policy collapse",
        "optimizer.learning_rate=2e-05",
    ),
    "decayed": (["scheduler.total_steps=2"], "rate spent early", "scheduler.total_steps=null"),
    "swinging": (
        [
            "training.method=supervised",
            "optimizer.learning_rate=1e-4",
            "training.eval_every_n_steps=1",
            "evaluation.sampled=false",
        ],
        "oscillating",
        "optimizer.warmup_ratio=0.2",
    ),
}
LATER = ("slow", "short answers", "swinging", "nothing holds it", "decayed")  # long, or compiled for nothing else
LATER += ("no weights", "format only")  # as test_symptoms.py has them, without a run
NAMES = [pytest.param(name, marks=[pytest.mark.parity] if name in LATER else []) for name in ILL]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains once with some overrides, and remembers the run's folder."""
    workplace, done = tmp_path_factory.mktemp("runs"), {}
    (workplace / "mine_of_the_doctor.py").write_text(ONE_OF_MINE)

    def run(*overrides: str) -> Path:
        if overrides not in done:
            folder = workplace / str(len(done))
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
                patch.chdir(workplace)
                patch.setattr(sys, "argv", ["agent-tunix", "train", *SMALL, *overrides, f"hydra.run.dir={folder}"])
                with contextlib.suppress(SystemExit):  # the guard stops some, as it should
                    cli.main()
            assert (folder / "summary.json").exists(), overrides
            done[overrides] = folder
        return done[overrides]

    return run


def examine(command, folder: Path) -> dict:
    outcome = command("doctor", str(folder), "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


@pytest.mark.parametrize("name", NAMES)
def test_each_illness_is_named_with_its_remedy(name, train, command):
    overrides, illness, remedy = ILL[name]
    report = examine(command, train(*overrides))
    assert report["verdict"] == "ill"
    remedies = {finding["illness"]: finding["remedy"] for finding in report["findings"]}
    assert illness in remedies
    assert remedy in remedies[illness]


SECOND = {
    "absurd rate": "KL runaway",
    "nothing holds it": "KL runaway",
    "cold": "entropy collapse",
    "negative": "rewards never positive",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name.values[0] in SECOND])
def test_a_second_illness_is_found_beside_the_first(name, train, command):
    findings = examine(command, train(*ILL[name][0]))["findings"]
    assert SECOND[name] in [finding["illness"] for finding in findings]


def test_a_healthy_run_is_told_so(train, command):
    report = examine(command, train())
    assert report["verdict"] == "healthy"
    assert report["findings"] == []
    outcome = command("doctor", str(train()))
    assert "healthy" in outcome.out
    assert "near zero by construction" in outcome.out
    assert "held-out accuracy" in outcome.out


@pytest.mark.parity
def test_a_long_warmup_is_told_to_a_run_that_learnt_all_the_same(train, command):
    report = examine(command, train("scheduler.warmup_steps=12"))
    assert [finding["illness"] for finding in report["findings"]] == ["warm-up as long as the run"]


@pytest.mark.parity
def test_updates_that_round_away(train, command):
    lost = ["model.lora_rank=0", "optimizer.learning_rate=1e-10", "scheduler.lr_min=0", "training.num_batches=3"]
    lost += ["training.method=supervised", "evaluation.sampled=false"]  # less to compile
    assert examine(command, train(*lost))["findings"][0]["illness"] == "updates that do not survive"


def test_a_sampler_that_is_not_the_trainer(train, command, monkeypatch):
    """A fault is put between the two: the sampler overstates half of its probabilities."""
    honest = calls.sample

    def dishonest(*args, **options):
        found = honest(*args, **options)
        return [dataclasses.replace(one, logprobs_BC=one.logprobs_BC.at[:, ::2].add(0.5)) for one in found]

    monkeypatch.setattr(calls, "sample", dishonest)
    found = examine(command, train("training.num_batches=4"))["findings"]
    assert "sampler/trainer mismatch" in [finding["illness"] for finding in found]


def test_a_sweep_gets_a_line_a_job_and_its_best(train, command, tmp_path):
    for job, name in enumerate(["low rate", "high rate"]):
        shutil.copytree(train(*ILL[name][0]), tmp_path / "sweep" / str(2 * job))
    shutil.copytree(train(), tmp_path / "sweep" / "1")
    report = examine(command, tmp_path / "sweep")
    assert report["kind"] == "sweep"
    assert [job["name"] for job in report["jobs"]] == ["0", "1", "2"]
    assert report["best"] == "1"
    outcome = command("doctor", "sweep")
    assert "learning_rate=1e-05" in outcome.out
    assert "--multirun" in outcome.out


def test_what_is_no_run_is_said_so(command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "tune.json").write_text("{}")
    for folder, said in (("empty", "no config.yaml"), ("absent", "not a folder"), ("search", "search/1-coarse-rate")):
        outcome = command("doctor", folder)
        assert outcome.code == 2
        assert folder in outcome.err
        assert said in outcome.err
    assert command("doctor").code == 2
    assert command("doctor", "empty", "--jsno").code == 2
    assert "--json" in command("doctor", "--help").out
