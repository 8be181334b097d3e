"""Sweeps: fused or one after another, each job's folder is what it would be had the job run alone."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.plan import memory, plan
from agent_tunix.lab.sweep import sweep
from agent_tunix.training import loading, loop, setup
from agent_tunix.training.run_folder import claimed, read_records

RUN = [
    "model=gemma3_tiny",
    "model.lora_module_path=down_proj",  # fewer adapters are compiled faster
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "training.num_batches=4",
    "training.save_interval_steps=2",
    "grpo.num_generations=4",
    "grpo.importance_correction=truncate",
    "grpo.resample_rounds=1",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
]
JOBS = [  # together they differ in every number that jobs may differ in and still be fused
    ["optimizer.learning_rate=1e-5"],
    [
        *("optimizer.learning_rate=3e-5", "optimizer.weight_decay=0.1", "optimizer.betas=[0.8,0.99]", "optimizer.eps=1e-6"),
        *("optimizer.warmup_ratio=0.5", "optimizer.max_grad_norm=1.0", "scheduler.lr_min=1e-8"),
        *("grpo.beta=0.2", "grpo.epsilon=0.1", "grpo.epsilon_high=0.3", "grpo.delta=2.0", "grpo.importance_cap=1.5"),
        *("generation.temperature=0.8", "seed=7"),
    ],
    ["optimizer.learning_rate=1", "optimizer.warmup_ratio=0.0"],  # diverges
]
TIMES = ("time/", "tokens_per_second", "memory/")


def numbers(path: Path) -> list[dict]:
    return [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_records(path)]


def learnt(folder: Path):
    cfg = validate(read_saved(folder / "config.yaml"), Config)
    return loading.load_trained(str(folder), cfg, loading.load_model(cfg))[0]


def index(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def assert_same_run(one: Path, other: Path):
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    assert (one / "config.yaml").read_text() == (other / "config.yaml").read_text()
    for name in ("metrics.jsonl", "evals.jsonl"):
        for got, want in zip(numbers(one / name), numbers(other / name), strict=True):
            assert got.pop("split", None) == want.pop("split", None)
            assert got == pytest.approx(want, rel=2e-3, abs=2e-5), name
    for got, want in zip(*(read_records(folder / "samples.jsonl") for folder in (one, other)), strict=True):
        assert (got["step"], got["prompt"], got["completion"]) == (want["step"], want["prompt"], want["completion"])
    for got, want in zip(*(jax.tree.leaves(learnt(folder)) for folder in (one, other)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_fused_sweep_equals_its_jobs_run_alone(tmp_path):
    """Each job keeps its own numbers, data and noise; the one that diverges is frozen, and the others do not notice."""
    three = [dataclasses.replace(job, folder=tmp_path / "fused" / job.folder) for job in jobs(*JOBS)]
    console = Console(file=io.StringIO(), width=400)
    results = sweep.run(three, tmp_path / "fused", console, "always")
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[2] The run diverged at step" in said, "whose it is stands before it"
    assert [result["status"] for result in results] == ["completed", "completed", "diverged"]
    assert index(tmp_path / "fused")["mode"] == "fused"
    for job in three[:2]:
        loop.run(job.cfg, tmp_path / "alone" / job.folder.name, console, advisor=LabAdvisor())
        assert_same_run(job.folder, tmp_path / "alone" / job.folder.name)


@pytest.mark.parity  # it takes long
def test_a_candidate_that_rolls_back_goes_on_at_its_own_pace(command, tmp_path):
    rates = ["optimizer.learning_rate=1e-5,3e-5,1", "optimizer.warmup_ratio=0.0", "training.on_divergence=rollback"]
    outcome = command("train", *RUN, *rates, "hydra.launcher.fuse=always", "hydra.sweep.dir=sweep", "--multirun")
    assert outcome.code == 0, outcome.err
    assert "as one program" in outcome.out
    good, _, bad = (json.loads((tmp_path / "sweep" / job / "summary.json").read_text()) for job in "012")
    assert (good["status"], len(good["rollbacks"])) == ("completed", 0)
    assert len(bad["rollbacks"]) > 0


def test_jobs_with_other_numbers_of_problems_are_evaluated_each_by_its_own(command, tmp_path):
    """Seeds make other problems, of which more or fewer are too long."""
    asked = ["model=gemma3_tiny", "training.num_batches=1", "evaluation.num_examples=20", "evaluation.sampled=false"]
    asked += ["model.lora_module_path=q_proj", "grpo.beta=0", "grpo.num_generations=2", "training.micro_batch_size=2"]
    asked += ["data=arithmetic", "data.num_examples=256", "generation.max_prompt_length=27", "seed=4,5", "--multirun"]
    for fuse in ("always", "never"):
        outcome = command("train", *asked, f"hydra.launcher.fuse={fuse}", f"hydra.sweep.dir={fuse}")
        assert outcome.code == 0, outcome.err
    evaluated = [[read_records(tmp_path / fuse / job / "evals.jsonl") for job in "01"] for fuse in ("always", "never")]
    assert evaluated[0] == evaluated[1]
    assert len({records[0]["n"] for records in evaluated[0]}) == 2
    assert evaluated[0][1][0]["accuracy"] > 0


def test_a_sweep_started_again_in_its_folder_runs_what_is_missing(command, tmp_path):
    sweep_of_two = ["train", *RUN, "optimizer.learning_rate=1e-6,1e-5", "hydra.launcher.fuse=never"]
    sweep_of_two += ["hydra.sweep.dir=sweep", "--multirun"]
    assert command(*sweep_of_two).code == 0
    first, second = tmp_path / "sweep" / "0", tmp_path / "sweep" / "1"
    untouched, wanted = (first / "summary.json").stat().st_mtime_ns, numbers(second / "metrics.jsonl")
    (second / "summary.json").unlink()  # as a kill after the checkpoint of step 2 leaves it
    shutil.rmtree(second / "checkpoints" / "4")
    (first / "report.html").unlink()  # as a kill after its summary leaves it
    with claimed(tmp_path / "sweep"):
        assert "is being written by another process" in command(*sweep_of_two).err
    assert [job["status"] for job in index(tmp_path / "sweep")["jobs"]] == ["completed", "completed"], "left as it was"
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(index(tmp_path / "sweep") | {"mode": "fused"}))
    outcome = command(*sweep_of_two)
    assert outcome.code == 0, outcome.err
    assert index(tmp_path / "sweep")["mode"] == "fused, one after another", "the first part of it ran otherwise"
    assert (first / "report.html").exists()
    assert (first / "summary.json").stat().st_mtime_ns == untouched
    assert numbers(second / "metrics.jsonl") == wanted
    assert [job["status"] for job in index(tmp_path / "sweep")["jobs"]] == ["completed", "completed"]
    outcome = command(*sweep_of_two, "seed=1")
    assert outcome.code == 2
    assert "holds another run" in outcome.err
    (tmp_path / "sweep" / "sweep.json").write_text('{"mode": "fus')
    of_another_launcher = [word for word in sweep_of_two if "fuse" not in word] + ["hydra/launcher=basic"]
    for asked in (sweep_of_two, of_another_launcher):
        outcome = command(*asked)
        assert outcome.code == 2
        assert "sweep/sweep.json cannot be read" in outcome.err
        assert (tmp_path / "sweep" / "sweep.json").read_text() == '{"mode": "fus', "left as it is"


def test_an_interrupted_sweep_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(jobs, folder, console, loaded, interruption, fuse):
        interruption.requested = True
        return []

    monkeypatch.setattr(sweep, "train_all", interrupted)
    console = Console(record=True)
    sweep.run([], tmp_path / "my sweep", console)
    given = next(word for word in shlex.split(console.export_text()) if word.startswith("hydra.sweep.dir="))
    assert given == f"hydra.sweep.dir='{tmp_path / 'my sweep'}'"


@pytest.mark.parametrize("fuse", [pytest.param("never", marks=pytest.mark.parity), "always"])
def test_a_job_that_rests_goes_on_as_if_it_had_not(tmp_path, monkeypatch, fuse):
    """What a search compares at a rung is the beginning of the same run."""
    console, three = Console(quiet=True), jobs(JOBS[0], ["optimizer.learning_rate=2e-5"], ["optimizer.learning_rate=3e-5"])
    straight, resting = ([dataclasses.replace(job, folder=tmp_path / name / job.folder) for job in three] for name in "ab")
    sweep.run(straight, tmp_path / "a", console, fuse)
    rung = [dataclasses.replace(job, stop_after=2) for job in resting]
    results = sweep.run(rung, tmp_path / "b", console, fuse)
    assert [(result["status"], result["steps"], result["final_eval"]["step"]) for result in results] == [
        ("paused", 2, 2)
    ] * 3
    untouched = (resting[0].folder / "summary.json").stat().st_mtime_ns
    sweep.run(rung, tmp_path / "b", console, fuse)
    assert (resting[0].folder / "summary.json").stat().st_mtime_ns == untouched, "it has come so far"
    results = sweep.run(resting, tmp_path / "b", console, fuse)
    assert [result["status"] for result in results] == ["completed"] * 3
    for one, other in zip(straight, resting, strict=True):
        assert numbers(one.folder / "metrics.jsonl") == numbers(other.folder / "metrics.jsonl")
        (_, end), (_, rest, again) = (numbers(job.folder / "evals.jsonl") for job in (one, other))
        assert (rest["step"], again) == (2, end)
    if fuse == "always":
        goes_on_by_the_program_that_it_began_with(tmp_path, straight, console, monkeypatch)


def goes_on_by_the_program_that_it_began_with(tmp_path, jobs, console, monkeypatch) -> None:
    """To the bit: it is not measured again, and two jobs that are left have the places that they had among three."""
    monkeypatch.setattr(sweep, "cost_of_many", lambda r, members: pytest.fail("measured again"))
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    left = [dataclasses.replace(job, folder=tmp_path / "c" / job.folder.name) for job in jobs]
    for job in left[1:]:  # as a kill after the checkpoint of step 2 leaves them
        (job.folder / "summary.json").unlink()
        shutil.rmtree(job.folder / "checkpoints" / "4")
    results = sweep.run(left, tmp_path / "c", console)
    assert [result["status"] for result in results] == ["completed"] * 3
    assert index(tmp_path / "c")["groups"] == index(tmp_path / "a")["groups"]
    for job in jobs:
        for name in ("metrics.jsonl", "evals.jsonl"):
            assert numbers(job.folder / name) == numbers(tmp_path / "c" / job.folder.name / name)
        ours, theirs = (jax.tree.leaves(learnt(tmp_path / sweep / job.folder.name)) for sweep in "ac")
        assert all(map(np.array_equal, ours, theirs))


def test_the_basic_launcher_leaves_the_same_sweep_folder(command, tmp_path):
    rates = ["optimizer.learning_rate=1e-6,1e-5", "training.num_batches=2"]
    outcome = command("train", *RUN, *rates, "hydra/launcher=basic", "hydra.sweep.dir=sweep", "--multirun")
    assert outcome.code == 0, outcome.err
    found = index(tmp_path / "sweep")
    assert found["mode"] == "apart"
    given = [override for job in found["jobs"] for override in job["overrides"] if "learning_rate" in override]
    assert given == ["optimizer.learning_rate=1e-06", "optimizer.learning_rate=1e-05"]
    assert all(job["final_eval"]["step"] == 2 for job in found["jobs"])
    assert (tmp_path / "sweep" / "report.html").is_file()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("scheduler.warmup_steps=1,50", "longer than the run of 4"),
        ("model.lora_module_path=q_proj,nothing", "fits no module"),
        ("optimizer.learning_rate=1e-5,-1", "optimizer.learning_rate=-1"),
        ("optimizer=adamw,adamx", "did you mean adamw?"),
        ("training.resume=a_run seed=1,2", "several jobs cannot go on in one folder"),
        ("seed=1,2 hydra.sweep.subdir=in/${hydra:job.num}", "hydra.sweep.subdir must stay the job's number"),
    ],
)
def test_what_one_job_cannot_be_run_with_is_found_before_any_runs(command, tmp_path, fault, said):
    outcome = command("train", *RUN, *fault.split(), "--multirun")
    assert (outcome.code, said in outcome.err) == (2, True)
    assert not outcome.err.count("Traceback")
    assert not any(tmp_path.iterdir()), "not even what Hydra has written"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["train", "optimizer.learning_rate=1e-5,2e-5", "hydra.sweep.dir=a run", "--multirun"], "a run"),
        *(([verb, "hydra.run.dir=a sweep"], "a sweep") for verb in ("train", "tune", "lr-find")),
    ],
)
def test_a_folder_is_not_written_to_by_what_it_is_not_for(command, tmp_path, arguments, kind):
    (tmp_path / kind).mkdir()
    (tmp_path / kind / {"a run": "config.yaml", "a sweep": "sweep.json"}[kind]).touch()
    outcome = command(arguments[0], *RUN, *arguments[1:])
    assert (outcome.code, f"{kind} holds {kind}; choose another folder" in outcome.err) == (2, True)


def jobs(*overrides: list[str]) -> list[sweep.Job]:
    from hydra import compose, initialize_config_dir

    from agent_tunix.config.load import config_folder

    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        configs = [validate(compose("config", [*RUN, *changes]), Config) for changes in overrides]
    return [sweep.Job(cfg, Path(str(k)), ()) for k, cfg in enumerate(configs)]


def test_jobs_are_grouped_by_the_program_they_need():
    found = sweep.groups(
        jobs(
            ["optimizer.learning_rate=1e-5"],
            ["optimizer.warmup_ratio=0.2", "optimizer.max_grad_norm=1.0", "optimizer.eps=1e-6", "scheduler=constant"],
            ["grpo.beta=0.0"],
            ["grpo.beta=0.04"],
            ["optimizer=lion"],
            ["grpo.num_generations=2"],
            ["model.lora_rank=0"],
            ["model.lora_rank=0", "optimizer.learning_rate=1e-5"],
            ["seed=3"],
        )
    )
    assert [[int(job.folder.name) for job in group] for group, _ in found] == [[0, 1, 3, 8], [2], [4], [5], [6], [7]]


def test_a_group_is_cut_to_what_memory_holds(monkeypatch):
    group, said = jobs(*([f"seed={seed}"] for seed in range(4))), []
    runs = [setup.prepare(job.cfg, setup.Loaded(), print) for job in group]
    planned = plan.shapes(runs[0].cfg, max(run.task.prompt_width for run in runs))
    monkeypatch.setattr(sweep, "cost_of_many", lambda r, members: 1.0)
    for members, sizes in ((4, [4]), (3, [2, 2]), (2, [2, 2]), (1, [1, 1, 1, 1])):
        needed = memory.peak_of_several(planned, members)
        monkeypatch.setattr(sweep, "card", lambda needed=needed: ("a card", 1.001 * needed / plan.USABLE))
        found = sweep.decide(group, runs, said.append, "always")
        assert [len(part) for part in found.parts()] == sizes
    assert len(said) == 4


def test_whether_to_fuse_is_decided_by_what_the_device_takes(monkeypatch):
    group = jobs(["seed=1"], ["seed=2"], ["seed=3"], ["seed=4"])
    runs = [setup.prepare(job.cfg, setup.Loaded(), print) for job in group]
    for ratio, at_once in ((1.3, 4), (3.9, 1)):
        monkeypatch.setattr(sweep, "cost_of_many", lambda r, members, ratio=ratio: ratio)
        said: list[str] = []
        found = sweep.decide(group, runs, said.append)
        assert (found.jobs, found.at_once) == (("0", "1", "2", "3"), at_once)
        assert f"{ratio} times" in said[0]
