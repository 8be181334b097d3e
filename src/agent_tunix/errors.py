"""What a user can mend: it is shown as it is written, without a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from typing import Any

GOING_ON = "A run goes on by training.resume=<folder>, a sweep or a search by its command again in its folder."


class UserError(Exception):
    """A mistake in the configuration, the data or a file; the message says what, where and what to do."""

    exit_code = 2


class DivergenceError(UserError):
    """Numbers got out of hand and were kept from the weights; `fault` says which, without what to do about it."""

    exit_code = 3

    def __init__(self, message: str, fault: str = "") -> None:
        super().__init__(message)
        self.fault = fault


class StoppedError(UserError):
    """A person has pressed Ctrl-C where nothing waits for the end of a batch, or has pressed it twice."""

    exit_code = 130  # as shells count it


def mistake_of(fault: BaseException) -> UserError | None:
    """What to say of a fault of files, of memory or of a group's name that a user can mend; nothing of any other."""
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
            f"There is not enough memory: {str(fault).splitlines()[0] if str(fault) else 'of the host'}\n"
            "`agent-tunix plan` with the same overrides counts what a step needs. Fewer prompts at a time take less\n"
            "(training.micro_batch_size=1, evaluation.batch_size), as do fewer completions (grpo.num_generations), shorter\n"
            "ones (generation.max_generation_steps) and a smaller base (model.base_dtype=int8 or nf4)."
        )
    return None


def insist_on_interrupts() -> None:
    """Has a Ctrl-C come again that came where Python drops exceptions, as in JAX's callback of the garbage collector."""
    hook = sys.unraisablehook

    def unless_interrupt(found: Any) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt):
            return hook(found)
        with contextlib.suppress(RuntimeError):  # no thread starts where Python is ending anyway
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    sys.unraisablehook = unless_interrupt


def _of_files(fault: OSError) -> UserError | None:
    full = f"Free some space. {GOING_ON}"
    refused = "Check what is there and who may read or write it; results go to hydra.run.dir or hydra.sweep.dir=<folder>."
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), full)
    there = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
    remedies |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, *there), refused)
    if fault.errno not in remedies:
        return None
    return UserError(f"{fault.filename or 'A file'}: {fault.strerror}. {remedies[fault.errno]}")
