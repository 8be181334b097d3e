"""What a command is read on: a terminal, or whatever its output is sent to.

A terminal obeys control characters: they clear it, write to the clipboard, or turn text around. Those in texts, which come
from records, files and names that a stranger may have chosen, are shown as Python writes them, and never sent.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import select
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.text import Text

from agent_tunix import signals

# C0 less tab and newline, DEL, C1; signs that separate lines or turn the direction of text
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
PANIC = b" panicked at "  # in the first line of what Rust says
MOVES_OF_BARS = re.compile(r"\r|(\x1b\[A)+\Z")  # how tqdm, by which the hub shows its downloads, begins what it writes


def shown(text: str) -> str:
    """A text with its control characters written out, as in \\x1b."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Output:
    """A stream of texts, as `sys.stdout` is, that shows control characters. What draws on a terminal writes to `raw`."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        moves = MOVES_OF_BARS.match(text) if self.raw.isatty() else None
        begin = moves.end() if moves else 0
        self.raw.write(text[:begin] + shown(text[begin:]))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def show_controls() -> None:
    """From now on, all that Python prints shows control characters: ours, Hydra's and other libraries' words and logs."""
    for name in ("stdout", "stderr"):
        output = getattr(sys, name)
        if output is not None and not isinstance(output, Output):
            setattr(sys, name, Output(output))


class Screen(Console):
    """Shows text as it is, since much of it is the user's. When no one reads any more, the command goes on unseen.

    rich would end it: hours of training, because a pager was closed. Its own colours and bars are sent.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def _raw_file(self) -> IO[str]:
        """Below our own streams, and those that rich puts over them while a bar is drawn."""
        found: Any = Console.file.fget(self)  # type: ignore[attr-defined]
        while isinstance(found, Output | FileProxy):
            found = found.raw if isinstance(found, Output) else found.rich_proxied_file
        return found

    file = property(_raw_file, Console.file.fset)  # type: ignore[attr-defined]

    @property
    def is_terminal(self) -> bool:
        """FORCE_COLOR, which Jupyter sets for the commands of a cell, makes no terminal of a pipe: no bar can move there."""
        return super().is_terminal and self._raw_file().isatty()

    def render_str(self, text: str, **how: Any) -> Text:
        """Before lines are laid out, so that what is written out has its place in them."""
        return super().render_str(shown(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))

    def on_broken_pipe(self) -> None:
        self.quiet = True
        send_nowhere(sys.stdout.fileno())  # what Python itself still holds back comes at the end


def draws_bars(console: Console) -> bool:
    """Whether a bar moves there: on a terminal, and in a notebook that has the widgets that rich draws it with."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)


@contextlib.contextmanager
def unhindered() -> Iterator[None]:
    """What is printed never ends a command: not a sign that the terminal's encoding lacks, nor a reader who has left.

    Nor is it obeyed by the terminal.
    """
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")
    os.environ.setdefault("PYTHON_COLORS", "0")  # of tracebacks, from Python 3.13 on: they would be shown as characters
    show_controls()
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


class PanicsUnheard:
    """Around a library in Rust, which writes pages to standard error when it panics, beside the exception that it raises.

    What is written there meanwhile comes when this is over, less a panic. Several threads may be in here.
    """

    _turn, _inside, _true, _kept = threading.Lock(), 0, -1, -1

    def __enter__(self) -> None:
        cls = PanicsUnheard
        with cls._turn:
            cls._inside += 1
            if cls._inside == 1:
                with contextlib.suppress(OSError):  # it is closed, or too many files are open
                    cls._divert()

    def __exit__(self, *_: object) -> None:
        cls = PanicsUnheard
        with cls._turn:
            cls._inside -= 1
            if cls._inside == 0 and cls._true >= 0:
                cls._restore()

    @classmethod
    def _divert(cls) -> None:
        if cls._kept < 0:
            cls._kept, name = tempfile.mkstemp()
            os.unlink(name)
        signals.standard_error = cls._true = os.dup(2)
        os.dup2(cls._kept, 2)

    @classmethod
    def _restore(cls) -> None:
        os.dup2(cls._true, 2)
        os.close(cls._true)
        signals.standard_error, cls._true = 2, -1
        if (size := os.fstat(cls._kept).st_size) and PANIC not in (written := os.pread(cls._kept, size, 0)):
            os.write(2, written)
        os.ftruncate(cls._kept, 0)
        os.lseek(cls._kept, 0, os.SEEK_SET)


def send_nowhere(*outputs: int) -> None:
    """Discards what is written to these outputs from now on; they are file descriptors."""
    with open(os.devnull, "w") as nowhere:
        for output in outputs:
            os.dup2(nowhere.fileno(), output)
