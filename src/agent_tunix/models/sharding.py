"""How arrays lie on a mesh of devices: one table for all that is loaded, trained, saved and computed.

The mesh has two axes. Over `fsdp` go the rows of a batch, and one axis of every matrix, which is gathered a layer at a
time where it is used (Zhao et al., 2023, arXiv:2304.11277). Over `tp` go heads, the feed-forward layer and the
vocabulary, of which every device computes its own part (Shoeybi et al., 2019, arXiv:1909.08053). The vocabulary is cut
by both: its embedding is then never gathered, as hidden states, which are far smaller, travel instead.

An axis of an array that its axes of the mesh do not divide is cut by as many of them as do, and else kept whole; so
are the keys and values of fewer heads than `tp`. Programs are written once: on one device all of this does nothing.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from agent_tunix.config.mesh_shape import AXES, PARTED_BY_TP, Sizes, fitting_shapes, shown, sizes_of
from agent_tunix.config.schema import ModelSection
from agent_tunix.errors import UserError
from agent_tunix.kernels.mesh import EVERYWHERE, Cut, fitting, several_devices
from agent_tunix.models.architecture import Architecture, Weights

Tree = TypeVar("Tree")
IN_OUT: Mapping[str, tuple[str, str]] = {  # what cuts the input and the output of a matrix
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("fsdp", "tp")),
    **dict.fromkeys(("o_proj", "down_proj"), ("tp", "fsdp")),
}


def make_mesh(section: ModelSection, micro_batch: int | None = None) -> Mesh:
    """The mesh that a configuration asks for; refuses one that takes more devices than there are.

    Several processes must all have a part in it, so that it takes all of their devices.
    """
    sizes, there, processes = sizes_of(section.mesh_shape), jax.device_count(), jax.process_count()
    parted = {key: (section.architecture or {}).get(key, 1) for key in PARTED_BY_TP}
    if math.prod(sizes) > there or (processes > 1 and math.prod(sizes) != there):
        have = f"this machine has {there}" if processes == 1 else f"{processes} processes have {there}, and must use all"
        raise UserError(
            f"model.mesh_shape={shown(sizes)} needs {math.prod(sizes)} devices; {have}.\n"
            f"Shapes that fit: {fitting_shapes(there, parted, micro_batch, least=there if processes > 1 else 1)}\n"
            "fsdp must divide training.micro_batch_size, and tp the heads and the feed-forward layer."
        )
    return mesh_of_sizes(sizes)


def mesh_of_sizes(sizes: Sizes = (1, 1)) -> Mesh:
    return jax.make_mesh(sizes, AXES, (AxisType.Auto,) * len(AXES), devices=jax.devices()[: math.prod(sizes)])


def mesh_of(weights: Weights) -> Mesh:
    """The mesh on which weights were placed."""
    return typing.cast(Mesh, typing.cast(NamedSharding, weights.embed_VD.sharding).mesh)


def on_mesh_of(weights: Weights) -> AbstractContextManager[Any]:
    """A context in which programs are cut over the mesh of these weights, if they lie on one."""
    placed = isinstance(weights.embed_VD.sharding, NamedSharding)
    return jax.set_mesh(mesh_of(weights)) if placed else nullcontext()


def shardings(tree: Tree, arch: Architecture, mesh: Mesh) -> Tree:
    """Where the arrays of weights, adapters or a training state belong, as a tree of their structure."""

    def sharding(path: Any, array: Any) -> NamedSharding:
        return NamedSharding(mesh, spec(_names(path), array.shape, arch, mesh.shape))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def place(tree: Tree, arch: Architecture, mesh: Mesh) -> Tree:
    return jax.device_put(tree, shardings(tree, arch, mesh))


def lay(array: np.ndarray | jax.Array, where: NamedSharding) -> jax.Array:
    """Places an array that every process has. Each of several places its part; `device_put` would compare all copies."""
    if where.is_fully_addressable:
        return jax.device_put(array, where)
    return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def lay_rows(rows: Callable[[slice], np.ndarray], shape: tuple[int, ...], mesh: Mesh) -> jax.Array:
    """An array of a batch from its rows, of which a process is asked for those that its devices hold."""
    where = NamedSharding(mesh, fitting(("fsdp",), shape, mesh.shape))
    return jax.make_array_from_callback(shape, where, lambda index: rows(typing.cast(Any, index)[0]))


def rows_to_come(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    """The shape and place of an array of a batch that is yet to be made."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, fitting(("fsdp",), shape, mesh.shape)))


def abstract(make: Callable[..., Tree], arch: Architecture, mesh: Mesh, /, *given: Any, **static: Any) -> Tree:
    """The shapes and places of what a function makes, without making it; asked again, it is not traced again."""
    shapes = jax.jit(make, static_argnames=tuple(static)).eval_shape(*given, **static)
    return jax.tree.map(
        lambda array, where: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where),
        shapes,
        shardings(shapes, arch, mesh),
    )


def make_in_place(make: Callable[..., Tree], arch: Architecture, mesh: Mesh, /, *given: Any, **static: Any) -> Tree:
    """What a function makes, made where it belongs: no device ever holds all of it. Made again, it is not compiled again."""
    where = jax.tree.map(lambda made: made.sharding, abstract(make, arch, mesh, *given, **static))
    return jax.jit(make, static_argnames=tuple(static), out_shardings=where)(*given, **static)


def keep_in_place(tree: Tree, arch: Architecture) -> Tree:
    """Inside of a program: makes what it returns lie where `place` would put it."""

    def kept(path: Any, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, spec(_names(path), array.shape, arch, mesh.shape))

    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree_util.tree_map_with_path(kept, tree) if several_devices() else tree


def spec(names: tuple[str, ...], shape: tuple[int, ...], arch: Architecture, sizes: Mapping[str, int]) -> PartitionSpec:
    """How an array is cut by the names that lead to it. Moments have the names of what they are the moments of.

    Codes and scales of a quantised matrix have its blocks of inputs for an axis, which is cut as its inputs are.
    What has another number of axes than the table says, as a factored moment has, is small and kept whole.
    """
    blocks = names[-1:] in (("codes",), ("scales",))
    *_, holder, name = ("", "", *(names[:-1] if blocks else names))
    cuts: tuple[Cut, ...] = (EVERYWHERE, None) if name in ("embed_VD", "head_VD") else ()
    if name in IN_OUT:
        into, out = IN_OUT[name]
        whole_heads = name not in ("k_proj", "v_proj") or arch.num_kv_heads % sizes["tp"] == 0
        matrix = (None, into, out if whole_heads else None)
        cuts = {"a": (*matrix[:2], None), "b": (None, None, matrix[2]), "magnitudes": (None, matrix[2])}.get(holder, matrix)
        cuts = (*cuts[:2], None, cuts[2]) if blocks else cuts
    return fitting(cuts, shape, sizes) if len(cuts) == len(shape) else PartitionSpec()


def _names(path: Any) -> tuple[str, ...]:
    return tuple(str(getattr(key, "name", getattr(key, "key", ""))) for key in path)
