from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from agent_tunix.errors import interrupts_put_off, mistake_of


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EFBIG, "Free some space"),
        (errno.EACCES, "permissions; hydra.run.dir=<folder>"),
        (errno.EEXIST, "Check the path"),
        (errno.EISDIR, "Check the path"),
        (errno.ENAMETOOLONG, "Check the path"),
    ],
)
def test_a_fault_of_files_says_where_and_what_to_do(number, remedy):
    message = str(mistake_of(OSError(number, os.strerror(number), "runs/metrics.jsonl")))
    assert message.startswith(f"runs/metrics.jsonl: {os.strerror(number)}. ")
    assert remedy in message


@pytest.mark.parametrize(
    "fault", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ConnectionError("refused"), ValueError("2 != 3")]
)
def test_any_other_fault_is_no_mistake_of_a_user(fault):
    assert mistake_of(fault) is None


def test_what_memory_cannot_hold_says_how_to_need_less():
    """As JAX says it of a device, and Python of the host."""
    with pytest.raises(jax.errors.JaxRuntimeError) as full:
        jax.jit(lambda: jnp.zeros((2**40, 2**10)).sum() + jnp.ones((2**40, 2**10))).lower().compile()()
    for fault in (full.value, MemoryError()):
        message = str(mistake_of(fault))
        assert message.startswith("There is not enough memory: ")
        assert "agent-tunix plan" in message
        assert "\nTraceback" not in message


@pytest.mark.parametrize(("platforms", "why"), [("cuda", "cuda"), ("gpus", "'gpus' is not in the list")])
def test_a_device_that_is_not_there_says_which_and_what_to_do(platforms, why):
    """In a process of its own, as JAX starts its devices only once; a GPU is hidden where there is one."""
    program = "import jax; from agent_tunix import cli\nwith cli.answering(): jax.devices()"
    hidden = {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **hidden})
    assert ran.returncode == 2
    assert "No device can be started: " in ran.stderr
    assert why in ran.stderr
    assert "JAX_PLATFORMS=cpu" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.fixture
def interruptible():
    """A process in the background may have been started without a handler of SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_ctrl_c_comes_when_what_it_would_break_is_over(interruptible):
    done: list[str] = []

    def load() -> None:
        with interrupts_put_off():
            signal.raise_signal(signal.SIGINT)
            done.append("loaded")

    with pytest.raises(KeyboardInterrupt):
        load()
    assert done == ["loaded"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_has_no_ctrl_c_to_put_off():
    done = []

    def load() -> None:
        with interrupts_put_off():
            done.append("loaded")

    (thread := threading.Thread(target=load)).start()
    thread.join()
    assert done == ["loaded"]


@pytest.mark.parametrize("asked", [[], ["--multirun", "seed=1,2"]], ids=["run", "sweep"])
def test_a_ctrl_c_while_jax_is_loaded_is_answered(asked, tmp_path):
    """It comes in the middle of the import of an extension, which would end in a traceback or a crash."""
    program = f"""
import signal, sys
class AtLast:
    def find_spec(self, name, path=None, target=None):
        if name == "jaxlib._jax":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
            print("loading goes on", flush=True)
signal.signal(signal.SIGINT, signal.default_int_handler)
from agent_tunix import cli
sys.meta_path.insert(0, AtLast())
sys.argv[1:] = ["model=gemma3_tiny", *{asked}]
cli.train()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 130
    assert "loading goes on" in ran.stdout
    assert "Traceback" not in ran.stderr
    assert not any(tmp_path.iterdir())
