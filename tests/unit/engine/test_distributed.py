"""Of one process all of it is void; what several do is tested by tests/integration/test_two_processes.py."""

from __future__ import annotations

import signal
import socket

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.config.launch import Launch
from agent_tunix.engine import distributed
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.models.sharding import lay_rows, mesh_of_sizes


def test_one_process_is_the_first_and_all_there_are():
    assert distributed.first()
    assert distributed.any_of(True)
    assert not distributed.any_of(False)
    assert distributed.everyones("it") == ["it"]


def test_work_of_one_process_is_done_and_its_mistake_raised():
    assert distributed.agreed(lambda: 3) == 3

    def diverge() -> None:
        raise DivergenceError("no number")

    with pytest.raises(DivergenceError, match="no number"):
        distributed.agreed(diverge)


def test_one_process_has_all_rows():
    values = np.arange(12).reshape(6, 2)
    array = lay_rows(values.__getitem__, values.shape, mesh_of_sizes())
    rows = distributed.own_rows(array)
    assert list(rows) == list(range(6))
    np.testing.assert_array_equal(np.stack(list(rows.values())), values)
    np.testing.assert_array_equal(distributed.whole(array), values)
    np.testing.assert_array_equal(distributed.gather_rows([0, 1], {"x": values[:2]}, 2)["x"], values[:2])


def test_a_folder_is_made(tmp_path):
    distributed.make_shared(tmp_path / "deep" / "run")
    assert (tmp_path / "deep" / "run").is_dir()


def test_nothing_is_started_for_one_process():
    distributed.whole(jnp.zeros(2))
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize("launcher", ["--coordinator", "Slurm"])
def test_a_port_that_another_program_has_is_the_users_to_change(monkeypatch, launcher):
    """JAX would end process 0 by signal 11."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(distributed, "_give_up", lambda launch: None)  # it would end the tests
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        step = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}
        for name, value in step.items():
            monkeypatch.setenv(f"SLURM_{name}", value)
        monkeypatch.setenv("JAX_COORDINATOR_PORT", str(port))
        launch = Launch("Slurm") if launcher == "Slurm" else Launch(launcher, f"localhost:{port}", 2, 0)
        with pytest.raises(UserError, match=r"in use.*\n.*its port must be free"), distributed.joined(launch):
            pass
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)) == (before, -1)


def test_a_variable_that_a_launcher_has_left_out_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "_give_up", lambda launch: None)
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", "4096.0;tcp://127.0.0.1:1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"Open MPI names.*OMPI_COMM_WORLD_RANK"), distributed.joined(Launch("Open MPI")):
        pass
