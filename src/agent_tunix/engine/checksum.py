"""Checksums of a state's arrays, the same however they lie on devices: each process sums up the parts that it holds.

An array is read as whole numbers, and its sum is that of every number times a weight of its place, modulo 2^64. Weights are
odd, so a single number cannot change unnoticed. The weight of a place is the product of one for each axis, which makes this
as fast as the memory is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

Entry = list[Any]  # of an array: its type, its shape and its sum


def digest(record: Mapping[str, Any]) -> str:
    """A text that tells a record from any other that JSON can hold."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def described(tree: Any) -> dict[str, Entry]:
    """The type and the shape of every array, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): [str(x.dtype), list(x.shape)] for path, x in leaves}


def summed(tree: Any) -> dict[str, Entry]:
    """As `described`, with the sums. Several processes must call it together."""
    sums = np.array([_sum_of_parts(leaf) for leaf in jax.tree.leaves(tree)], np.uint64)
    if jax.process_count() > 1:
        everyones = multihost_utils.process_allgather(sums.view(np.uint32))  # JAX would cut 64 bits
        sums = everyones.view(np.uint64).sum(axis=0, dtype=np.uint64)
    return {name: [*what, f"{total:016x}"] for (name, what), total in zip(described(tree).items(), sums, strict=True)}


def _sum_of_parts(array: jax.Array | np.ndarray) -> int:
    return sum(_sum(numbers, starts) for starts, numbers in _parts(array)) % 2**64


def _parts(array: jax.Array | np.ndarray) -> Iterator[tuple[list[int], np.ndarray]]:
    """What this process holds of an array, and where each part begins; of several copies the first counts."""
    if not isinstance(array, jax.Array):
        if jax.process_index() == 0:  # as every process has it
            yield [0] * array.ndim, array
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], np.asarray(shard.data)


def _sum(numbers: np.ndarray, starts: list[int]) -> int:
    total = numbers.view(f"u{numbers.dtype.itemsize}")
    for axis in reversed(range(total.ndim)):
        weights = _weights(axis, starts[axis], total.shape[axis])
        total = np.einsum("...i,i->...", total, weights, dtype=np.uint64)
    return int(total)


def _weights(axis: int, start: int, count: int) -> np.ndarray:
    """Odd numbers of 64 bits that look random (splitmix64)."""
    mixed = np.arange(start, start + count, dtype=np.uint64) + np.uint64(axis << 48)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)
