"""A command that is asked to stop before it has anything to save: one line, one exit code, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent_tunix import signals

REPOSITORY = Path(__file__).parents[2]
# Python looks for modules in an order of its own, so the moment at which one is looked for is the same on every machine.
AT_IMPORT = """
import signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.{name})
sys.meta_path.insert(0, Stop())
"""
AT_THE_MODEL = """
import signal
from agent_tunix.models.checkpoints import hub
hub.find_checkpoint = lambda source: signal.raise_signal(signal.{name})
"""
TRAIN = ["run_training.py", "model=gemma3_tiny"]
DOCTOR = ["agent-tunix", "doctor", "nowhere"]
DEFAULTS = [(signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)]


@pytest.fixture(autouse=True)
def heeded():
    """Tests may have been started in the background or to outlive their terminal, where these signals are ignored."""
    before = [signal.signal(number, handler) for number, handler in DEFAULTS]
    yield
    for (number, _), handler in zip(DEFAULTS, before, strict=True):
        signal.signal(number, handler)


def started(prelude: str, command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, after some lines of Python."""
    if (script := REPOSITORY / command[0]).exists():
        begin = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    else:
        begin = "from agent_tunix.cli import main; main()"
    usual = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background has none
    code = "\n".join([usual, prelude, f"import sys\nsys.argv = {command}", begin])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120)


@pytest.mark.parametrize(
    ("moment", "name", "command"),
    [
        (AT_IMPORT.format(module="agent_tunix.cli", name="SIGTERM"), "SIGTERM", TRAIN),
        (AT_IMPORT.format(module="pathlib", name="SIGTERM"), "SIGTERM", DOCTOR),
        (AT_IMPORT.format(module="hydra", name="SIGHUP"), "SIGHUP", ["evaluate.py", "run=x"]),
        (AT_IMPORT.format(module="pydantic", name="SIGINT"), "SIGINT", ["agent-tunix", "export", "run=x"]),
        (AT_IMPORT.format(module="jaxlib._jax", name="SIGINT"), "SIGINT", TRAIN),
        (AT_IMPORT.format(module="jaxlib._jax", name="SIGTERM"), "SIGTERM", [*TRAIN, "--multirun", "seed=1,2"]),
        (AT_IMPORT.format(module="jaxlib._jax", name="SIGTERM"), "SIGTERM", DOCTOR),
        (AT_THE_MODEL.format(name="SIGTERM"), "SIGTERM", TRAIN),
    ],
    ids=lambda given: given if isinstance(given, str) and "\n" not in given else "",
)
def test_a_command_that_has_nothing_to_save_ends_at_once_with_one_line(moment, name, command, tmp_path):
    ended = started(moment, command, tmp_path)
    assert ended.returncode == 130
    assert ended.stderr == f"Stopped by {name}: there was nothing to save.\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("before", [True, False], ids=["at last", "earlier"])
def test_a_command_that_has_ended_keeps_its_exit_code(before, tmp_path):
    """Python calls first what was registered last; ours is registered when the command is loaded."""
    at_exit = "import atexit, signal\natexit.register(signal.raise_signal, signal.SIGTERM)"
    ended = started(at_exit if before else f"import agent_tunix.cli\n{at_exit}", DOCTOR, tmp_path)
    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    assert "Stopped by" not in ended.stderr


def test_a_signal_that_the_process_is_to_outlive_is_not_heeded(tmp_path):
    nohup = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    assert started(nohup + AT_IMPORT.format(module="hydra", name="SIGHUP"), DOCTOR, tmp_path).returncode == 2


def test_earlier_handlers_are_given_back():
    before = [signal.getsignal(number) for number in signals.STOPS]
    came = []
    with signals.heeded_by(lambda number, _: came.append(number)):
        for number in signals.STOPS:
            signal.raise_signal(number)
    assert came == [*signals.STOPS]
    assert [signal.getsignal(number) for number in signals.STOPS] == before


def test_a_thread_has_no_signals_to_heed():
    found = []
    (thread := threading.Thread(target=lambda: found.append(signals.heed(signals.leave)))).start()
    thread.join()
    assert found == [{}]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a mutex does not begin as zeros")
def test_processes_that_wait_for_each_other_in_native_code_hear_signals(tmp_path):
    """Where the main thread does not come back to Python, no handler of Python is called."""
    code = """
import ctypes, os, signal, threading
from agent_tunix import signals
from agent_tunix.engine import distributed
signals.heed(signals.leave)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
with distributed._stopped_by_a_thread():
    lock(mutex)  # for ever, as it is held; a signal does not end it
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (130, "Stopped by SIGTERM: there was nothing to save.\n")
