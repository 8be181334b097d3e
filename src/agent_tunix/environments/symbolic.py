"""Whether two expressions are equal, by Math-Verify, where the extra `math` is installed; nothing is equal without it.

It takes 10 ms and more where our own reading takes 0.3, so only expressions that are not spelt alike come here. It computes
with sympy, which has no end for some texts. It therefore works in a process of its own, which is ended after `SECONDS` of
processor time; the pair counts as different then. Math-Verify's own limits need the main thread, and rewards are called
from others. Only its reading of LaTeX is used: that of plain expressions evaluates text of the model as Python.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading

from agent_tunix.errors import UserError

SECONDS = 2.0  # of processor time, so that a busy machine changes no verdict
MEMORY = 4 << 30
LONGEST = 300  # characters
DEEPEST = 20  # brackets in each other
# What has no variable, no power and no command may as well be a score, a date or a range of years.
MATHEMATICS = re.compile(
    r"\\[a-zA-Z{]|\^|√|π|[0-9]!\Z|\b[0-9]*[a-zA-Z]{1,2} ?[-+*/=<>(^]|[-+*/=<>)(] ?[0-9]*[a-zA-Z]{1,2}\b"
)
HUGE = re.compile(  # a number that takes no process to be refused
    r"\*\*|\^ ?\{? ?-?[0-9]{4}|[0-9]{4} ?!|[0-9)}] ?\^ ?\{?[0-9]+ ?\^|\) ?\^ ?\{?[0-9]{3}"
)
OTHER_BASE = re.compile(r"[0-9]_\{?[0-9]")  # Math-Verify takes 101_2 for 101
BETWEEN_DOLLARS = re.compile(r"\$([^$]+)\$")


@functools.lru_cache(4096)
def same_expression(found: str, truth: str) -> bool:
    """Whether an answer that is an expression equals the truth. Neither has a box around it."""
    if not MATHEMATICS.search(truth) or OTHER_BASE.search(truth):
        return False
    found, truth = _bare(found), _bare(truth)
    if not all(map(_readable, (found, truth))) or importlib.util.find_spec("math_verify") is None:
        return False
    return _grader().same(found, truth)


class Grader:
    """A process that compares expressions, started anew after it was ended. Threads that share it take turns."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def same(self, found: str, truth: str) -> bool:
        with self._turn:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._start()
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps([found, truth]) + "\n")
            process.stdin.flush()
            said = process.stdout.readline()
            self._process = process if said else None
            if not said:  # it was ended by a limit
                process.stdin.close()
                process.stdout.close()
                process.wait()
        return said == "same\n"

    def _start(self) -> subprocess.Popen[str]:
        program = f"import sys; sys.path[:] = {[*map(str, sys.path)]}; from {__name__} import serve; serve()"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise UserError(
                "Math-Verify is installed but cannot be imported: `python -c 'import math_verify'` says why.\n"
                "Mend that by pip install 'agent-tunix[math]', or do without it by pip uninstall math-verify."
            )
        return process


_grader = functools.cache(Grader)


def serve() -> None:
    """The work of the process: answers a line with a line until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the run's to answer
    logging.disable()
    try:
        _equal("x+x", "2x")  # the first call is slow
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
        answers.write("ready\n")
    finally:
        answers.flush()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process, also within C
        try:
            same = _equal(*json.loads(line))
        except (Exception, RecursionError):  # of a text that it cannot read
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write("same\n" if same else "different\n")
        answers.flush()


def _equal(found: str, truth: str) -> bool:
    import math_verify

    latex = [math_verify.LatexExtractionConfig()]
    stated, wanted = (math_verify.parse(f"${text}$", latex, parsing_timeout=None) for text in (found, truth))
    return bool(stated and wanted) and math_verify.verify(wanted, stated, timeout_seconds=None)


def _bare(text: str) -> str:
    """What stands between the only two dollar signs of a text, or all of it, without a full stop."""
    parts = BETWEEN_DOLLARS.findall(text)
    text = parts[0] if len(parts) == 1 else text
    return re.sub(r"\\[()\[\]]|\$", "", text).strip().removesuffix(".")


def _readable(text: str) -> bool:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return 0 < len(text) <= LONGEST and deepest <= DEEPEST and HUGE.search(text) is None
