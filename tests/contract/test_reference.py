"""Every command of the optimizer reference, to the letter, on the tiny model, and what each leaves in the run's folder."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agent_tunix.training.run_folder import read_records

LONG_RUNS = True  # none is long, but all together are
REPOSITORY = Path(__file__).parents[2]
REFERENCE = (REPOSITORY / "docs" / "configuration" / "optimizer.rst").read_text()
PROMISED = """
optimizer=adamw
optimizer.learning_rate=1e-5
optimizer.weight_decay=0.05
optimizer.betas=[0.95,0.99]
optimizer.eps=1e-6
+experiment=quick_test optimizer.warmup_ratio=0.0
optimizer.warmup_ratio=0.2
optimizer.max_grad_norm=0.05
+experiment=quick_test --multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4
--multirun optimizer.learning_rate=1e-6,3e-6,1e-5,3e-5
optimizer.learning_rate=3e-6 --multirun optimizer.warmup_ratio=0.05,0.1,0.2
optimizer.learning_rate=3e-6 --multirun optimizer.weight_decay=0.0,0.01,0.05
optimizer.learning_rate=3e-6 optimizer.warmup_ratio=0.1 optimizer.weight_decay=0.01
optimizer.learning_rate=1e-6 optimizer.warmup_ratio=0.2 optimizer.weight_decay=0.05 optimizer.max_grad_norm=0.05
optimizer.learning_rate=1e-5 optimizer.warmup_ratio=0.05 optimizer.weight_decay=0.0
optimizer.learning_rate=1e-7
optimizer.max_grad_norm=0.01
optimizer.learning_rate=1e-4
optimizer.learning_rate=1e-6 optimizer.warmup_ratio=0.2
optimizer.learning_rate=1e-5 optimizer.weight_decay=0.0
optimizer=custom
optimizer.learning_rate=5e-6 optimizer.warmup_ratio=0.15
"""  # that these run is the contract; the page around them may change
SMALL = [  # of one shape whatever the command says, so that all share their programs
    *("model=gemma3_tiny", "training.num_batches=2", "training.micro_batch_size=2", "grpo.num_generations=4"),
    *("data.num_examples=64", "evaluation.num_examples=8", "evaluation.sampled=false"),
]

# What tools rely on in the folder of a run.
FILES = {"config.yaml", "metrics.jsonl", "evals.jsonl", "answers.jsonl", "samples.jsonl", "summary.json", "report.html"}
FOLDERS = {"checkpoints", "tensorboard"}
METRICS = {
    *("step", "loss", "lr", "grad_norm", "update_norm", "update_survival", "kl", "entropy", "clip_fraction", "mismatch/kl"),
    *("reward/mean", "reward/std", "groups/zero_variance", "completion/length", "completion/tokens", "completion/truncated"),
    *("reward/format_exact", "reward/format_approximate", "reward/answer", "reward/number"),
    *("time/rollout", "time/reward", "time/update", "tokens_per_second", "memory/peak_gb"),
}
EVALS = {"step", "split", "n", "accuracy", "partial_accuracy", "format_accuracy", "lenient_accuracy"}
SAMPLES = {"step", "prompt", "answer", "completion", "reward", "rewards", "advantage"}


def commands(text: str) -> list[list[str]]:
    """The arguments of each `python run_training.py` in the text, with continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True)[2:] for line in lines if line.strip().startswith("python run_training.py")]
    return [arguments for i, arguments in enumerate(found) if arguments not in found[:i]]


def swept(arguments: list[str]) -> tuple[str, list[str]]:
    """The key and the values of the override that a --multirun command sweeps over."""
    key, _, values = next(a for a in arguments if "," in a and "[" not in a).partition("=")
    return key, values.split(",")


COMMANDS = commands(REFERENCE)
SINGLE = [c for c in COMMANDS if "--multirun" not in c]
SWEEPS = [c for c in COMMANDS if "--multirun" in c]


def test_the_reference_is_read_whole():
    assert len(SINGLE) >= 18
    assert len(SWEEPS) == 4


def test_the_page_has_every_command_that_is_promised():
    promised = PROMISED.split("\n")[1:-1]
    assert len(promised) == 22
    assert [line for line in promised if line.split() not in COMMANDS] == []


@pytest.mark.parametrize("arguments", SINGLE, ids=" ".join)
def test_single_runs(arguments, command, tmp_path):
    outcome = command("train", *arguments, *SMALL, "hydra.run.dir=out")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["steps"] == 2
    assert_whole(tmp_path / "out", summary)
    config = OmegaConf.load(tmp_path / "out" / "config.yaml")
    for argument in arguments:
        key, _, value = argument.partition("=")
        if "." in key:
            assert OmegaConf.select(config, key) == OmegaConf.create(f"value: {value}").value
            assert (
                summary["optimizer"][key.removeprefix("optimizer.")]
                == OmegaConf.to_object(config).get("optimizer")[key.removeprefix("optimizer.")]
            )


def assert_whole(folder: Path, summary: dict) -> None:
    """All files are there, with the keys by which tools read them."""
    assert {path.name for path in folder.iterdir()} == FILES | FOLDERS
    metrics, evals, samples = (read_records(folder / f"{name}.jsonl") for name in ("metrics", "evals", "samples"))
    assert [set(record) for record in metrics] == [METRICS] * 2
    assert all(isinstance(value, int | float) for record in metrics for value in record.values())
    assert [set(record) for record in evals] == [EVALS] * 2
    assert [set(record) for record in samples] == [SAMPLES] * 4
    assert (summary["first_eval"], summary["final_eval"]) == tuple(evals)
    assert summary["best_eval"] in evals
    assert summary["seconds"] > 0
    assert summary["advice"]


@pytest.mark.parametrize("arguments", SWEEPS, ids=" ".join)
def test_sweeps(arguments, command, tmp_path):
    outcome = command("train", *arguments, *SMALL, "hydra.launcher.fuse=never", "hydra.sweep.dir=sweep")
    assert outcome.code == 0, outcome.err
    key, values = swept(arguments)
    for job, value in enumerate(values):
        folder = tmp_path / "sweep" / str(job)
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
        assert OmegaConf.select(OmegaConf.load(folder / "config.yaml"), key) == float(value)


def test_adamw_and_warmup_cosine_hold_exactly_the_keys_and_values_of_the_reference():
    for heading, path in (
        ("optimizer_name: adamw\n    learning_rate: 3e-6", "optimizer/adamw.yaml"),
        ("scheduler_name: warmup_cosine", "scheduler/warmup_cosine.yaml"),
        ("optimizer_name: adamw\n    learning_rate: 5e-6", "optimizer/custom.yaml"),
    ):
        start = REFERENCE.index(heading)
        block = REFERENCE[start:].split("\n\n")[0].replace("\n    ", "\n")
        assert OmegaConf.load(REPOSITORY / "conf" / path) == OmegaConf.create(block)


@pytest.mark.parametrize("name", ["mine", "custom"])
def test_a_users_own_strategy_is_found_in_the_working_directory(name, command, tmp_path):
    """Also one that has the name of a shipped one, as the reference's own has."""
    own = tmp_path / "conf" / "optimizer" / f"{name}.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((REPOSITORY / "conf" / "optimizer" / "custom.yaml").read_text().replace("5e-6", "7e-6"))
    outcome = command("train", f"optimizer={name}", *SMALL, "hydra.run.dir=out")
    assert outcome.code == 0, outcome.err
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["optimizer"]["learning_rate"] == 7e-6
