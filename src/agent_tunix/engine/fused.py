"""Several training loops as one program: their calls of one kind are answered by one call of the device.

Each loop runs in a thread of its own, and only one works at a time: from the moment it has an answer until it makes its
next call. When all wait, calls of one kind are answered together: K adapters and optimizer states over one frozen base, the
rows of all of them in the same matrix products. A loop cannot tell the difference from being alone: noise and data follow
from its own seed and position, and what happens to another is not seen by it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from agent_tunix.engine.calls import Answer, Call
from agent_tunix.errors import DivergenceError

Result = TypeVar("Result")


class StoppedError(BaseException):
    """Raised in a loop whose sweep has failed elsewhere, so that it closes what it holds."""


def together(loops: Sequence[Callable[[Answer], Result]], size: int | None = None) -> list[Result | DivergenceError]:
    """Runs loops to their ends, each with the function that answers its calls; of one that diverged, its error.

    Any other error ends them all. A kind of call that few loops wait for, or that is seldom made, is answered first: loops
    that fell out of step, after a rollback say, so go on until they fall in with the others.
    The programs keep their size to the end: the place of a loop that makes no call is filled by a copy, its answer ignored.
    They are larger than the loops are many where some ended before the others go on; `size` then says how many there were.
    """
    results: list[Any] = [None] * len(loops)
    waiting: dict[int, Call] = {}
    answered = Counter[tuple]()
    members = [_Member(loop) for loop in loops]

    def proceed(index: int, answer: Any) -> None:
        try:
            call = members[index].go_on(answer)
        except DivergenceError as fault:
            results[index] = fault
        else:
            if call is None:
                results[index] = members[index].result
            else:
                waiting[index] = call

    with contextlib.ExitStack() as closing:
        for member in members:
            closing.callback(member.close)
        for index in range(len(members)):
            proceed(index, None)
        while waiting:
            waited_for = Counter(call.kind for call in reversed(waiting.values()))  # the latest first
            kind = min(waited_for, key=lambda kind: waited_for[kind] * (1 + answered[kind]))
            answered[kind] += 1
            chosen = [index for index, call in waiting.items() if call.kind == kind]
            calls: list[Any] = [waiting.pop(index) for index in chosen]
            fillers = [calls[0]] * ((size or len(members)) - len(calls))
            try:
                answers = calls[0].answer(calls + fillers)
            except BaseException as fault:
                members[chosen[0]].go_on(fault=fault)  # one of them notes what has ended all
                raise
            for index, answer in zip(chosen, answers, strict=False):
                proceed(index, answer)
    return results


class _Member(Generic[Result]):
    """A loop in a thread of its own, which works from `go_on` until its next call."""

    def __init__(self, loop: Callable[[Answer], Result]):
        self._calls = queue.SimpleQueue[Call | None]()  # None: it has ended
        self._answers = queue.SimpleQueue[tuple[Any, BaseException | None]]()
        self._fault: BaseException | None = None
        self._works = self._ended = False
        self.result: Result | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work, loop), daemon=True)

    def go_on(self, answer: Any = None, fault: BaseException | None = None) -> Call | None:
        """Has the loop work on with an answer, or a fault in its place, to its next call; None if it ended instead.

        What has ended it is raised.
        """
        call = self._after(answer, fault)
        if self._fault is not None:
            raise self._fault
        return call

    def close(self) -> None:
        """Stops a loop that has not ended: one that waits by the answer to its call, one at work where it is."""
        while self._thread.ident is not None and not self._ended:
            if self._works:
                of, raised = ctypes.c_ulong(self._thread.ident), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(of, raised)
                self._next_call()
            else:
                self._after(None, StoppedError())

    def _after(self, answer: Any, fault: BaseException | None) -> Call | None:
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._answers.put((answer, fault))
        return self._next_call()

    def _next_call(self) -> Call | None:
        self._works = True
        call = self._calls.get()
        self._works = False
        if call is None:
            self._ended = True
            self._thread.join()
        return call

    def _work(self, loop: Callable[[Answer], Result]) -> None:
        try:
            self.result = loop(self._answer)
        except BaseException as fault:
            self._fault = fault
        self._calls.put(None)

    def _answer(self, call: Call) -> Any:
        """In the loop's thread: hands a call over, and waits for its answer."""
        self._calls.put(call)
        answer, fault = self._answers.get()
        if fault is not None:
            raise fault
        return answer
