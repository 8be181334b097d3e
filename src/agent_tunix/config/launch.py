"""Whether this process is one of several that train together, by its command line or by what its launcher has set.

    python run_training.py ... --coordinator HOST:PORT --processes N --process I

JAX itself finds the others where Slurm, Kubernetes, Open MPI or a TPU pod has started them. All that is decided here is
whether it is to look for them at all: a run of one process starts nothing and waits for no one.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from agent_tunix.errors import UserError

EXAMPLE = "--coordinator host0:1234 --processes 2 --process 0, and --process 1 on the other"


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a process finds the others: by the coordinator or, where there is none, by what its launcher has set."""

    launcher: str
    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def launched(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], Launch | None]:
    """The arguments that are not about processes, and the launch; None for a process that works alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--coordinator", "--processes", "--process"):
        parser.add_argument(option, type=str if option == "--coordinator" else int)
    try:
        given, others = parser.parse_known_args(arguments)
    except argparse.ArgumentError as mistake:
        raise UserError(f"{mistake}; give for example {EXAMPLE}.") from mistake
    if given.processes == 1 and given.process in (None, 0):
        return others, None
    values = (given.coordinator, given.processes, given.process)
    if values == (None, None, None):
        launcher = _launcher(environment)
        return others, Launch(launcher) if launcher else None
    _check(*values)
    return others, Launch("--coordinator", *values)


def _check(coordinator: str | None, processes: int | None, process: int | None) -> None:
    if coordinator is None or processes is None or process is None:
        raise UserError(f"--coordinator, --processes and --process go together: {EXAMPLE}.")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise UserError(f"--coordinator {coordinator}: must be host:port of process 0, as in host0:1234.")
    if not 0 <= process < processes:
        raise UserError(f"--process {process}: must be from 0 to {processes - 1}, as there are --processes {processes}.")


def _launcher(environment: Mapping[str, str]) -> str | None:
    """Who has started this process as one of several. A step of one task, or a pod that is not indexed, works alone."""

    def count(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdecimal() else 1

    if count("SLURM_STEP_NUM_TASKS") > 1:
        return "Slurm"
    if count("OMPI_COMM_WORLD_SIZE") > 1:
        return "Open MPI"
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return "a TPU pod"
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        return "Kubernetes"
    return None
