"""What a .gguf file begins with: its fields, and where its tensors lie.

The format is llama.cpp's, versions 2 and 3, little-endian. The gguf library reads it too, but makes arrays of every single
token and score, which for Gemma's 262,144 takes fifty times as long (benchmarks/2026-11-15-real-270m.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from agent_tunix.files import open_regular

MAGIC, VERSIONS = b"GGUF", (2, 3)
TEXT, ARRAY = 8, 9  # kinds of value, beside numbers
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as `struct` has them
MOST_NAMES, MOST_ELEMENTS, MOST_AXES = 2**17, 2**23, 4  # of tensors and of fields, in all arrays, of a tensor
ALIGNMENT = 32  # of tensors, unless a field says otherwise


class Tensor(NamedTuple):
    """`shape` has rows before columns; `rows` are the bytes of each, as the file quantises them."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    rows: np.ndarray


class Header:
    """The fields of a file, texts as bytes, and its tensors, which stay in the file until they are looked at."""

    def __init__(self, path: Path):
        with open_regular(path) as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at, self._elements = len(MAGIC), 0
        if self._data[: self._at] != MAGIC or self._number("I") not in VERSIONS:
            raise ValueError(f"no GGUF of version {' or '.join(map(str, VERSIONS))}")
        tensors, fields = self._number("Q"), self._number("Q")
        if max(tensors, fields) > MOST_NAMES:
            raise ValueError(f"it says that it has {tensors} tensors and {fields} fields")
        self.fields = {self._text().decode(): self._value(self._number("I")) for _ in range(fields)}
        found = {self._text().decode(): self._place() for _ in range(tensors)}
        if len(self.fields) < fields or len(found) < tensors:
            raise ValueError("a name stands there twice")
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._tensor(start, *place) for name, place in found.items()}

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return value

    def _text(self) -> bytes:
        end = self._number("Q") + self._at
        if end > len(self._data):
            raise ValueError("a text ends after the file")
        text, self._at = self._data[self._at : end], end
        return text

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._number(NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        self._elements += count
        if self._elements > MOST_ELEMENTS:
            raise ValueError(f"it says that its arrays have {self._elements} elements, or more")
        if kind in (TEXT, ARRAY):
            return [self._value(kind) for _ in range(count)]
        array = np.frombuffer(self._data, f"<{NUMBERS[kind]}", count, self._at)
        self._at += array.nbytes
        return array.tolist()

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """The shape of a tensor, the number of its kind, and how far behind the header it lies."""
        if not 0 < (axes := self._number("I")) <= MOST_AXES:
            raise ValueError(f"it says that a tensor has {axes} axes")
        shape = tuple(self._number("Q") for _ in range(axes))
        return shape[::-1], self._number("I"), self._number("Q")

    def _tensor(self, start: int, shape: tuple[int, ...], number: int, offset: int) -> Tensor:
        kind = GGMLQuantizationType(number)
        *counts, width = gguf.quant_shape_to_byte_shape(shape, kind)
        rows = math.prod(counts)
        return Tensor(kind, shape, np.frombuffer(self._data, np.uint8, rows * width, start + offset).reshape(rows, width))
