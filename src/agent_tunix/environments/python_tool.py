"""A tool that runs Python: `environment.tools=[agent_tunix.environments.python_tool.python]`.

A program runs in a process of its own, in an empty folder that is removed after it, with limits on time, memory and output.
Where Linux lets a user make namespaces it has no network and cannot leave a process behind. Elsewhere Python refuses it
sockets, and what it starts is killed with its group. This keeps a model's slips from harm; it is no wall against an attack:
the program may read what its user may read. Run what you do not trust in a container or another machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 5.0  # by the clock
MEMORY = 2**29  # bytes
OUTPUT = 2**16  # bytes, and the most that a file may have
SHOWN = 4_000  # characters of what is printed
KEPT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # of the environment: no secrets
FAREWELL = 1.0  # seconds to be gone after a kill

# Runs in the new process, before the program: that gets no socket, and dies with the one that started it.
BEFORE = """
import ctypes, os, resource, signal, sys
memory, output, seconds = map(int, sys.argv[1:4])
libc = ctypes.CDLL(None, use_errno=True)
isolated = sys.platform == "linux" and libc.unshare(0x10000000 | 0x40000000 | 0x20000000) == 0  # user, network, processes
if isolated:
    child = os.fork()  # the first in its namespace: when it ends, all others there do
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
for limit, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, output), (resource.RLIMIT_CPU, seconds)):
    resource.setrlimit(limit, (most, most))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def refuse(event, arguments):
    if event.startswith("socket."):
        raise PermissionError("there is no network here")

code = sys.stdin.read()
sys.argv[:] = ["program"]
sys.addaudithook(refuse)
for name in ("ctypes", "resource"):
    sys.modules.pop(name, None)
exec(compile(code, "program", "exec"), {"__name__": "__main__"})
"""


def python(code: str) -> str:
    """Runs a Python program and gives back what it prints.

    Args:
        code: The program. Print what you want to see.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as printed:
        limits = map(str, (MEMORY, OUTPUT, int(SECONDS) + 1))
        environment = {name: os.environ[name] for name in KEPT if name in os.environ} | {"HOME": folder}
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", BEFORE, *limits],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        try:
            process.communicate(code.encode(errors="replace"), timeout=SECONDS)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
        printed.seek(0)
        said = printed.read(OUTPUT).decode(errors="replace").replace(str(Path(folder)), ".").strip()
    cut = said if len(said) <= SHOWN else f"{said[:SHOWN]} ... (cut)"
    if late:
        return f"{cut}\nerror: it took longer than {SECONDS:g} s".strip()
    if process.returncode:
        return cut or f"error: it ended with {process.returncode}"
    return cut or "(nothing was printed)"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a program: its group and, where it has a namespace, all in that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAREWELL)
