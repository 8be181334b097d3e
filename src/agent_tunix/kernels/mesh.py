"""Arrays on the mesh that a program is traced on; on one device all of this does nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

Cut = str | tuple[str, ...] | None  # the axes of the mesh that cut one axis of an array
EVERYWHERE = ("tp", "fsdp")


def several_devices() -> bool:
    """Whether the program being made is one for several devices."""
    return jax.sharding.get_abstract_mesh().size > 1


def cut(array: jax.Array, *cuts: Cut) -> jax.Array:
    """Inside of a program: an intermediate array with its leading axes cut by `cuts`, and the others whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if not several_devices():
        return array
    return jax.lax.with_sharding_constraint(array, fitting(cuts, array.shape, mesh.shape))


def by_rows(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Inside of a program: applies a function that treats every row by itself, with each row whole on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if not several_devices():
        return function(*arrays)
    rows = fitting((EVERYWHERE,), arrays[0].shape, mesh.shape)
    # Unchecked, as a kernel does not say how its results vary over the mesh: as its rows do.
    return jax.shard_map(function, in_specs=rows, out_specs=rows, check_vma=False)(*arrays)


def fitting(cuts: tuple[Cut, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    """For every axis of an array the axes of the mesh in `cuts`, as many as divide it.

    In the form in which programs return their shardings, so that the next call is not compiled for another.
    """

    def dividing(wanted: Cut, length: int) -> Cut:
        axes = tuple(axis for axis in _axes(wanted) if sizes[axis] > 1)
        while length % math.prod(sizes[axis] for axis in axes):
            axes = axes[:-1]
        return axes if len(axes) > 1 else axes[0] if axes else None

    found = list(map(dividing, cuts, shape))
    while found and found[-1] is None:
        found.pop()
    return PartitionSpec(*found)


def share(spec: PartitionSpec, sizes: Mapping[str, int]) -> float:
    """The part of an array that one device holds."""
    return 1 / math.prod(sizes[axis] for wanted in spec for axis in _axes(wanted))


def _axes(wanted: Cut) -> tuple[str, ...]:
    return (wanted,) if isinstance(wanted, str) else wanted or ()
