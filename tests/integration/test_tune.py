"""`agent-tunix tune` on the tiny model: a small search to its end, through a kill, and what it refuses."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder
from agent_tunix.lab.sweep import sweep
from agent_tunix.lab.tune import tune
from agent_tunix.lab.tune.halving import Price
from agent_tunix.lab.tune.session import Session
from agent_tunix.training.run_folder import claimed, read_records

RUN = [
    *("model=gemma3_tiny", "model.lora_module_path=q_proj", "training.num_batches=4", "training.micro_batch_size=2"),
    *("data.num_examples=64", "evaluation.num_examples=8", "evaluation.sampled=false", "training.save_interval_steps=3"),
    *("optimizer.max_grad_norm=0.2", "optimizer.learning_rate=1e-3", "scheduler=linear"),
    *("tune.rates=2", "tune.warmup_ratios=[]", "tune.weight_decays=[]", "tune.seeds=2", "tune.finalists=1"),
]
STAGES = ["1-coarse-rate", "2-fine-rate", "3-warm-up", "4-weight-decay", "5-finalists"]
KILL = """
import os, signal, time
from agent_tunix.training.run_folder import RunFolder
write = RunFolder.metrics
def until_the_second_stage(self, record):
    write(self, record)
    if "2-fine-rate" in str(self.path) and record["step"] == 4:
        while not (self.path / "checkpoints" / "3").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
RunFolder.metrics = until_the_second_stage
"""


def record(folder: Path) -> dict:
    return json.loads((folder / "tune.json").read_text())


def updates(folder: Path) -> dict[str, int]:
    """The updates that the runs of a search have made, by folder."""
    return {str(path.parent.relative_to(folder)): len(read_records(path)) for path in sorted(folder.rglob("metrics.jsonl"))}


def evaluated(folder: Path) -> dict[str, list[int]]:
    """The updates after which the runs of a search were evaluated."""
    found = {path.parent: read_records(path) for path in folder.rglob("evals.jsonl")}
    return {str(run.relative_to(folder)): [record["step"] for record in records] for run, records in found.items()}


def composed(conf: Path, *overrides: str) -> dict:
    """The configuration as the command line composes it where `./conf` is the user's own."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("config", [*overrides, f"hydra.searchpath=[file://{conf}]"]), resolve=True)


def test_a_search_ends_with_settings_that_can_be_used_and_survives_a_kill(command, tmp_path):
    outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=straight")
    assert outcome.code == 0, outcome.err
    straight = record(tmp_path / "straight")
    assert straight["status"] == "completed"
    assert [stage["name"] for stage in straight["stages"]] == STAGES
    assert all(stage["conclusion"] and stage["chosen"] is not None and stage["rungs"] for stage in straight["stages"])
    assert straight["rungs"] == [1, 2, 4]
    assert "No difference within noise" in straight["verdict"], "four updates and eight problems tell nothing apart"
    starts = [json.loads((tmp_path / "straight" / "5-finalists" / str(k) / "summary.json").read_text()) for k in (0, 1)]
    before = sum(start["first_eval"]["accuracy"] for start in starts) / len(starts)
    assert f"over 2 seeds, from {100 * before:.1f} % before training" in straight["verdict"]
    made = updates(tmp_path / "straight")
    assert {made[f"5-finalists/{seed}"] for seed in (0, 1)} == {4}
    assert sum(made.values()) - copied(straight) <= 24

    code = f"{KILL}\nimport sys; sys.argv[0] = 'agent-tunix'\nfrom agent_tunix.cli import main; main()"
    arguments = [sys.executable, "-c", code, "tune", *RUN, "tune.budget=24", "hydra.run.dir=killed"]
    killed = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert record(tmp_path / "killed")["status"] == "running"
    first = (tmp_path / "killed" / "1-coarse-rate" / "0" / "summary.json").stat().st_mtime_ns
    outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=killed")
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "killed" / "1-coarse-rate" / "0" / "summary.json").stat().st_mtime_ns == first, "not run again"
    timeless = [{k: v for k, v in r.items() if k != "seconds"} for r in (record(tmp_path / "killed"), straight)]
    assert timeless[0] == timeless[1]
    assert updates(tmp_path / "killed") == made
    assert evaluated(tmp_path / "killed") == evaluated(tmp_path / "straight"), "at the rungs alone"

    usable(command, tmp_path, straight)
    refused(command, tmp_path)


def copied(found: dict) -> int:
    """Updates that were not made but copied: the incumbent of each later stage, and the finalist's first seed."""
    return (len(found["stages"]) - 1) * found["updates"]


def usable(command, tmp_path: Path, found: dict) -> None:
    """best.yaml serves in both groups, and step 5 is a command that runs."""
    for group in ("experiment", "optimizer"):
        (tmp_path / "conf" / group).mkdir(parents=True)
        shutil.copy(tmp_path / "straight" / "best.yaml", tmp_path / "conf" / group / "best.yaml")
    own = composed(tmp_path / "conf")["optimizer"]
    best = {key.split(".")[1]: value for key, value in found["best"].items() if key.startswith("optimizer.")}
    for overrides in (["optimizer=best"], ["+experiment=best"], ["+experiment=[quick_test,best]"]):
        tree = composed(tmp_path / "conf", *overrides)
        assert tree["optimizer"] == {**own, "max_grad_norm": 0.2, **best}
        assert tree["scheduler"]["scheduler_name"] == "linear"
        assert composed(tmp_path / "conf", *overrides, "scheduler=wsd")["scheduler"]["scheduler_name"] == "wsd"
        assert "best" not in tree
    outcome = command("plan", "model=gemma3_tiny", "training.num_batches=4", "optimizer=best", "hydra.run.dir=plan")
    assert outcome.code == 0, outcome.err
    words = shlex.split(found["command"])
    assert [word for word in words if word.startswith("tune.")] == []
    assert words.count(f"optimizer.learning_rate={found['best']['optimizer.learning_rate']}") == 1
    assert "optimizer.learning_rate=1e-3" not in words
    outcome = command("plan", *words[words.index("model=gemma3_tiny") :], "hydra.run.dir=plan")
    assert outcome.code == 0, outcome.err


def refused(command, tmp_path: Path) -> None:
    """A folder that holds another search, or in which one is under way, is left alone."""
    before = (tmp_path / "straight" / "tune.json").read_text()
    with claimed(tmp_path / "straight"):
        outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=straight")
    assert outcome.code == 2
    assert "straight is being written by another process" in outcome.err
    assert (tmp_path / "straight" / "tune.json").read_text() == before
    outcome = command("tune", *RUN, "tune.budget=24", "seed=7", "hydra.run.dir=straight")
    assert outcome.code == 2
    assert "another configuration, which differs in seed" in outcome.err
    assert (tmp_path / "straight" / "tune.json").read_text() == before

    for damaged in (before[:20], '{"batches": 2, "price": 3, "seconds": null}'):
        (tmp_path / "straight" / "tune.json").write_text(damaged)
        outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=straight")
        assert outcome.code == 2
        assert "straight/tune.json cannot be read, and a search cannot go on without it" in outcome.err
    lines = (tmp_path / "straight" / "tune.yaml").read_text().splitlines()
    (tmp_path / "straight" / "tune.yaml").write_text("\n".join(lines[: len(lines) // 2]))
    outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=straight")
    assert outcome.code == 2
    assert "straight/tune.yaml is not the whole configuration of a search" in outcome.err


def test_an_interrupted_search_says_how_to_go_on(command, tmp_path, monkeypatch):
    train_all = sweep.train_all

    def interrupted(jobs, folder, console, loaded, interruption, fuse="auto"):
        interruption.requested = "2-fine-rate" in str(folder)
        return train_all(jobs, folder, console, loaded, interruption, fuse)

    monkeypatch.setattr(sweep, "train_all", interrupted)
    outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=out")
    assert outcome.code == 0, outcome.err
    found = record(tmp_path / "out")
    assert found["status"] == "interrupted"
    assert "Interrupted. Not done: fine learning rate, warm-up ratio, weight decay, finalists." in found["verdict"]
    assert "hydra.run.dir=out" in outcome.out.replace("\n", "")
    assert "hydra.sweep.dir" not in outcome.out
    assert found["stages"][0]["chosen"] == found["best"]["optimizer.learning_rate"]


def test_a_budget_in_time_is_kept_and_what_was_not_done_is_said(command, tmp_path, monkeypatch):
    outcome = command("tune", *RUN, "tune.budget=1s", "hydra.run.dir=out")
    assert outcome.code == 2
    assert "tune.budget=1s is too small: with runs of 4 updates" in outcome.err
    assert not (tmp_path / "out").exists()

    seconds = Session.seconds
    monkeypatch.setattr(tune, "measure_pace", lambda s, settings, iterations: Price(0.1, 0.1))
    monkeypatch.setattr(Session, "seconds", lambda self: seconds(self) + (1e6 if len(self.record["stages"]) > 1 else 0))
    outcome = command("tune", *RUN, "tune.budget=30m", "hydra.run.dir=out")
    assert outcome.code == 0, outcome.err
    found = record(tmp_path / "out")
    assert found["status"] == "completed"
    assert "The budget of 30m is spent. Not done: fine learning rate, warm-up" in found["verdict"]
    assert (tmp_path / "out" / "best.yaml").exists()


def test_a_search_in_which_all_diverged_is_no_success(command, tmp_path, monkeypatch):
    def diverge(self, trials, until):
        for trial in trials:
            trial.job.folder.mkdir(parents=True)
            (trial.job.folder / "summary.json").write_text('{"status": "diverged"}')

    monkeypatch.setattr(Session, "train", diverge)
    outcome = command("tune", *RUN, "tune.budget=24", "hydra.run.dir=out")
    assert outcome.code == 3
    assert "Every coarse learning rate that was tried diverged." in outcome.out
    assert "found no settings" in outcome.err
    assert "doctor out/1-coarse-rate" in outcome.err
    assert not (tmp_path / "out" / "best.yaml").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tune.budget=soon"], "tune.budget=soon: must be a time such as 30m or 2h, or a number of updates such as 400"),
        (["tune.budget=10"], "tune.budget=10 is too small: with runs of 8 updates, the shortest worth comparing"),
        (["tune.budget=10"], " updates. Set tune.budget="),
        (["tune.seed=3"], "tune.seed: unknown key; did you mean tune.seeds?"),
        (["dry_run=true"], "neither dry_run nor training.resume"),
        (["scheduler=wsd", "scheduler.decay_ratio=0.9"], "tune would try optimizer.warmup_ratio=0.2 in whole runs: "),
        (["scheduler=wsd", "scheduler.decay_ratio=0.9"], "add up to more than 1"),
        (
            ["scheduler=cosine_restarts", "scheduler.num_cycles=30", "tune.budget=300"],
            "as tune.budget=300 allows: scheduler.num_cycles=30: ",
        ),
        (["seed=2147483647", "tune.seeds=2"], "seed=2147483648: must be less than 2147483648"),
    ],
)
def test_what_cannot_be_searched_is_refused_and_nothing_is_written(command, tmp_path, overrides, said):
    outcome = command("tune", "+experiment=quick_test", *overrides, "hydra.run.dir=out")
    assert outcome.code == 2
    assert said in outcome.err
    assert not (tmp_path / "out").exists()


def test_the_least_budget_that_is_asked_for_is_enough(command):
    outcome = command("tune", "+experiment=quick_test", "tune.budget=10", "hydra.run.dir=out")
    asked = outcome.err.split("Set tune.budget=")[1].split(",")[0]
    below = command("tune", "+experiment=quick_test", f"tune.budget={int(asked) - 1}", "hydra.run.dir=out")
    assert f"Set tune.budget={asked}," in below.err
