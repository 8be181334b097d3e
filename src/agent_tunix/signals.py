"""Signals that ask a command to stop: Ctrl-C (SIGINT), SIGTERM, and SIGHUP, that of a terminal that is closed.

They are heeded from a command's first line to its last. Where there is nothing to save, it ends at once and from within the
handler: an exception would have to find its way through whatever is being loaded. Where there is something, other handlers
take the place of this one (`engine/guard.py`).

A command is open to them until this module is loaded, so it imports next to nothing: Python's own `signal` makes an
enumeration of its numbers, which takes longer than all the rest together.
"""

from __future__ import annotations

import os
from _signal import SIG_IGN, SIGHUP, SIGINT, SIGTERM, getsignal, signal

TYPE_CHECKING = False  # as that of `typing`, which takes time to load too
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    Handler = Callable[[int, Any], Any] | int

STOPS = {SIGINT: "SIGINT", SIGTERM: "SIGTERM", SIGHUP: "SIGHUP"}
STOPPED = 130  # exit code; what shells give for SIGINT
standard_error = 2  # where a line is read; another number while `console.PanicsUnheard` keeps what is written there
SHOWN_CURSOR = b"\x1b[?25h"  # a progress bar may have hidden it


def heed(handler: Handler) -> dict[int, Any]:
    """Has a handler answer them, but for those that the process is to outlive, as under `nohup`; returns the earlier ones.

    Python hears signals in its main thread alone; in another nothing is done.
    """
    heeded = [number for number in STOPS if getsignal(number) not in (SIG_IGN, None)]  # None: C code's own
    try:
        return {number: signal(number, handler) for number in heeded}
    except ValueError:
        return {}


class heeded_by:  # noqa: N801  # used as a function
    """Within this context a handler answers them."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        self._before = heed(self._handler)

    def __exit__(self, *_: object) -> None:
        for number, earlier in self._before.items():
            signal(number, earlier)


def words(number: int) -> str:
    return f"Stopped by {STOPS[number]}: there was nothing to save."


def leave(number: int, _: Any = None) -> NoReturn:
    """Ends the process with one line.

    A signal may come while a module is half loaded or an output is written to, so this imports nothing, and prints nothing.
    """
    try:
        if os.isatty(1):
            os.write(1, SHOWN_CURSOR)
        os.write(standard_error, f"{words(number)}\n".encode())
    except OSError:  # nothing can be written there any more
        pass
    os._exit(STOPPED)
