"""Curves as TensorBoard reads them: a file of records, each an event by the layout of TensorFlow's protocol buffers.

Written by hand because tensorboardX 2.6.5 still loads PyTorch where that is installed, seven seconds of every start.
A record is its length, a check of the length, the event, and a check of the event.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agent_tunix.training.loggers.base import Logger

CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, its bits reversed
NAME = "events.out.tfevents."  # followed by the time; TensorBoard reads files in the order of their names
VERSION = b"brain.Event:2"  # from this version on, the start of a session makes TensorBoard drop later steps


class TensorBoard(Logger):
    """A new file of a run's curves; TensorBoard reads those of one folder in the order in which they were begun."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        curves = folder / "tensorboard"
        curves.mkdir(parents=True, exist_ok=True)
        self._file = open(curves / _next_name(curves), "wb")  # noqa: SIM115
        self._write(_field(3, VERSION))

    def rewind(self, step: int) -> None:
        """Has TensorBoard forget what was said so far of the steps after this one."""
        session_starts = _number(1, 1)
        self._write(_number(2, step + 1) + _field(7, session_starts))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        summary = b"".join(_field(1, _field(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(_number(2, step) + _field(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        event = _double(1, time.time()) + event
        length = struct.pack("<Q", len(event))
        self._file.write(length + _check(length) + event + _check(event))
        self._file.flush()


def _next_name(folder: Path) -> str:
    """One that comes after those of the folder, also where the clock was set back since they were begun."""
    last = max((path.name for path in folder.glob(f"{NAME}*")), default="")
    name = f"{NAME}{time.time():.6f}"
    return name if name > last else f"{last}.1"


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _float(number: int, value: float) -> bytes:
    with np.errstate(over="ignore"):  # what is too large for this type is infinite
        return _varint(number << 3 | 5) + np.array(value).astype("<f4").tobytes()


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; all but the last byte have the highest bit set."""
    if value < 0x80:
        return bytes((value,))
    return bytes((value & 0x7F | 0x80,)) + _varint(value >> 7)


def _check(data: bytes) -> bytes:
    """CRC-32C, rotated by 15 bits and offset by a constant, as the format requires."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[crc & 0xFF ^ byte]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
    return byte


TABLE = tuple(map(_remainder, range(256)))
