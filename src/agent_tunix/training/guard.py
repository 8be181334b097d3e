"""What keeps a run from harm: a request to stop, and numbers that are not to reach the weights.

An update whose loss, gradient, size or KL divergence is out of hand is computed but not applied, whatever
`training.on_divergence` says. That key decides what happens next: `stop` the run, `ignore` the batch and go on, or
`rollback` to the last checkpoint and go on from there without that batch, at a tenth of the rate.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from agent_tunix import signals
from agent_tunix.console import send_nowhere
from agent_tunix.engine.update import UpdateStats

MAX_ROLLBACKS = 3
OUTPUTS = (1, 2)  # the system's numbers of standard output and standard error


def fault_of(stats: UpdateStats, max_kl: float) -> str | None:
    """What is out of hand in an update that was not applied; None for a good one."""
    if bool(stats.applied):
        return None
    loss, gradient, size, kl = map(float, (stats.loss.loss, stats.grad_norm, stats.update_norm, stats.loss.kl))
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(gradient):
        return f"the norm of the gradient is {gradient}"
    if not math.isfinite(size):
        return f"the norm of the update is {size}"
    return f"the KL divergence from the reference is {kl:.3g}, above training.max_kl={max_kl:g}"


class Interruption:
    """Turns the first signal to stop into a request to stop after the current batch; a second one is a Ctrl-C.

    Python hears signals in its main thread alone: a run in another thread is not interrupted.
    """

    requests = 0  # of this process, so far

    def __enter__(self) -> Interruption:
        self.requested = False
        self._terminals = _terminals()
        outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        asked = (signal.SIGINT, signal.SIGTERM, *([] if outlives else [signal.SIGHUP]))
        asked = asked if threading.current_thread() is threading.main_thread() else ()
        self._previous: dict[int, Any] = {number: signal.signal(number, self._request) for number in asked}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, _: object) -> None:
        self.requested = True
        Interruption.requests += 1
        for other in self._previous:
            signal.signal(other, signal.default_int_handler)
        if number == signal.SIGHUP:
            _hung_up(self._terminals)


@contextlib.contextmanager
def ended_as_by_interrupts() -> Iterator[None]:
    """Signals to stop act as Ctrl-C does in Python, so that what was begun is tidied up."""
    terminals = _terminals()

    def interrupt(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _hung_up(terminals)
        signal.default_int_handler(number, frame)

    with signals.heeded_by(interrupt):
        yield


def _terminals() -> list[int]:
    return [output for output in OUTPUTS if os.isatty(output)]


def _hung_up(terminals: Sequence[int]) -> None:
    """SIGHUP may come twice, from the system and from a shell, and nothing can be written to the terminal any more."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    send_nowhere(*terminals)
