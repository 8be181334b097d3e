"""Programs of a model: what they print, and what becomes of those that would do harm."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agent_tunix.environments import python_tool
from agent_tunix.environments.python_tool import OUTPUT, SHOWN, python
from agent_tunix.environments.tools import schema_of


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(python_tool, "SECONDS", 1.0)


def test_what_it_prints_comes_back():
    assert python("print(sum(range(10)))\nprint('done')") == "45\ndone"
    assert python("x = 1") == "(nothing was printed)"
    assert schema_of(python)["function"]["parameters"]["required"] == ["code"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("raise SystemExit(3)", "error: it ended with 3"),
        ("import os; os._exit(4)", "error: it ended with 4"),
        ("x = bytearray(2**30)", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 9))", "there is no network here"),
    ],
)
def test_what_goes_wrong_is_said(code, said):
    assert said in python(code)


def test_one_that_does_not_end_is_ended(short):
    assert python("print('begun', flush=True)\nwhile True: pass") == "begun\nerror: it took longer than 1 s"


def test_output_has_an_end():
    said = python("while True: print('x' * 1000)")
    assert len(said) < SHOWN + 200
    assert len(python(f"print('y' * {OUTPUT * 4})")) < SHOWN + 200


def test_it_leaves_no_file_and_sees_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_SECRET")
    before = {*os.listdir(tempfile.gettempdir())}
    said = python("import os; open('left', 'w').write('x'); print(os.environ.get('HF_TOKEN'), os.listdir('.'))")
    assert said == "None ['left']"
    assert {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tmp")} <= before


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("session", [False, True])
def test_what_it_starts_ends_with_it(session, short):
    mark = f"mark-{os.getpid()}-{session}"
    code = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "{mark}"], start_new_session={session})
print("begun", flush=True)
"""
    if session and not _has_namespaces():
        pytest.skip("a process that begins a session of its own is left behind where users may make no namespaces")
    assert "begun" in python(code)
    time.sleep(0.2)
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _has_namespaces() -> bool:
    return python("import os; print(os.getpid())") == "1"
