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
        with open(os.devnull, "w") as nowhere:  # what is left in Python's own buffer goes there at the end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
