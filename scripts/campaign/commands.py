"""One command of agent-tunix as a user gives it, with signals at chosen moments and bounds of time and memory.

Most commands run in a fork of this process, which has imported everything already, and call what a console calls. `real`
ones are processes of their own, from Python's start on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from campaign.hostile import ESCAPES

REPOSITORY = Path(__file__).parents[2]
WORK, SECONDS = 60.0, 180.0  # of a processor, and in all, that a command may take; the machine may have more to do
MEGABYTES, CHARACTERS = 2000.0, 100_000  # that it may take, and say
PATIENCE = 5.0  # seconds in which processes that it has started may end after it
PAGE, TICKS = resource.getpagesize(), os.sysconf("SC_CLK_TCK")
TO_A_TERMINAL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # control characters but the tab and the newline
FOR_DEVELOPERS = ("Traceback (most recent call last)", "Exception ignored", "Fatal Python error", "panicked at")
MARK = "first-line"  # a file that a process of its own makes when its first line is reached
ENTRY = f"""
import runpy, sys
open({MARK!r}, "w").close()
verb, script = sys.argv[1], {{"train": "run_training.py", "evaluate": "evaluate.py"}}.get(sys.argv[1])
if script:
    sys.argv[:2] = [{str(REPOSITORY)!r} + "/" + script]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    from agent_tunix.cli import main
    main()
"""


@dataclasses.dataclass(frozen=True)
class Strike:
    """A signal, and the moment at which it is sent: `due` is asked with the seconds since the first line."""

    number: signal.Signals
    due: Callable[[float], bool]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a command. `struck` counts the signals that it got before it ended, `left` the processes it left."""

    code: int
    out: str
    err: str
    seconds: float
    megabytes: float
    struck: int = 0
    exceeded: str = ""
    left: int = 0
    on_terminal: bool = False

    def said(self) -> str:
        return self.out + self.err

    def faults(self) -> Iterator[str]:
        """What no command may do, whatever it was given."""
        if self.exceeded:
            yield f"it was ended as it took more than {self.exceeded}"
        elif self.code < 0 and not self.struck:
            yield f"it died of {signal.Signals(-self.code).name}"
        if self.megabytes > MEGABYTES and not self.exceeded:
            yield f"it took {self.megabytes:.0f} MB"
        if self.left:
            yield f"it left {self.left} processes behind"
        yield from (f"it said '{words}'" for words in FOR_DEVELOPERS if words in self.said())
        yield from (f"it sent {sent!r}" for sent in self._controls())
        if len(self.said()) > CHARACTERS:
            yield f"it said {len(self.said())} characters"

    def _controls(self) -> list[str]:
        """What a terminal would obey: of a program that draws on one, only what came from its input."""
        if self.on_terminal:
            return [escape for escape in ESCAPES if escape in self.said()]
        return TO_A_TERMINAL.findall(self.said())[:1]

    def refusal_faults(self) -> Iterator[str]:
        """What is wrong where the input was to be refused."""
        if self.code != 2 and not self.exceeded:
            yield f"it ended with exit code {self.code}, not 2"
        if self.code == 2 and not (self.out if self.on_terminal else self.err).strip():
            yield "it said nothing of what is wrong"


def run(
    arguments: Sequence[str],
    folder: Path,
    strikes: Sequence[Strike] = (),
    real: bool = False,
    work: float = WORK,
    terminal: bool = False,
) -> Outcome:
    """Runs `agent-tunix <arguments>` in a folder, and sends the signals in their order, each when it is due."""
    mark, streams, began = folder / MARK, _Streams(terminal), time.monotonic()
    given = streams.given
    child = _started(arguments, folder, given) if real else _forked(lambda: _become(arguments, folder, given))
    left, first, exceeded, peak = list(strikes), None, "", 0.0
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        streams.drain()
        if ended:
            break
        now = time.monotonic()
        if first is None and mark.exists():
            first = now
        if left and first is not None and left[0].due(now - first):
            os.kill(child, left.pop(0).number)
        worked, megabytes = _taken(child)
        peak = max(peak, megabytes)
        limits = {f"{work:.0f} s of work": worked > work, f"{SECONDS:.0f} s": now - began > SECONDS * work / WORK}
        limits[f"{MEGABYTES:.0f} MB"] = peak > MEGABYTES
        if any(limits.values()):
            exceeded = next(limit for limit, is_over in limits.items() if is_over)
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001 if left else 0.005)
    patience = time.monotonic() + PATIENCE
    while (alive := _alive(child)) and time.monotonic() < patience:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    mark.unlink(missing_ok=True)
    out, err = streams.texts()
    return Outcome(
        code=os.waitstatus_to_exitcode(status),
        out=out,
        err=err,
        seconds=time.monotonic() - began,
        megabytes=max(peak, 0.0 if real else usage.ru_maxrss / 1e3),
        struck=len(strikes) - len(left),
        exceeded=exceeded,
        left=alive if not exceeded else 0,
        on_terminal=terminal,
    )


class _Streams:
    """What a command reads from and writes to: files, or a terminal of its own."""

    def __init__(self, terminal: bool):
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115  `texts` closes them
        self._terminal = os.openpty() if terminal else ()
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self.given = (self._nothing, *(file.fileno() for file in self._files))
        if terminal:
            os.set_blocking(self._terminal[0], False)
            self.given = (self._terminal[1],) * 3

    def drain(self) -> None:
        """Takes what the terminal shows by now: it holds no more than a few lines."""
        with contextlib.suppress(BlockingIOError):
            while self._terminal:
                self._files[0].write(os.read(self._terminal[0], 65536))

    def texts(self) -> list[str]:
        """What was written to standard output, or to the terminal, and to standard error."""
        for number in (self._nothing, *self._terminal):
            os.close(number)
        found = []
        for file in self._files:
            with file:
                file.seek(0)
                found.append(file.read().decode(errors="backslashreplace"))
        return [text.replace("\r\n", "\n") for text in found] if self._terminal else found


def _alive(group: int) -> int:
    """How many processes that a command has started are still there; of those that ended some may not be waited for."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return 0
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, of = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            found += int(of) == group and state != "Z"
    return found


def _taken(process: int) -> tuple[float, float]:
    """Seconds of a processor and megabytes that a process has taken; nothing where it has just ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE / 1e6
    except (OSError, IndexError):
        return 0.0, 0.0


def _started(arguments: Sequence[str], folder: Path, streams: tuple[int, int, int]) -> int:
    command = [sys.executable, "-c", ENTRY, *arguments]
    given = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
    return subprocess.Popen(command, cwd=folder, start_new_session=True, preexec_fn=_as_from_a_terminal, **given).pid


def _forked(work: Callable[[], Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            work()
        finally:
            os._exit(1)
    return child


def _become(arguments: Sequence[str], folder: Path, streams: tuple[int, int, int]) -> None:
    """Is the command from here on, as if a console had started it."""
    from agent_tunix import cli, signals

    _as_from_a_terminal()
    signals.heed(signals.leave)  # as the first lines of `cli` have done where it was imported
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin, sys.stdout, sys.stderr = opened = [os.fdopen(n, "rww"[n], 1, closefd=False) for n in range(3)]
    sys.argv = ["agent-tunix", *arguments]
    Path(MARK).touch()
    code = 1
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    for stream in opened:
        with contextlib.suppress(OSError, ValueError):  # a reward function may have closed it
            stream.flush()
    os._exit(code)


def _as_from_a_terminal() -> None:
    """No signal is ignored, as it would be where this campaign is to outlive its own terminal; no memory is dumped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def apart(work: Callable[[], Any]) -> Any:
    """What a function returns in a fork: for what starts threads, after which this process could fork no more."""
    reader, writer = os.pipe()

    def send() -> None:
        with open(writer, "wb") as pipe:
            pickle.dump(work(), pipe)
        os._exit(0)

    child = _forked(send)
    os.close(writer)
    with open(reader, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(found)
