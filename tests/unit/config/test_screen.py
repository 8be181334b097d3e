from __future__ import annotations

import subprocess
import sys

import pytest

from agent_tunix.config.screen import Screen

COMMAND = """
import sys
from agent_tunix.config.screen import Screen
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


def test_what_a_user_has_written_is_shown_as_it_is():
    screen = Screen()
    with screen.capture() as shown:
        screen.print("[red]a[/red] :smile:")
    assert shown.get() == "[red]a[/red] :smile:\n"
