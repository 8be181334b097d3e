"""Two processes are one run: the same numbers, the same end, and after the death of one a run that can be gone on with."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from agent_tunix.engine.heartbeat import LOST
from agent_tunix.models.sharding import mesh_of_sizes
from agent_tunix.training import loading
from agent_tunix.training.run_folder import read_records

HERE = Path(__file__).parent

TRAIN = "import os, sys; sys.argv[0] = 'run_training.py'; sys.argv += [{}]\nfrom agent_tunix.cli import train; train()"
REWARD_PATH = "reward.functions.odd=two_processes_reward.odd"
RUN = [
    "model=gemma3_tiny",
    "model.lora_module_path=q_proj",
    "training.batch_size=2",
    "training.micro_batch_size=2",
    "training.num_batches=3",
    "training.save_interval_steps=2",
    "training.eval_every_n_steps=null",
    "grpo.num_generations=4",
    "grpo.beta=0",
    "generation.max_generation_steps=4",
    "generation.top_k=null",
    "generation.top_p=1.0",
    "evaluation.num_examples=2",
    "evaluation.sampled=false",
    "optimizer.learning_rate=1e-4",
    f"+{REWARD_PATH}",
    "hydra.run.dir=run",
]
# A process scores four completions of a step. The one that dies does so in the third, when the checkpoint of the second is
# on disk, which is written while the run goes on.
REWARD = """
import itertools, os, signal, time

calls = itertools.count(1)

def odd(prompt, completion, answer):
    if os.environ.get("DIES") and next(calls) > 8:
        while not os.path.exists("run/checkpoints/2"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return float(sum(letter in "13579" for letter in completion))
"""


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def in_two(folder: Path, command: list[str], of_each: list[dict[str, str]], devices: int = 1) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of a command that is run as two processes, each with an environment of its own."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    common = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, *command], cwd=folder, env=common | own, **pipes) for own in of_each]
    with ThreadPoolExecutor(2) as reading:
        outputs = list(reading.map(lambda process: process.communicate(timeout=300), both))
    return [(process.returncode, *output) for process, output in zip(both, outputs, strict=True)]


def train_in_two(folder: Path, *arguments: str, **of_the_second: str) -> list[tuple[int, str, str]]:
    """By the options of the command line."""
    code = TRAIN.format(f"'--coordinator=localhost:{free_port()}', '--processes=2', '--process=' + os.environ['NUMBER']")
    return in_two(folder, ["-c", code, *arguments], [{"NUMBER": "0"}, {"NUMBER": "1"} | of_the_second])


def train_under_slurm(folder: Path, *arguments: str) -> list[tuple[int, str, str]]:
    """By what Slurm would have set."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"JAX_COORDINATOR_PORT": str(free_port())}
    tasks = [step | {"SLURM_PROCID": number, "SLURM_LOCALID": number} for number in ("0", "1")]
    return in_two(folder, ["-c", TRAIN.format(""), *arguments], tasks)


def script_in_two(folder: Path, what: str) -> list[tuple[int, str, str]]:
    command = [str(HERE / "in_two_processes.py"), what, str(free_port())]
    return in_two(folder, command, [{"NUMBER": "0"}, {"NUMBER": "1"}], devices=2)


def test_rows_rewards_decisions_and_checkpoints_are_shared_and_what_no_one_foresaw_ends_all(tmp_path):
    tests = ["agreement", "rows", "scoring", "checkpoint", "weights", "disk"]
    (first, out, err), (second, other, silent) = script_in_two(tmp_path, ",".join([*tests, "fault"]))
    assert [line for line in out.splitlines() if line in tests] == tests, err
    assert [line for line in other.splitlines() if line in tests] == tests, silent
    assert first == second == 1
    assert "On process 1 of 2: ValueError: unforeseen" in err
    assert "fault" not in out + other
    assert "unforeseen" not in silent, "process 0 speaks for all"


def test_a_mistake_is_said_once_to_what_slurm_has_started(tmp_path):
    (first, _, err), (second, out, silent) = train_under_slurm(tmp_path, "model=gemma3_tiny", "training.micro_batch_size=0")
    assert first == second == 2
    assert err.count("training.micro_batch_size=0") == 1
    assert "micro_batch_size" not in silent + out
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The working directory of a run of two processes, of which one has died."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "two_processes_reward.py").write_text(REWARD)
    (left, _, said), (dead, _, _) = train_in_two(folder, *RUN, "model.mesh_shape=[[2,1],[fsdp,tp]]", DIES="yes")
    assert (left, dead) == (LOST, -9)
    assert "Process 1 of 2 was lost" in said
    assert "training.resume=run" in said
    assert [record["step"] for record in read_records(folder / "run" / "metrics.jsonl")] == [1, 2]
    return folder


@pytest.mark.parametrize("again", ["one", pytest.param("two", marks=pytest.mark.parity)])
def test_one_dies_and_the_run_that_goes_on_is_that_of_one_process(killed, tmp_path, command, again):
    """By one process, or by two as before, which takes long. What lies beside a run is imported only where given again."""
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    if again == "two":
        (first, out, err), (second, other, _) = train_in_two(tmp_path, "training.resume=run", REWARD_PATH)
        assert (first, second) == (0, 0), err
        assert "completed: 3 updates" in out
        assert "completed" not in other
    else:
        resumed = command("train", "training.resume=run", REWARD_PATH, "model.mesh_shape=[[1,1],[fsdp,tp]]")
        assert resumed.code == 0, resumed.err
    (tmp_path / "run").rename(tmp_path / "broken")

    alone = command("train", *RUN)
    assert alone.code == 0, alone.err
    assert_same_run(tmp_path / "broken", tmp_path / "run")


def numbers(run: Path, name: str) -> list[dict]:
    """What a run wrote, less what depends on the machine."""
    measured = {"tokens_per_second", "memory/peak_gb"}
    return [
        {key: value for key, value in record.items() if key not in measured and not key.startswith("time/")}
        for record in read_records(run / name)
    ]


def learnt(run: Path) -> list[np.ndarray]:
    """What the last checkpoint holds, read by this process alone."""
    cfg = loading.saved_config(str(run), "run")
    trainable, step = loading.load_trained(str(run), cfg, loading.load_model(cfg, mesh_of_sizes()))
    assert step == 3
    return jax.tree.leaves(trainable)


def assert_same_run(broken: Path, whole: Path) -> None:
    """Texts and rewards to the bit, what the updates compute to rounding."""
    assert numbers(broken, "evals.jsonl") == numbers(whole, "evals.jsonl")
    ours, theirs = numbers(broken, "metrics.jsonl"), numbers(whole, "metrics.jsonl")
    assert len({record["reward/odd"] for record in theirs}) > 1, "there is something to learn from"
    for a, b in zip(ours, theirs, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-6)
    for a, b in zip(numbers(broken, "samples.jsonl"), numbers(whole, "samples.jsonl"), strict=True):
        assert a["completion"] == b["completion"]
        assert a["rewards"] == b["rewards"]
    for a, b in zip(learnt(broken), learnt(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-6)  # an update changes a weight by up to 1e-4
    ends = [json.loads((run / "summary.json").read_text()) for run in (broken, whole)]
    assert ends[0]["status"] == ends[1]["status"] == "completed"
    assert sorted(path.name for path in broken.iterdir()) == sorted(path.name for path in whole.iterdir())
