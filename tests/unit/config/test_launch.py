"""Whether a process is one of several: by its options, by its launcher, and never by accident."""

from __future__ import annotations

import pytest

from agent_tunix.config.launch import Launch, launched
from agent_tunix.errors import UserError

BY_HAND = ["--coordinator", "host0:1234", "--processes", "2", "--process", "1"]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}


def test_options_are_taken_out_of_what_hydra_reads():
    others, launch = launched(["model=gemma3_tiny", *BY_HAND, "optimizer.betas=[0.9,0.99]", "--multirun"], {})
    assert others == ["model=gemma3_tiny", "optimizer.betas=[0.9,0.99]", "--multirun"]
    assert launch == Launch("--coordinator", "host0:1234", 2, 1)


def test_options_may_be_written_with_an_equals_sign():
    _, launch = launched(["--coordinator=[::1]:80", "--processes=3", "--process=0"], {})
    assert launch == Launch("--coordinator", "[::1]:80", 3, 0)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, None),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # the batch script, not a step
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "a TPU pod"),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}, "Kubernetes"),
    ],
)
def test_launchers(environment, launcher):
    assert launched(["a=b"], environment) == (["a=b"], Launch(launcher) if launcher else None)


def test_one_process_is_alone_whatever_started_it():
    assert launched(["--processes", "1"], SLURM) == ([], None)


def test_options_go_before_the_launcher():
    assert launched(BY_HAND, SLURM)[1] == Launch("--coordinator", "host0:1234", 2, 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (BY_HAND[:4], "go together"),
        (["--process", "0"], "go together"),
        ([*BY_HAND[:5], "2"], "from 0 to 1"),
        ([*BY_HAND[:3], "1", *BY_HAND[4:]], "from 0 to 0"),
        (["--coordinator", "host0", *BY_HAND[2:]], "host:port"),
        (["--coordinator", "host0:99999", *BY_HAND[2:]], "host:port"),
        ([*BY_HAND[:3], "two", *BY_HAND[4:]], "invalid int value: 'two'"),
    ],
)
def test_what_is_refused(arguments, said):
    with pytest.raises(UserError, match=said):
        launched(arguments, {})
