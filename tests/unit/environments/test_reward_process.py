"""Reward functions that do not return, in a process that can be ended whatever they do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import pytest

from agent_tunix.config.imports import Origin
from agent_tunix.environments.rewards import Scorer
from agent_tunix.errors import DivergenceError, UserError

FUNCTIONS = """
import itertools, os, re, signal, socket, subprocess, threading, time

here, calls = os.getpid(), itertools.count(1)

def process(prompt, completion, answer):
    return here

def count(prompt, completion, answer):
    return next(calls)

def loop(prompt, completion, answer):
    while True: pass

def sleep(prompt, completion, answer):
    time.sleep(1e6)

def wait_for_a_server(prompt, completion, answer):
    ours, theirs = socket.socketpair()
    ours.recv(1)

def run_away(prompt, completion, answer):
    re.match("(a+)+$", "a" * 99 + "b")

def sum_for_ever(prompt, completion, answer):
    sum(itertools.repeat(1))

def insist(prompt, completion, answer):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(1e6)
        finally:
            continue

def start_another(prompt, completion, answer):
    with subprocess.Popen(["sleep", "1000"]) as other:
        open("started", "w").write(str(other.pid))

def hang_on_b(prompt, completion, answer):
    return sleep(prompt, completion, answer) if completion == "b" else 1.0

def nan_on_b(prompt, completion, answer):
    return float("nan") if completion == "b" else 1.0

def crash(prompt, completion, answer):
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(prompt, completion, answer):
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(7)

def fail(prompt, completion, answer):
    raise KeyError("lost")

def fail_beside(prompt, completion, answer):
    (thread := threading.Thread(target=lambda: 1 / 0)).start()
    thread.join()
    return 1.0

def show(prompt, completion, answer):
    print(completion, flush=True)
    return 1.0
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def called(function: str, completions: list[str], timeout: float = 60.0) -> list[float]:
    scorer = Scorer({"mine": f"slow_rewards.{function}"}, {}, timeout=timeout)
    return scorer(["q"] * len(completions), completions, ["7"] * len(completions))["mine"].tolist()


def line_of(code: str) -> int:
    return 1 + FUNCTIONS.splitlines().index(f"    {code}")


def alive(process: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.parametrize(
    ("function", "at"),
    [
        pytest.param("loop", "while True: pass", marks=pytest.mark.parity),
        ("sleep", "time.sleep(1e6)"),
        pytest.param("wait_for_a_server", "ours.recv(1)", marks=pytest.mark.parity),
        ("run_away", 're.match("(a+)+$", "a" * 99 + "b")'),
        ("sum_for_ever", "sum(itertools.repeat(1))"),
    ],
)
def test_a_call_that_takes_too_long_is_named_with_its_line_and_completion(function, at):
    with pytest.raises(UserError) as stop:
        called(function, ["the completion"], 0.2)
    place = f"(slow_rewards.py, line {line_of(at)})"
    assert str(stop.value).startswith(f"The reward function 'mine' took longer than reward.timeout=0.2 s {place}\n")
    assert "'the completion' (answer '7')" in str(stop.value)
    assert "give it more time by reward.timeout" in str(stop.value)
    assert stop.value.exit_code == 2


def test_a_call_that_does_not_want_to_end_is_ended():
    with pytest.raises(UserError, match="'mine' took longer than"):
        called("insist", ["a"], 0.2)


def test_what_a_call_has_started_ends_with_it(tmp_path):
    with pytest.raises(UserError, match="'mine' took longer than"):
        called("start_another", ["a"], 2.0)
    other, deadline = int((tmp_path / "started").read_text()), time.monotonic() + 10
    while alive(other):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_completion_named_is_the_one_that_took_too_long():
    with pytest.raises(UserError, match="on the completion 'b' "):
        called("hang_on_b", ["a", "b", "c"], 1.0)


def test_a_thread_that_is_not_the_main_one_may_wait():
    faults = []

    def wait():
        with pytest.raises(UserError) as stop:
            called("run_away", ["a"], 0.2)
        faults.append(stop.value)

    (thread := threading.Thread(target=wait)).start()
    thread.join()
    assert "took longer than" in str(faults[0])


def test_a_thread_that_waits_hears_what_another_raises_in_it():
    """So is the loop of a fused sweep stopped."""
    waiting, heard = threading.Event(), []

    def wait():
        try:
            waiting.set()
            called("sleep", ["a"], 1000)
        except KeyboardInterrupt:
            heard.append(True)

    (thread := threading.Thread(target=wait, daemon=True)).start()
    waiting.wait()
    time.sleep(1)  # until the call is made; where it is not yet, this is heard all the same
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(60)
    assert heard == [True]


def test_calls_share_a_process_that_is_not_this_one_also_under_other_weights_and_from_several_threads():
    scorer = Scorer({"process": "slow_rewards.process", "count": "slow_rewards.count"}, {}, timeout=60)
    other, found = scorer.weighing({"count": 2.0}), []
    threads = [threading.Thread(target=lambda: found.append(other(["q"] * 50, ["a"] * 50, ["7"] * 50))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (process,) = {float(p) for values in found for p in values["process"]}
    assert process != os.getpid()
    assert sorted(int(n) for values in found for n in values["count"]) == list(range(1, 151))
    assert (scorer.weights, other.weights) == ({"process": 1.0, "count": 1.0}, {"process": 1.0, "count": 2.0})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process whose run was killed")
@pytest.mark.parametrize("function", [pytest.param("sleep", marks=pytest.mark.parity), "run_away"])
def test_a_function_that_hangs_does_not_outlive_a_run_that_was_killed(function):
    code = f"""
import os, threading
from agent_tunix.environments.rewards import Scorer
scorer = Scorer({{"mine": "slow_rewards.{function}"}}, {{}}, timeout=1000)
threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()
scorer(["q"], ["a"], ["7"])
"""
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60)  # until both have closed it
    assert ran.returncode == -9


def test_the_process_ends_with_its_scorer():
    scorer = Scorer({"process": "slow_rewards.process"}, {}, timeout=60)
    (process,) = scorer(["q"], ["a"], ["7"])["process"]
    assert alive(int(process))
    del scorer
    assert not alive(int(process))


def test_a_fault_is_told_as_without_a_limit_and_does_not_end_the_process():
    """A run goes on after a reward that is no number under training.on_divergence=ignore."""
    scorer = Scorer({"mine": "slow_rewards.nan_on_b"}, {}, timeout=60)
    with pytest.raises(DivergenceError, match="the reward function 'mine' returned nan on the completion 'b'"):
        scorer(["q"] * 3, ["a", "b", "c"], ["7"] * 3)
    assert scorer(["q"] * 2, ["a", "c"], ["7"] * 2)["mine"].tolist() == [1, 1]
    line = line_of('raise KeyError("lost")')
    with pytest.raises(UserError, match=rf"KeyError: 'lost' \(slow_rewards.py, line {line}\)"):
        called("fail", ["a"])


@pytest.mark.parametrize(
    ("function", "how", "timeout"),
    [("crash", "was ended by signal 11", 60), ("leave", "ended with exit code 7", 1.0)],  # another has its connection still
)
def test_a_function_that_ends_its_process_is_named(function, how, timeout):
    with pytest.raises(UserError, match=f"'mine' did not return: its process {how}\non the completion 'a'"):
        called(function, ["a"], timeout)


def test_a_function_that_cannot_be_imported_is_named_as_without_a_limit():
    with pytest.raises(UserError, match=r"reward\.functions\.mine=slow_rewards\.missing: AttributeError"):
        Scorer({"mine": "slow_rewards.missing"}, {}, timeout=60)


def test_what_a_runs_folder_names_is_imported_as_without_a_limit(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "far_rewards.py").write_text(
        "open('imported', 'w')\ndef mine(prompt, completion, answer):\n    return 3.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")
    said: list[tuple[str, bool]] = []

    def notice(text: str) -> None:
        said.append((text, (tmp_path / "imported").exists()))

    named = Origin(run=tmp_path / "runs" / "x")
    scorer = Scorer({"mine": "far_rewards.mine"}, {}, named, notice, timeout=60)
    assert scorer(["q"], ["a"], ["7"])["mine"].tolist() == [3]
    ((text, imported_before),) = said
    assert text.startswith("imports far_rewards.mine, named by ")
    assert not imported_before
    with pytest.raises(UserError, match="is not imported"):
        Scorer({"mine": "slow_rewards.process"}, {}, Origin(run=tmp_path / "x"), timeout=60)


def test_a_module_that_ends_its_process_is_named(tmp_path):
    (tmp_path / "leaving_rewards.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(UserError, match=r"while leaving_rewards\.mine were loaded, their process ended with exit code 3"):
        Scorer({"mine": "leaving_rewards.mine"}, {}, timeout=60)


def test_a_thread_that_fails_beside_a_function_is_told_of_in_a_line(capfd):
    assert called("fail_beside", ["a"]) == [1]
    line = line_of("(thread := threading.Thread(target=lambda: 1 / 0)).start()")
    said = (
        f"warning: a thread of a reward function raised ZeroDivisionError: division by zero (slow_rewards.py, line {line})\n"
    )
    assert capfd.readouterr().err == said


def test_what_a_function_prints_is_not_obeyed_by_the_terminal(capfd):
    called("show", ["\x1b[2Ja"])
    assert capfd.readouterr().out == "\\x1b[2Ja\n"
