"""Killed at a bad moment and resumed, a run gives to the bit what the uninterrupted run gives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from same_runs import BATCHES, ITERATIONS, RUN, SAVE_EVERY, STEPS, assert_same_run, records

from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.training import guard
from agent_tunix.training import loop as train_workflow
from agent_tunix.training.run_folder import RunFolder, claimed, read_records

LONG_RUNS = True
REPOSITORY = Path(__file__).parents[2]


def train(folder: Path, *arguments: str, prelude: str) -> subprocess.CompletedProcess[str]:
    """`run_training.py` in a process of its own, after some lines of Python that sabotage it."""
    code = f"{prelude}\nimport sys; sys.argv[0] = 'run_training.py'\nfrom agent_tunix.cli import train; train()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def at_step(number: int, action: str) -> str:
    """Lines by which a process does something as soon as a step is written down."""
    return textwrap.dedent(f"""
        import os, signal
        from agent_tunix.training import run_folder
        write = run_folder.RunFolder.metrics
        def deadly(folder, record):
            write(folder, record)
            if record["step"] == {number}:
                {action}
        run_folder.RunFolder.metrics = deadly
    """)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("straight") / "run"


@pytest.fixture
def straight(command, kept: Path, monkeypatch) -> Path:
    """The run that nothing interrupts, made for the first test that asks for it.

    Beside it lies what a kill would have left just before and just after the second checkpoint was renamed to its place.
    """
    rename = os.rename

    def copied(source, target, *rest, **named) -> None:
        commits = "orbax-checkpoint-tmp" in str(source) and str(target).endswith(f"checkpoints/{2 * SAVE_EVERY}")
        if commits:
            shutil.copytree(kept, kept.with_name("before"))
        rename(source, target, *rest, **named)
        if commits:
            shutil.copytree(kept, kept.with_name("after"))

    if not kept.exists():
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", copied)
            patch.setattr(os, "replace", copied)
            outcome = command("train", *RUN, f"hydra.run.dir={kept}")
        assert outcome.code == 0, outcome.err
        assert [record["step"] for record in read_records(kept / "metrics.jsonl")] == list(range(1, STEPS + 1))
    return kept


@pytest.fixture
def resume(command):
    """Goes on with the run in the working directory, in this process, which has its programs ready."""

    def go_on() -> str:
        outcome = command("train", "training.resume=run")
        assert outcome.code == 0, outcome.err
        return outcome.out

    return go_on


def test_killed_and_then_stopped_by_a_second_ctrl_c(straight, resume, tmp_path):
    """It is gone on with by a new process, as it would be, which ends at once and without a traceback."""
    killed = train(
        tmp_path, *RUN, "hydra.run.dir=run", prelude=at_step(SAVE_EVERY + 1, "os.kill(os.getpid(), signal.SIGKILL)")
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    stopped = train(tmp_path, "training.resume=run", prelude=at_step(2 * SAVE_EVERY - 1, "raise KeyboardInterrupt"))
    assert stopped.returncode == 130, stopped.stderr
    assert "Interrupted." in stopped.stderr
    assert "Traceback" not in stopped.stdout + stopped.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    resume()
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_in_the_middle_of_a_save(straight, resume, tmp_path, moment):
    """Of the second checkpoint, just before or just after it is renamed to its place."""
    shutil.copytree(straight.with_name(moment), tmp_path / "run")
    saved = [name for name in os.listdir(tmp_path / "run" / "checkpoints") if name.isdigit()]
    assert sorted(saved) == [str(SAVE_EVERY)] + ([str(2 * SAVE_EVERY)] if moment == "after" else [])
    made_again = re.search(rf"Saved up to step {SAVE_EVERY}: \d+ updates recorded after it will be made again\.", resume())
    assert bool(made_again) == (moment == "before")
    assert_same_run(tmp_path / "run", straight)


def test_what_was_learnt_is_saved_though_the_last_evaluation_fails(straight, command, resume, tmp_path, monkeypatch):
    def failing(run, state, out):
        if int(state.step) == STEPS:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return evaluate(run, state, out)

    evaluate = train_workflow.evaluate_policy
    with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
        patch.setattr(train_workflow, "evaluate_policy", failing)
        assert command("train", *RUN, "hydra.run.dir=run", "training.save_interval_steps=100").code != 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "run" / "checkpoints" / str(STEPS)).is_dir()
    resume()
    assert_same_run(tmp_path / "run", straight)


@pytest.fixture
def heeded():
    """Tests may have been started to outlive their terminal, as by `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_exits_cleanly(straight, command, resume, tmp_path, monkeypatch, number):
    def signalled(folder, record) -> None:
        write(folder, record)
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    write = RunFolder.metrics
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "metrics", signalled)
        patch.setattr(guard, "OUTPUTS", ())  # the terminal of the tests stays open
        outcome = command("train", *RUN, "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 3 <= summary["steps"] < STEPS
    assert "training.resume=run" in outcome.out
    resume()
    interrupted_at = summary["steps"]
    extra = [r for r in records(tmp_path / "run", "evals.jsonl") if r["step"] == interrupted_at]
    assert records(tmp_path / "run", "metrics.jsonl") == records(straight, "metrics.jsonl")
    assert all(r in records(tmp_path / "run", "evals.jsonl") for r in records(straight, "evals.jsonl"))
    assert len(extra) <= 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("data.num_examples=80", "run began with other training examples"),
        ("training.micro_batch_size=1", "training.batch_size=2"),
    ],
)
def test_other_data_is_refused_and_so_are_other_batches(straight, command, tmp_path, changed, message):
    """What was trained on could count as held out, as where a file has grown, and batches could come again."""
    shutil.copytree(straight, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    outcome = command("train", "training.resume=run", "training.num_epochs=2", changed)
    assert outcome.code == 2
    assert message in outcome.err
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_what_was_learnt_on_another_base_is_refused(command, tmp_path):
    """As where another model of the same shape was put into the folder, on which adapters would do no one knows what."""
    shutil.copytree(find_checkpoint("package:tiny"), tmp_path / "base")
    once = [*RUN, "model.weights=base", "training.num_batches=1", "training.save_interval_steps=null"]
    assert command("train", *once, "hydra.run.dir=run").code == 0
    file = tmp_path / "base" / "model.safetensors"
    own = file.read_bytes()
    save_file({name: -tensor if tensor.ndim > 1 else tensor for name, tensor in load_file(file).items()}, file)
    before = sorted(tmp_path.rglob("*"))
    following = [*once, "training.init_from=run", "hydra.run.dir=following"]
    evaluated = ["run=run", "inference_config=greedy", "evaluation.num_examples=4"]
    goes_on = ["training.resume=run", "training.num_batches=2"]
    asked = {"train": goes_on, "evaluate": evaluated, "export": ["run=run", "format=merged"]}
    for verb, arguments in [*asked.items(), ("train", following), ("evaluate", [*evaluated, "step=0"])]:
        outcome = command(verb, *arguments)
        assert outcome.code == 2
        assert "run has learnt on another base" in outcome.err
    assert sorted(tmp_path.rglob("*")) == before
    file.write_bytes(own)
    for verb, arguments in asked.items():
        assert command(verb, *arguments).code == 0


def test_held_out_problems_are_answered_once_and_some_again_where_they_are_only_shown(command, monkeypatch):
    asked: list[int] = []
    answers_to = train_workflow.answers_to

    def counted(engine, policy, playing, examples, *rest):
        asked.append(len(examples))
        return answers_to(engine, policy, playing, examples, *rest)

    monkeypatch.setattr(train_workflow, "answers_to", counted)
    few = ["training.num_batches=2", "training.eval_every_n_steps=2", "evaluation.batch_size=3"]
    assert command("train", *RUN, *few, "hydra.run.dir=run").code == 0
    assert asked == [8, 8, 8], "before, halfway and at the end"
    asked.clear()
    assert command("train", "training.resume=run").code == 0
    assert asked == [3, 3]


@pytest.mark.usefixtures("heeded")
def test_an_interrupted_run_rolls_back_to_where_it_would_have(command, resume, tmp_path, monkeypatch):
    """Not to the checkpoint that the interruption has made, of a step at the rate that turned out to be too high."""
    options = ["optimizer.learning_rate=1e-3", "training.max_kl=0.05", "training.on_divergence=rollback"]
    options = [*RUN, *options, "grpo.num_iterations=1", "optimizer.warmup_ratio=0.0"]
    assert command("train", *options, "hydra.run.dir=straight").code == 0

    def signalled(step, stats) -> dict:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return recorded(step, stats)

    recorded = train_workflow.update_record
    with monkeypatch.context() as patch:
        patch.setattr(train_workflow, "update_record", signalled)
        assert command("train", *options, "hydra.run.dir=run").code == 0
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()
    resume()
    ours, theirs = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "straight"))
    assert ours["rollbacks"] == theirs["rollbacks"] != []
    assert records(tmp_path / "run", "metrics.jsonl") == records(tmp_path / "straight", "metrics.jsonl")


def test_a_run_that_is_made_longer_rolls_back_to_its_end(command, straight, tmp_path):
    """Which no interval has made due, and which holds all that was learnt."""
    shutil.copytree(straight, tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / str(STEPS)).is_dir()
    changed = ["training.num_epochs=2", "training.on_divergence=rollback", "training.max_kl=1e-12"]
    outcome = command("train", "training.resume=run", *changed, "training.save_interval_steps=100")
    assert outcome.code == 3
    assert f"back to step {STEPS}" in outcome.out
    assert (tmp_path / "run" / "checkpoints" / str(STEPS)).is_dir()


def test_a_finished_run_stays_as_it_is_and_its_seconds_add_up(straight, command):
    before = (straight / "metrics.jsonl").read_text()
    summary = json.loads((straight / "summary.json").read_text())
    (straight / "summary.json").write_text(json.dumps(summary | {"seconds": 1e6}))
    outcome = command("train", f"training.resume={straight}")
    assert outcome.code == 0, outcome.err
    assert "completed" in outcome.out
    assert (straight / "metrics.jsonl").read_text() == before
    assert json.loads((straight / "summary.json").read_text())["seconds"] > 1e6


def test_a_run_that_another_process_writes_is_not_gone_on_with(straight, command):
    before = (straight / "summary.json").read_text()
    with claimed(straight):
        outcome = command("train", f"training.resume={straight}", "training.num_epochs=2")
    assert outcome.code == 2
    assert "is being written by another process" in outcome.err
    assert (straight / "summary.json").read_text() == before


def test_a_run_goes_on_in_its_own_folder_or_not_at_all(straight, command, tmp_path):
    outcome = command("train", f"training.resume={straight}", "hydra.run.dir=another")
    assert (outcome.code, "a resumed run goes on in its own folder" in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "another").exists()
    assert command("train", f"training.resume={straight}", f"hydra.run.dir={straight}").code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (f"training.num_batches={BATCHES - 1}", f"has trained on {BATCHES} batches"),
        (f"grpo.num_iterations={ITERATIONS + 1}", f"has made {STEPS} updates from {BATCHES} batches"),
        ("optimizer.learning_rate=1e-6", "has come to its end"),
    ],
)
def test_a_run_is_not_made_shorter_counted_anew_or_described_by_other_values(straight, command, change, said):
    before = {name: (straight / name).read_text() for name in ("config.yaml", "summary.json")}
    outcome = command("train", f"training.resume={straight}", change)
    assert outcome.code == 2
    assert said in outcome.err
    assert {name: (straight / name).read_text() for name in before} == before
