"""Reward functions in a process of their own, which is ended when one of them takes too long.

Python cannot end a thread, and while C code such as a regular expression holds the interpreter, neither another thread nor
the handler of a signal gets a turn. A process can be ended whatever it does and whichever thread waits for it, and the run
goes on to its orderly end. What follows from that:

- Functions share nothing with the run but what they are called with: no variables, no debugger, no standard input.
- A limit is in seconds on the clock, so a busy machine takes from a function's time.
- The import of the functions' modules has no limit.
- Processes that a function has started end with it, but for those that have begun a session of their own.
- Where the run is killed while a function hangs, Linux ends the function's process; other systems leave it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from agent_tunix.config.imports import Origin
from agent_tunix.console import show_controls
from agent_tunix.environments.reward_call import CALLERS, TURN, Problem
from agent_tunix.errors import UserError, named

GRACE = 1.0  # seconds that a process has to say where it is and to end, before it is killed
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)  # as faulthandler writes it, the innermost first


class CallStopped(Exception):  # noqa: N818  # the user is told more than it knows
    """A call did not return; the text says what it did instead, as `took longer than ...`. `problem` is the call's first."""

    def __init__(self, said: str, problem: Problem) -> None:
        super().__init__(said)
        self.problem = problem


class RewardProcess:
    """A process that loads functions by their import paths and calls them. It ends with this object.

    Threads that share it take turns.
    """

    def __init__(self, paths: Mapping[str, str], origin: Origin, notice: Callable[[str], None], timeout: float) -> None:
        self._timeout, self._turn, self._used_up = timeout, threading.Lock(), False
        self._answers, theirs = Pipe()
        self._places, places = os.pipe()
        watched, self._alive = os.pipe()
        given = theirs.fileno(), places, watched
        program = f"import sys; sys.path[:] = {[*map(str, sys.path)]}; from {__name__} import serve; serve{given}"
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", program],
            stdin=subprocess.DEVNULL,
            pass_fds=given,
            start_new_session=True,  # a Ctrl-C is the run's to answer
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},  # the run has most of a GPU's memory already
        )
        theirs.close()
        os.close(places)
        os.close(watched)
        weakref.finalize(self, _close, self._process, self._answers, self._places, self._alive)
        try:
            self._answers.send((dict(paths), origin))
            while isinstance(fault := self._answers.recv(), str):
                notice(fault)
                self._answers.send("said")
        except (EOFError, OSError):
            raise UserError(
                f"reward.functions: while {', '.join(paths.values())} were loaded, their process {_end(self._process)}."
            ) from None
        if fault is not None:
            raise fault

    def values(self, name: str, problems: Sequence[Problem]) -> list[float]:
        """What a function returns for each completion; raises its fault, or CallStopped."""
        with self._turn:
            values: list[float] = []
            while len(values) < len(problems):
                problem = problems[len(values)]
                if self._used_up:
                    raise CallStopped("was not called, as another call has ended the process of the functions", problem)
                answer = self._answer(problem, None if values else (name, list(problems)))
                if isinstance(answer, UserError):
                    raise answer  # after which the process calls no more
                values += answer
        return values

    def _answer(self, problem: Problem, asked: tuple[str, list[Problem]] | None) -> list[float] | UserError:
        """The values of the next call, of which this is the first problem; the process is `asked` for all that follow."""
        self._used_up = True  # unless there is an answer
        try:
            if asked:
                self._answers.send(asked)
            if self._comes():
                answer = self._answers.recv()
                self._used_up = False
                return answer
        except (EOFError, OSError):
            raise CallStopped(f"did not return: its process {_end(self._process)}", problem) from None
        if self._process.poll() is not None:  # its end is not seen where it has left a process that has the connection too
            raise CallStopped(f"did not return: its process {_end(self._process)}", problem)
        raise CallStopped(f"took longer than reward.timeout={self._timeout:g} s{self._stop()}", problem)

    def _comes(self) -> bool:
        """Whether there is an answer in time. Between short turns of waiting a thread hears what others raise in it."""
        deadline = time.monotonic() + self._timeout
        while (left := deadline - time.monotonic()) > 0:
            if self._answers.poll(min(left, TURN)):
                return True
        return False

    def _stop(self) -> str:
        """Ends the process; returns the line at which the function was."""
        self._process.terminate()
        told, deadline = b"", time.monotonic() + GRACE
        while select.select([self._places], [], [], max(0, deadline - time.monotonic()))[0]:
            if not (part := os.read(self._places, 65536)):
                break
            told += part
        _end(self._process)
        return _place(told.decode(errors="replace"))


def serve(connection: int, places: int, watched: int) -> None:
    """The work of the process: loads functions, and calls them as long as it is asked to."""
    from agent_tunix.environments.rewards import key_of, load_call  # here, as that module uses this one

    show_controls()  # a function may print what it is called with
    threading.excepthook = _tell_of_thread
    for descriptor in (connection, places, watched):
        os.set_inheritable(descriptor, False)
    faulthandler.register(signal.SIGTERM, places, all_threads=False, chain=True)  # it says where it is and dies, in C alone
    fcntl.fcntl(watched, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watched, fcntl.F_SETFL, os.O_ASYNC)  # Linux ends this process by SIGIO when the run is there no more
    run = Connection(connection)

    def notice(text: str) -> None:
        run.send(text)
        run.recv()  # it has been said

    paths, origin = run.recv()
    try:
        calls = {name: load_call(key_of(name), path, origin, notice) for name, path in paths.items()}
    except UserError as fault:
        run.send(fault)
        return
    run.send(None)
    with contextlib.suppress(EOFError, OSError):  # the run has ended
        while True:
            name, problems = run.recv()
            for part in calls[name].parts(problems):
                answer: list[float] | UserError
                try:
                    answer = calls[name].values(part)
                except UserError as fault:
                    answer = fault
                run.send(answer)
                if isinstance(answer, UserError):
                    break


def _tell_of_thread(ended: threading.ExceptHookArgs) -> None:
    """A thread that a function has started fails beside it: the function's own value counts."""
    frames = traceback.extract_tb(ended.exc_traceback)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    fault = ended.exc_type.__name__ if ended.exc_value is None else named(ended.exc_value)
    print(f"warning: a thread of a reward function raised {fault}{place}", file=sys.stderr, flush=True)


def _place(told: str) -> str:
    """The line of the function's own file, from the frames of its process."""
    frames = FRAME.findall(told)
    callers = [index for index, (_, _, name) in enumerate(frames) if name in CALLERS]
    inner = frames[: callers[-1]] if callers else []
    own = [(file, line) for file, line, _ in inner if file == inner[-1][0]]
    return f" ({Path(own[0][0]).name}, line {own[0][1]})" if own else ""


def _end(process: subprocess.Popen) -> str:
    """Ends what is left of a process and of those that it has started; returns how it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # where it waits for a disk, the system cannot end it either
        process.wait(GRACE)
    code = process.returncode
    return f"was ended by signal {-code}" if code and code < 0 else f"ended with exit code {code}"


def _close(process: subprocess.Popen, answers: Connection, *pipes: int) -> None:
    answers.close()  # which ends a process that waits for a call
    _end(process)
    for pipe in pipes:
        os.close(pipe)
