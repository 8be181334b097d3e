"""What a command is read on: a terminal, or whatever its output is sent to."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator

from rich.console import Console


class Screen(Console):
    """Shows text as it is, since much of it is the user's. When no one reads any more, the command goes on unseen.

    rich would end it: hours of training, because a pager was closed.
    """

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        send_nowhere(sys.stdout.fileno())  # what Python itself still holds back comes at the end


@contextlib.contextmanager
def unhindered() -> Iterator[None]:
    """What is printed never ends a command: not a sign that the terminal's encoding lacks, nor a reader who has left."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
    try:
        yield
        if sys.stdout is not None:  # as it is where it was closed from the beginning
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():  # it is another pipe's
            raise
        send_nowhere(sys.stdout.fileno())
        sys.exit(0)


def _reader_left() -> bool:
    """Whether what is printed goes into a pipe that no one reads from any more."""
    if sys.stdout is None:
        return False
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # faults are told though they are not asked for
    return bool(output.poll(0))


def send_nowhere(*outputs: int) -> None:
    """Discards what is written to these outputs from now on; they are file descriptors."""
    with open(os.devnull, "w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output)
