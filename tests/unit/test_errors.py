from __future__ import annotations

import errno
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from agent_tunix.errors import UserError, calling, mistake_of, reading


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EFBIG, "Free some space"),
        (errno.EACCES, "permissions; hydra.run.dir=<folder>"),
        (errno.EEXIST, "Check the path"),
        (errno.EISDIR, "Check the path"),
        (errno.ENAMETOOLONG, "Check the path"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "See to the disk"),
    ],
)
def test_a_fault_of_files_says_where_and_what_to_do(number, remedy):
    message = str(mistake_of(OSError(number, os.strerror(number), "runs/metrics.jsonl")))
    assert message.startswith(f"runs/metrics.jsonl: {os.strerror(number)}. ")
    assert remedy in message


@pytest.mark.parametrize(
    "fault", [FileNotFoundError(errno.ENOENT, "No such file", "x"), ConnectionError("refused"), ValueError("2 != 3")]
)
def test_any_other_fault_is_no_mistake_of_a_user(fault):
    assert mistake_of(fault) is None


def test_a_folder_that_the_system_does_not_make_is_named(tmp_path):
    """As below /proc, of which it says that it is not there."""
    with pytest.raises(FileNotFoundError) as missing:
        (tmp_path / "absent" / "run").mkdir()
    assert "absent/run: No such file or directory. Check the path" in str(mistake_of(missing.value))


def test_a_working_directory_that_was_removed_is_told_of(tmp_path, monkeypatch):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError) as missing:
        os.getcwd()
    assert "working directory was removed" in str(mistake_of(missing.value))


class OtherError(BaseException):
    """As a library in Rust raises it where it panics."""


class SilentError(Exception):
    def __str__(self) -> str:
        raise SystemExit("no word")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (OtherError("no entry found"), "config.json is damaged or half downloaded (no entry found); fetch it"),
        (SystemExit(5), "(5); fetch it"),
        (SilentError(), "(SilentError, which cannot be printed); fetch it"),
        (ValueError(), "(ValueError); fetch it"),
        (ValueError("one\ntwo"), "(one two); fetch it"),
        (ValueError("x" * 10**6), "x ...); fetch it"),
        (KeyError("dtype"), "(no 'dtype'); fetch it"),
        (RecursionError("maximum recursion depth exceeded"), "(it is nested too deeply); fetch it"),
        (MemoryError(), "config.json cannot be read: it takes more memory than there is"),
        (PermissionError(13, "Permission denied"), "config.json may not be read"),
        (Exception("Permission denied (os error 13)"), "config.json may not be read"),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "config.json could not be read ([Errno 24] Too many open files). Mend",
        ),
        (Exception("Too many open files (os error 24)"), "config.json could not be read (Too many open files"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "is damaged or half downloaded ([Errno 21]"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_a_file_raises_is_a_message_with_its_name(fault, why):
    with pytest.raises(UserError) as told, reading("config.json", "fetch it"):
        raise fault
    assert why in str(told.value)
    assert len(str(told.value)) < 500


def test_messages_ctrl_c_and_the_end_of_a_generator_pass():
    with pytest.raises(UserError, match=r"^no such model$"), reading("config.json"):
        raise UserError("no such model")
    with pytest.raises(KeyboardInterrupt), reading("config.json"):
        raise KeyboardInterrupt

    def lines():
        with reading("config.json"):
            yield from "ab"

    begun = lines()
    assert next(begun) == "a"
    begun.close()


def test_a_function_may_raise_what_ends_generators():
    for ending in (GeneratorExit, StopIteration):
        with pytest.raises(UserError, match="mine"), calling(lambda _: UserError("mine")):
            raise ending


def test_of_tensorstores_pages_the_cause_is_told():
    details = """OUT_OF_RANGE: Error opening "cast" driver: Error opening "zarr" driver: Error reading "step/.zarray" in
 OCDBT database at local file "/run/checkpoints/4/state/": Error reading Byte range [0, 918) of local file "/d/4f:b3":
 Requested byte range [0, 918) is not valid for value of size 0 [tensorstore_spec[1]='{"base": 1}']
 [tensorstore_spec='{}']"""
    with pytest.raises(UserError) as told, reading("run", "take another"):
        raise ValueError(details.replace("\n", ""))
    why = "step: Requested byte range [0, 918) is not valid for value of size 0"
    assert str(told.value) == f"run is damaged or half downloaded ({why}); take another."

    def read() -> None:
        """As orbax does, by which the cause is another fault."""
        try:
            raise ValueError('DATA_LOSS: Error reading "a.b/0.0" in OCDBT database at local file "/run/": CRC mismatch')
        except ValueError as cause:
            raise Exception("Encountered error while reading array index: (slice(0, 4, 1),). See full ...") from cause

    with pytest.raises(UserError, match=r"\(a\.b: CRC mismatch\)"), reading("run", "take another"):
        read()


def test_what_memory_cannot_hold_says_how_to_need_less():
    """As JAX says it of a device, and Python of the host."""
    with pytest.raises(jax.errors.JaxRuntimeError) as full:
        jax.jit(lambda: jnp.zeros((2**40, 2**10)).sum() + jnp.ones((2**40, 2**10))).lower().compile()()
    for fault in (full.value, MemoryError()):
        message = str(mistake_of(fault))
        assert message.startswith("There is not enough memory: ")
        assert "agent-tunix plan" in message
        assert "\nTraceback" not in message


@pytest.mark.parametrize(("platforms", "why"), [("cuda", "cuda"), ("gpus", "'gpus' is not in the list")])
def test_a_device_that_is_not_there_says_which_and_what_to_do(platforms, why):
    """In a process of its own, as JAX starts its devices only once; a GPU is hidden where there is one."""
    program = "import jax; from agent_tunix import cli\nwith cli.answering(): jax.devices()"
    hidden = {"JAX_PLATFORMS": platforms, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **hidden})
    assert ran.returncode == 2
    assert "No device can be started: " in ran.stderr
    assert why in ran.stderr
    assert "JAX_PLATFORMS=cpu" in ran.stderr
    assert "Traceback" not in ran.stderr
