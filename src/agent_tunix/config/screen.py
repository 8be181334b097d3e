"""What a command is read on: a terminal, or whatever its output is sent to."""

from __future__ import annotations

import os
import sys

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


def send_nowhere(*outputs: int) -> None:
    """Has nothing come of what is written to these outputs, which the system knows by numbers."""
    with open(os.devnull, "w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output)
