"""Errors that the user can mend: their messages are shown as they are, without a traceback.

What is not ours, a file that is parsed or a function of the user's, may raise anything: `reading` and `calling` are the
boundary at which that becomes such an error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from agent_tunix.signals import STOPPED

# What the system says of a file that is missing, or is none. For what else it says, the file is not to blame.
OF_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG)
OF_SYSTEM = re.compile(r"os_error_code='(\d+)'|\(os error (\d+)\)")  # as tensorstore and Rust say it
OF_ORBAX = re.compile("Encountered error while reading array index")  # and why is another fault
DETAILS = re.compile(r" \[(?:tensorstore_spec|source locations)|\. See full TensorStore details")  # where pages begin
OF_ARRAY = re.compile(r'Error reading "([\w.]+)/[^"]*" in OCDBT')
STATUS, DOING = re.compile("^[A-Z_]{5,}: "), re.compile(r'Error (?:opening|reading|decoding) (?:[^":]|"[^"]*")*: ')
LONGEST = 300  # characters of another's message
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

    exit_code = STOPPED


@contextlib.contextmanager
def calling(answer: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Around what is not ours: whatever it raises becomes the answer to it, which may be itself. Ctrl-C passes.

    A library in Rust that panics raises what is no `Exception`, and so may a user's function.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        error = answer(fault)
        if error is fault:
            raise
        raise error from fault


def reading(place: Any, remedy: str = "") -> AbstractContextManager[None]:
    """Around the parsing of a file: whatever is raised becomes a message with its name, unless it is one already.

    A generator may be closed in here.
    """
    return calling(lambda fault: fault if isinstance(fault, UserError | GeneratorExit) else unreadable(place, fault, remedy))


def unreadable(place: Any, fault: BaseException, remedy: str = "") -> UserError:
    """For what could not be read: the system refused it, or it is damaged, which the remedy mends, if there is one."""
    if isinstance(fault, MemoryError):
        return UserError(f"{place} cannot be read: it takes more memory than there is.")
    why = unparsed(fault)
    if may_not_be_read(fault):
        return UserError(f"{place} may not be read ({why}); check its owner and its permissions.")
    if of_system(fault):
        return UserError(f"{place} could not be read ({why}). Mend that, and start again.")
    if remedy:
        return UserError(f"{place} is damaged or half downloaded ({why}); {remedy}.")
    return UserError(f"{place} cannot be read: {why}")


def unparsed(fault: BaseException) -> str:
    """Why something could not be parsed."""
    if isinstance(fault, RecursionError):
        return "it is nested too deeply"
    return f"no {said(fault)}" if isinstance(fault, KeyError) else said(fault)


def said(fault: BaseException) -> str:
    """What a fault says, in one line; its kind where it says nothing, or cannot be printed.

    Of orbax's and tensorstore's texts, which list all that they were doing, what went wrong with which array.
    """
    text = _text(fault.__cause__ if fault.__cause__ and OF_ORBAX.match(_text(fault)) else fault)[: 10 * LONGEST]
    array = OF_ARRAY.search(text)
    text = " ".join(DOING.sub("", STATUS.sub("", DETAILS.split(text)[0])).split())
    if not text:
        return kind_of(fault)
    return (f"{array[1]}: " if array else "") + (text if len(text) <= LONGEST else f"{text[:LONGEST]} ...")


def named(fault: BaseException) -> str:
    """Its kind and what it says."""
    kind, text = kind_of(fault), said(fault)
    return text if text.startswith(kind) else f"{kind}: {text}"


def kind_of(value: object) -> str:
    """The name of its class, whatever that says of itself."""
    return type.__dict__["__name__"].__get__(type(value))


def _text(fault: BaseException) -> str:
    try:
        return "".join(str(fault))  # no subclass of str, with methods of its own
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"{kind_of(fault)}, which cannot be printed"


def may_not_be_read(fault: BaseException) -> bool:
    """Whether the system refused it; libraries that are not Python's say so in their texts."""
    return re.search("permission.denied", _text(fault), re.IGNORECASE) is not None


def of_system(fault: BaseException) -> bool:
    """Whether the system is at fault, as for too many open files, rather than what was read."""
    number = error_number(fault)
    return number is not None and number not in OF_DAMAGE


def error_number(fault: BaseException) -> int | None:
    """The system's number for what went wrong; libraries that are not Python's have it in their texts."""
    if isinstance(fault, OSError) and fault.errno is not None:
        return fault.errno
    found = OF_SYSTEM.search(_text(fault))
    return int(found[1] or found[2]) if found else None


def mistake_of(fault: BaseException) -> UserError | None:
    """The error to show for a fault that the user can mend: of files, memory, a device or a group's name; else None."""
    if isinstance(fault, UserError):
        return fault
    if isinstance(fault, KeyboardInterrupt):
        return StoppedError(f"Interrupted. {GOING_ON}")
    if isinstance(fault, OSError):
        return _of_files(fault)
    text = _text(fault)
    if isinstance(fault, ValueError) and text.startswith("Config group override"):  # which is how Hydra says it
        return UserError(f"{fault}: a group takes the name of one of its files, as in optimizer=adamw.")
    if isinstance(fault, MemoryError) or "RESOURCE_EXHAUSTED" in text:  # which is how JAX says it
        return UserError(
            f"There is not enough memory: {text.splitlines()[0] if text else 'the host has no more'}\n"
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
    """A file that is not there may be our own mistake, unless it is a folder that was to be made there."""
    full = f"Free some space. {GOING_ON}"
    refused = (
        "Check the path and its permissions; hydra.run.dir=<folder> or hydra.sweep.dir=<folder> puts what is new elsewhere."
    )
    made_in = [frame.f_code.co_name for frame, _ in traceback.walk_tb(fault.__traceback__)][-1:]
    remedies = dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), full)
    remedies |= dict.fromkeys((errno.EMFILE, errno.ENFILE), f"Allow more of them, as by `ulimit -n 1024`. {GOING_ON}")
    remedies |= dict.fromkeys((errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE), f"See to the disk. {GOING_ON}")
    there = (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EBUSY)
    remedies |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS, *there), refused)
    if made_in == ["mkdir"]:
        remedies[errno.ENOENT] = refused
    elif fault.errno == errno.ENOENT and not _in_a_folder():
        return UserError("The working directory was removed. Change to another one.")
    if fault.errno not in remedies:
        return None
    return UserError(f"{fault.filename or 'A file'}: {fault.strerror}. {remedies[fault.errno]}")


def _in_a_folder() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False
