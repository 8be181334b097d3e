"""Curve files, read by the protocol buffers and the checksum of tensorboardX."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event


def events_in(path: Path) -> list[Event]:
    """The events of a file, whose checks must be right."""
    data, found = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = data[12 : 12 + length]
        assert data[8:12] == masked(data[:8])
        assert data[12 + length : 16 + length] == masked(event)
        found.append(Event.FromString(event))
        data = data[16 + length :]
    return found


def masked(data: bytes) -> bytes:
    check = crc32c(data)
    return struct.pack("<I", ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF)
