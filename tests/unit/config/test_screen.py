from __future__ import annotations

import os
import subprocess
import sys

import pytest

from agent_tunix.config.screen import Screen, unhindered

COMMAND = """
import sys
from agent_tunix.config.screen import Screen, unhindered
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
from agent_tunix.config.screen import unhindered
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
