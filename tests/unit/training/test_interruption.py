from __future__ import annotations

import signal
import subprocess
import sys
import threading

from agent_tunix import signals
from agent_tunix.training.guard import Interruption

LOADED = """
import signal, sys
from agent_tunix.training.guard import Interruption
"""
RUN = """
signal.signal(signal.SIGHUP, signal.SIG_{handler})
with Interruption() as interruption:
    print("begun", flush=True)
    {work}
with open(sys.argv[1], "a") as file:
    print(interruption.requested, file=file)
"""
HUNG_UP = "signal.raise_signal(signal.SIGHUP)"
# The system tells of it first, and then a shell does, as above.
ON_A_TERMINAL = f"""
    while not interruption.requested: pass
    {HUNG_UP}
    print("no one reads this", flush=True)
"""
CLOSES_ITS_TERMINAL = """
import os, pty, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-c", *sys.argv[1:]])
assert os.read(terminal, 5) == b"begun"
os.close(terminal)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_closed_terminal_is_a_request_to_stop_unless_it_is_to_be_outlived(tmp_path):
    runs = [("DFL", "pass"), ("IGN", HUNG_UP), ("DFL", f"{HUNG_UP}; {HUNG_UP}")]
    code = LOADED + "".join(RUN.format(handler=handler, work=work) for handler, work in runs)
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "left"], stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "left").read_text() == "False\nFalse\nTrue\n"


def test_a_second_request_ends_a_run_as_ctrl_c_does_in_python():
    code = f"""{LOADED}
for second in (signal.SIGINT, signal.SIGTERM):
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGTERM)
            print(interruption.requested)
            signal.raise_signal(second)
    except KeyboardInterrupt:
        print("tidied up")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, 2 * "True\ntidied up\n")


def test_what_is_printed_to_a_closed_terminal_does_not_end_the_run(tmp_path):
    code = LOADED + RUN.format(handler="DFL", work=ON_A_TERMINAL)
    assert subprocess.run([sys.executable, "-c", CLOSES_ITS_TERMINAL, code, tmp_path / "left"]).returncode == 0
    assert (tmp_path / "left").read_text() == "True\n"


def test_a_run_in_another_thread_than_the_main_one_hears_no_signals_and_is_not_stopped_by_that():
    handlers = [signal.getsignal(number) for number in signals.STOPS]
    heard = []

    def run():
        with Interruption() as interruption:
            heard.append([signal.getsignal(number) for number in signals.STOPS] == handlers)
            heard.append(interruption.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert heard == [True, False]
