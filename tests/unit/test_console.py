from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from agent_tunix import signals
from agent_tunix.console import Output, PanicsUnheard, Screen, show_controls, shown, unhindered
from agent_tunix.training.progress import Bars

CLIPBOARD, CLEAR, TURNED = "\x1b]52;c;aGk=\x07", "\x1b[2J", "\u202eabc"
HOSTILE = f"{CLIPBOARD}{CLEAR}\x9b2J\r\x08\x7f\x00{TURNED}\u2066\u2028"
WRITTEN = r"\x1b]52;c;aGk=\x07\x1b[2J\x9b2J\r\x08\x7f\x00\u202eabc\u2066\u2028"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

COMMAND = """
import sys
from agent_tunix.console import Screen, unhindered
screen = Screen()
screen.print("begun")
sys.stdin.readline()
for n in range(2):
    screen.print(n)
print("by Python itself")
sys.stderr.write("ended")
"""


@pytest.mark.parametrize("someone_reads", [True, False])
def test_a_command_goes_on_when_no_one_reads_what_it_prints(someone_reads):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-uc", COMMAND], text=True, **pipes) as command:
        assert command.stdout.readline() == "begun\n"
        if not someone_reads:
            command.stdout.close()
        command.stdin.write("\n")
        command.stdin.close()
        assert command.stderr.read() == "ended"
        if someone_reads:
            assert command.stdout.read() == "0\n1\nby Python itself\n"
    assert command.returncode == 0


UNHINDERED = """
import os, sys
from agent_tunix.console import unhindered
with unhindered():
    print("begun ½")
    sys.stdin.readline()
    {action}
"""


@pytest.mark.parametrize(
    ("action", "code"),
    [("print(1, flush=True)", 0), ("print(1)", 0), ("raise BrokenPipeError('of another')", 1)],
    ids=["at once", "at its end", "elsewhere"],
)
def test_a_reader_who_has_left_ends_what_is_only_printed_quietly(action, code):
    """By Hydra, say, whose help is long. A pipe that broke elsewhere is not taken for it."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    program = [sys.executable, "-c", UNHINDERED.format(action=action)]
    with subprocess.Popen(program, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, **pipes) as command:
        if code == 0:
            command.stdout.close()
        command.stdin.write("\n")
        command.stdin.close()
        said = command.stderr.read()
        if code:
            assert command.stdout.read() == "begun ?\n", "a sign that the encoding lacks"
    assert command.returncode == code
    assert ("BrokenPipeError: of another" in said) if code else not said


def test_an_output_that_was_closed_from_the_beginning_hinders_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    reached = []
    with unhindered():
        reached.append(sys.stdout)
    assert reached == [None]


def test_what_a_user_has_written_is_shown_as_it_is():
    screen = Screen()
    with screen.capture() as shown:
        screen.print("[red]a[/red] :smile:")
    assert shown.get() == "[red]a[/red] :smile:\n"


def test_control_characters_are_written_out_and_all_others_left():
    assert shown(HOSTILE) == WRITTEN
    plain = "a\tb\nc ½ 中 é e\u0301 👩\u200d🚀 שלום \\x1b"
    assert shown(plain) == plain


@pytest.mark.parametrize("place", ["text", "cell", "panel", "title of a panel", "title of a table", "Text", "soft wrap"])
def test_nothing_that_rich_lays_out_holds_a_control_character(place):
    table, titled = Table(), Table(title=HOSTILE)
    for one in (table, titled):
        one.add_column(HOSTILE)
    table.add_row(HOSTILE)
    things = {
        "text": HOSTILE,
        "cell": table,
        "panel": Panel(HOSTILE),
        "title of a panel": Panel("", title=Screen().render_str(HOSTILE)),
        "title of a table": titled,
        "Text": Text(HOSTILE),
    }
    screen = Screen()
    screen.width = 200
    with screen.capture() as seen:
        screen.print(things.get(place, HOSTILE), soft_wrap=place == "soft wrap")
    assert not OBEYED.search(seen.get())
    assert r"\x1b]52;c;aGk=" in seen.get()
    if place not in ("Text", "title of a table"):  # rich itself leaves some characters out of these
        assert WRITTEN in seen.get()


def test_nor_does_what_python_prints_and_logs(capsys, monkeypatch):
    show_controls()
    show_controls()
    assert isinstance(sys.stdout, Output)
    assert not isinstance(sys.stdout.raw, Output)
    print(HOSTILE)
    print(HOSTILE, file=sys.stderr)
    sys.stderr.writelines([HOSTILE])
    handler = logging.StreamHandler()
    handler.emit(logging.LogRecord("name", logging.ERROR, "path", 1, HOSTILE, (), None))
    found = capsys.readouterr()
    assert found.out == f"{WRITTEN}\n"
    assert found.err.count(WRITTEN) == 3
    assert not OBEYED.search(found.err)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_sent_colours_and_bars_of_ours_and_nothing_of_a_texts(monkeypatch):
    """Also by what libraries print while a bar is drawn, which rich would read for its colours."""
    terminal = Terminal()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    show_controls()
    screen = Screen()
    with Bars(screen) as bars:
        display = bars.display(f"training {HOSTILE}", 3)
        bars.notice(f"warning: {HOSTILE}")
        print(f"\x1b[31mred {HOSTILE}")
        display.end(HOSTILE)
    screen.print(HOSTILE, style="yellow")
    sent = terminal.getvalue()
    assert "\x1b[33m" in sent, "a colour of ours"
    assert "\x1b[?25l" in sent, "the bar"
    assert not re.search(r"\x1b(?!\[[\d;?]*[mKhlA-G])", sent)
    for obeyed in ("\x1b[2J", "\x1b[31m", "\x07", "\x08", "\x9b", "\x00", "\x7f", "\u202e", "\u2066"):
        assert obeyed not in sent
    assert sent.count(r"\x1b]52;c;aGk=") > 3
    assert isinstance(sys.stdout, Output), "and so it goes on"
    assert sys.stdout.raw is terminal


def test_bars_of_the_hub_move_on_a_terminal_and_nowhere_else(monkeypatch):
    for terminal, sent in ((Terminal(), "\r 5%\x1b[A\x1b[A"), (io.StringIO(), r"\r 5%\x1b[A\x1b[A")):
        output = Output(terminal)
        output.write("\r 5%")
        output.write("\x1b[A\x1b[A")
        assert terminal.getvalue() == sent
    output = Output(Terminal())
    output.write("\x1b[A\x1b[Atext")
    output.write("text\r")
    assert output.getvalue() == r"\x1b[A\x1b[Atexttext\r"


def test_a_pipe_is_no_terminal_though_colours_are_asked_for(monkeypatch, capsys):
    """As in a cell of a notebook, where Jupyter asks for colours: each move of a bar would be a line there."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Bars(Screen()) as bars:
        display = bars.display("training", 2)
        display.begin(0)
        display.notice("said")
    assert capsys.readouterr().out == "said\n"


def test_a_traceback_shows_them_too():
    program = f"from agent_tunix.console import unhindered\nwith unhindered():\n    raise ValueError({HOSTILE!r})"
    primary, secondary = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stdout=secondary, stderr=secondary) as command:
        os.close(secondary)
        said = b""
        while command.poll() is None or b"ValueError" not in said:
            try:
                said += os.read(primary, 65536)
            except OSError:
                break
    os.close(primary)
    assert WRITTEN in said.decode().splitlines()[-1]
    assert b"\x1b" not in said


def test_a_panic_is_not_shown_and_what_else_is_written_comes_after_it(capfd):
    kept = threading.Barrier(2)

    def write() -> None:
        with PanicsUnheard():
            kept.wait()
            os.write(2, b"of the other thread\n")
            os.write(signals.standard_error, b"of a signal\n")

    (other := threading.Thread(target=write)).start()
    with PanicsUnheard():
        kept.wait()
        other.join()
        assert capfd.readouterr().err == "of a signal\n"
    assert capfd.readouterr().err == "of the other thread\n"
    with PanicsUnheard():
        os.write(2, b"\nthread '<unnamed>' panicked at lib.rs:3:\nno entry\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    assert signals.standard_error == 2
