"""Errors that the user can mend: their messages are shown as they are, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

GOING_ON = "Continue a run with training.resume=<folder>, a sweep or a search with the same command and folder."


class UserError(Exception):
    """A mistake in the configuration, the data or a file; the message says what, where and what to do."""

    exit_code = 2


class DivergenceError(UserError):
    """Numbers got out of hand and were kept from the weights; `fault` says which, without the message's advice."""

    exit_code = 3

    def __init__(self, message: str, fault: str = "") -> None:
        super().__init__(message)
        self.fault = fault


class StoppedError(UserError):
    """Ctrl-C was pressed where there is no batch to finish first, or was pressed twice."""

    exit_code = 130  # what shells give for SIGINT


def unreadable(place: Any, fault: Exception, remedy: str) -> UserError:
    """For what a library could not read: the system refused it, or it is damaged, which the remedy mends."""
    if may_not_be_read(fault):
        return UserError(f"{place} may not be read ({fault}); check its owner and its permissions.")
    return UserError(f"{place} is damaged or half downloaded ({fault}); {remedy}.")


def may_not_be_read(fault: Exception) -> bool:
    """Whether the system refused it; libraries that are not Python's say so in their texts."""
    return re.search("permission.denied", str(fault), re.IGNORECASE) is not None


def mistake_of(fault: BaseException) -> UserError | None:
    """The error to show for a fault that the user can mend: of files, memory, a device or a group's name; else None."""
    if isinstance(fault, UserError):
        return fault
    if isinstance(fault, KeyboardInterrupt):
        return StoppedError(f"Interrupted. {GOING_ON}")
    if isinstance(fault, OSError):
        return _of_files(fault)
    if isinstance(fault, ValueError) and str(fault).startswith("Config group override"):  # which is how Hydra says it
        return UserError(f"{fault}: a group takes the name of one of its files, as in optimizer=adamw.")
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in str(fault):  # which is how JAX says it
        return UserError(
            f"There is not enough memory: {str(fault).splitlines()[0] if str(fault) else 'the host has no more'}\n"
            "`agent-tunix plan` with the same overrides counts what a step needs. Fewer prompts at a time take less\n"
            "(training.micro_batch_size=1, evaluation.batch_size), as do fewer completions (grpo.num_generations), shorter\n"
            "ones (generation.max_generation_steps) and a smaller base (model.base_dtype=int8 or nf4)."
        )
    return _of_device(fault)


def insist_on_interrupts() -> None:
    """Repeats a Ctrl-C that came where Python drops exceptions, as in JAX's callback of the garbage collector."""
    hook = sys.unraisablehook

    def unless_interrupt(found: Any) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            return hook(found)
        with contextlib.suppress(RuntimeError):  # no thread starts where Python is ending anyway
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    sys.unraisablehook = unless_interrupt


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """A Ctrl-C comes when this is over. One that stops an extension such as JAX's while it is loaded takes Python down.

    It comes to the main thread alone; another has nothing to put off.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def ended_as_by_interrupts() -> Iterator[None]:
    """SIGTERM, and that of a terminal that is closed, act as Ctrl-C, so that what was begun is tidied up."""
    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    for number in ending:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _of_device(fault: BaseException) -> UserError | None:
    """JAX may say nothing where it sees no device of a kind that JAX_PLATFORMS asks for; it is known by where it stops."""
    modules = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(fault.__traceback__)]
    if not isinstance(fault, RuntimeError | AssertionError) or modules[-1:] != ["jax._src.xla_bridge"]:
        return None
    asked = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
    return UserError(
        f"No device can be started: {str(fault).splitlines()[0] if str(fault) else f'JAX sees none for {asked}'}\n"
        "Check the driver (nvidia-smi) and that JAX was installed for it, as in pip install 'jax[cuda13]'; "
        "JAX_PLATFORMS=cpu runs without one."
    )


def _of_files(fault: OSError) -> UserError | None:
    full = f"Free some space. {GOING_ON}"
    refused = (
        "Check the path and its permissions; hydra.run.dir=<folder> or hydra.sweep.dir=<folder> puts what is new elsewhere."
    )
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), full)
    there = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
    remedies |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, *there), refused)
    if fault.errno not in remedies:
        return None
    return UserError(f"{fault.filename or 'A file'}: {fault.strerror}. {remedies[fault.errno]}")
