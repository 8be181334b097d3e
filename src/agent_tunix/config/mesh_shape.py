"""The mesh of devices in the configuration: how its shape is written, and which shapes fit a model and a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

AXES = ("fsdp", "tp")
PARTED_BY_TP = ("num_heads", "hidden_dim")  # numbers of the architecture that tp must divide
MOST = 2**16  # devices along an axis
Sizes = tuple[int, int]


def sizes_of(mesh_shape: Any) -> Sizes:
    """(fsdp, tp) of a `model.mesh_shape`, which may leave one axis out; raises ValueError where it is not written as one."""
    match mesh_shape:
        case [[*sizes], [*axes]] if axes and axes == [axis for axis in AXES if axis in axes] and len(sizes) == len(axes):
            if all(type(size) is int and 0 < size <= MOST for size in sizes):
                named = dict(zip(axes, sizes, strict=True))
                return named.get("fsdp", 1), named.get("tp", 1)
    raise ValueError(
        f"must be [[f,t],[fsdp,tp]] with whole numbers from 1 to {MOST}, as in [[1,1],[fsdp,tp]] for one device"
    )


def shown(sizes: Sizes) -> str:
    """A shape as it is given on the command line."""
    return f"[[{sizes[0]},{sizes[1]}],[{','.join(AXES)}]]"


def faults(sizes: Sizes, parted: dict[str, int], micro_batch: int | None) -> Iterator[str]:
    """What is wrong with a mesh for a model whose `parted` numbers tp must divide, with the shapes that would be right.

    Without a micro-batch nothing is trained, and fsdp may be anything.
    """
    fsdp, tp = sizes
    undivided = " and ".join(f"{name}={number}" for name, number in parted.items() if number % tp)
    if undivided:
        right = [(fsdp, t) for t in range(1, tp) if not any(number % t for number in parted.values())]
        yield f"model.mesh_shape={shown(sizes)}: tp={tp} does not divide {undivided}; {_listed(right)} would fit"
    if micro_batch and micro_batch % fsdp:
        right = [(f, tp) for f in range(1, fsdp) if micro_batch % f == 0]
        yield (
            f"model.mesh_shape={shown(sizes)}: fsdp={fsdp} does not divide training.micro_batch_size={micro_batch}; "
            f"make that a multiple of {fsdp}, or {_listed(right)} would fit"
        )


def fitting_shapes(devices: int, parted: dict[str, int], micro_batch: int | None, least: int = 1) -> str:
    """The shapes for so many devices, and no fewer than `least`, that have no faults, those of most devices first."""
    shapes = [(fsdp, tp) for fsdp in range(1, devices + 1) for tp in range(1, devices // fsdp + 1)]
    right = [s for s in shapes if math.prod(s) >= least and not any(faults(s, parted, micro_batch))]
    return _listed(sorted(right, key=lambda sizes: -math.prod(sizes)))


def _listed(shapes: list[Sizes], named: int = 8) -> str:
    return (", ".join(map(shown, shapes[:named])) or "none") + (" ..." if len(shapes) > named else "")
