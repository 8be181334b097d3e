"""Files that others may have written: opened and bounded here before they are parsed, so that none exhausts the machine.

What is asked for must be a regular file: a pipe or a device in its place would block, or never end. Each kind of file may
have the size that the largest of its kind have had, and some. What parses them raises what it likes: see `errors.reading`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, AnyStr, BinaryIO

# Bytes that a file may have.
SETTINGS = 2**16  # of YAML: a run's own have 5,000
JSON = 2**25  # the index of a model of 700 billion parameters has 9 million
TOKENIZER = 2**28  # Gemma's tokenizer.json has 33 million
RECORDS = 2**32  # of a run of millions of steps
LINE = 2**24  # of records, or of rows of data: a line of metrics has 1,000
BUFFER = 2**18
# What orbax and zarr describe arrays in.
DESCRIPTIONS = {"metadata", "_METADATA", "_CHECKPOINT_METADATA", "_sharding", ".zarray", "zarr.json", "manifest.ocdbt"}


def open_regular(path: Path | str, most: int | None = None) -> BinaryIO:
    """Opens a regular file for reading, and nothing else; never waits for it. It may have so many bytes, or any number."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if why := _refused(os.fstat(descriptor), most):
        os.close(descriptor)
        raise ValueError(f"it {why}")
    return os.fdopen(descriptor, "rb", BUFFER)


def _refused(found: os.stat_result, most: int | None) -> str | None:
    """Why a file is not read, if it is not."""
    if not stat.S_ISREG(found.st_mode):
        return "is no regular file"
    too_large = most is not None and found.st_size > most
    return f"has {found.st_size:,} bytes, where {most:,} are the most that it may have" if too_large else None


def read_bytes(path: Path, most: int) -> bytes:
    """A whole file, which may have so many bytes."""
    with open_regular(path, most) as file:
        return file.read(most)


def read_text(path: Path, most: int) -> str:
    return read_bytes(path, most).decode("utf-8")


def read_json(path: Path) -> Any:
    return json.loads(read_text(path, JSON))


def lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of an open file, none of which may be longer than LINE."""
    number = 1
    while line := file.readline(LINE + 1):
        if len(line) > LINE:
            raise ValueError(f"line {number} is longer than {LINE:,} characters")
        yield line
        number += 1


def short_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file less those that are longer than LINE, without their ends."""
    with open_regular(path, RECORDS) as file:
        while line := file.readline(LINE + 1):
            if len(line) <= LINE:
                yield line.removesuffix(b"\n")
                continue
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE)


def refuse_traps(folder: Path) -> None:
    """Refuses a folder that a library is to read, where it would wait for a pipe or take gigabytes for a description."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if not os.path.exists(path):
                raise ValueError(f"{name!r} is a link that leads nowhere")
            if why := _refused(os.stat(path), JSON if name in DESCRIPTIONS else None):
                raise ValueError(f"{name!r} {why}")
