"""From checkpoints to our stacked weights and back: Hugging Face's layout, GGUF files, and Kaggle's Orbax checkpoints.

Tensors are read layer by layer. Each is put on its devices, every device getting the part that it is to hold, and written
into its place in the stack; so no more than a layer ever exists twice, or unquantised where matrices are quantised.
What a checkpoint lacks, has too many of or has in a wrong shape is found when it is opened, before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.progress import Progress
from safetensors.numpy import save_file

from agent_tunix.console import Screen
from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture, Layers, Weights
from agent_tunix.models.checkpoints import safetensors
from agent_tunix.models.checkpoints.checksum import Inspection, finite
from agent_tunix.models.checkpoints.gguf import GgufFile
from agent_tunix.models.checkpoints.orbax import OrbaxFolder, is_orbax
from agent_tunix.models.checkpoints.safetensors import EMBEDDING, FINAL_NORM, HEAD
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, huggingface_name, module_shape
from agent_tunix.models.quantization import BaseDtype, quantise, quantise_stack
from agent_tunix.models.sharding import abstract, lay, make_in_place, mesh_of_sizes, spec

NAMED = 6  # tensors that a message lists before it only counts them
SHARD_BYTES = 4 * 2**30
MATRICES = ATTENTION + FEED_FORWARD
BIAS = "_bias"  # after a module's name, the field of its bias


class Tensors(Protocol):
    """A checkpoint's text tensors under the names of transformers' text models, matrices [out, in]."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str, dtype: np.dtype) -> np.ndarray: ...


def read_architecture(checkpoint: Path, given: Mapping[str, Any], family: str | None = None) -> Architecture:
    """The architecture by the checkpoint's own account.

    A number that its format does not record is as it is given or, where it is not, as in other models of the family.
    """
    if checkpoint.suffix == ".gguf":
        return GgufFile(checkpoint, family).architecture(given)
    if is_orbax(checkpoint):
        return OrbaxFolder(checkpoint).architecture(given)
    return safetensors.read_architecture(checkpoint, family)


def load_weights(
    checkpoint: Path,
    arch: Architecture,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    base_dtype: BaseDtype | None = None,
) -> Weights:
    """Reads every tensor of a checkpoint once, straight into the stacked layout on the mesh; without one, on one device."""
    return open_weights(checkpoint, arch, dtype, mesh or mesh_of_sizes(), base_dtype)()[0]


def open_weights(
    checkpoint: Path, arch: Architecture, dtype: jnp.dtype, mesh: Mesh, base_dtype: BaseDtype | None
) -> Callable[[], tuple[Weights, int]]:
    """Checks that a checkpoint has all tensors of its architecture; returns what reads them, and their checksum."""
    tensors = open_tensors(checkpoint, arch)

    def read() -> tuple[Weights, int]:
        inspection = Inspection(checkpoint)
        with _progress(f"loading {checkpoint.name}", len(tensors.shapes)) as advance:

            def tensor(name: str, _: tuple[int, ...]) -> np.ndarray:
                advance()
                return inspection.seen(tensors.read(name, np.dtype(dtype)))

            weights = _assemble(arch, dtype, tensor, mesh, base_dtype)
        inspection.agree()
        inspection.refuse(_not_finite(weights, arch))
        return weights, inspection.checksum

    return read


def open_tensors(checkpoint: Path, arch: Architecture) -> Tensors:
    """A checkpoint's tensors, of which none is read yet; they must be those of its architecture."""
    tensors = _open(checkpoint, arch)
    _check(checkpoint, tensors.shapes, tensor_shapes(arch))
    return tensors


def _open(checkpoint: Path, arch: Architecture) -> Tensors:
    if checkpoint.suffix == ".gguf":
        return GgufFile(checkpoint)
    return OrbaxFolder(checkpoint) if is_orbax(checkpoint) else safetensors.SafetensorsFolder(checkpoint, arch.tied)


def fields(arch: Architecture) -> tuple[str, ...]:
    """What a layer has, in the order in which it is read: norms, biases and matrices."""
    return (*family_of(arch).norms, *(f"{module}{BIAS}" for module in arch.biases), *MATRICES)


def tensor_name(arch: Architecture, field: str, layer: int) -> str:
    """What Hugging Face calls the slice of a stacked field that belongs to one layer."""
    if field.endswith(BIAS):
        return f"{huggingface_name(layer, field.removesuffix(BIAS))}.bias"
    norms = family_of(arch).norms
    return f"model.layers.{layer}.{norms[field][0]}.weight" if field in norms else f"{huggingface_name(layer, field)}.weight"


def tensor_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape, [out, in] for matrices, in the order they are written."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, arch.embed_dim)}
    for layer in range(arch.num_layers):
        for field in fields(arch):
            shapes[tensor_name(arch, field, layer)] = _layer_shape(arch, field)[::-1]
    head = {} if arch.tied else {HEAD: (arch.vocab_size, arch.embed_dim)}
    return shapes | {FINAL_NORM: (arch.embed_dim,)} | head


def parameters(arch: Architecture) -> int:
    """How many numbers the weights of a model are."""
    return sum(math.prod(shape) for shape in tensor_shapes(arch).values())


def _layer_shape(arch: Architecture, field: str) -> tuple[int, ...]:
    if field.endswith(BIAS):
        return module_shape(arch, field.removesuffix(BIAS))[1:]
    norms = family_of(arch).norms
    return (getattr(arch, norms[field][1]),) if field in norms else module_shape(arch, field)


def _check(checkpoint: Path, found: Mapping[str, tuple], expected: Mapping[str, tuple]) -> None:
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    wrong = [
        f"{name} has shape {list(found[name])}, the architecture asks for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    faults = [
        f"{what}: {', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if len(names) > NAMED else ''}"
        for what, names in (("missing", missing), ("unknown", extra), ("wrong", wrong))
        if names
    ]
    if faults:
        raise UserError(f"{checkpoint} does not hold the tensors of its architecture.\n  " + "\n  ".join(faults))


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing elsewhere; yields the function that advances it by one."""
    console = Screen(stderr=True)
    with Progress(
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@partial(jax.jit, donate_argnums=0, static_argnames="base_dtype")
def _write(stacks: Layers, layer: int, tensors: dict[str, jax.Array], base_dtype: BaseDtype | None) -> Layers:
    """Puts the tensors of one layer, stored [out, in], into the stacks, in place."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(whole, part.astype(whole.dtype), layer, axis=0)

    def held(field: str) -> Any:
        return quantise(tensors[field].T, base_dtype) if base_dtype and field in MATRICES else tensors[field].T

    return jax.tree.map(put, stacks, {field: held(field) for field in tensors})


def _not_finite(weights: Weights, arch: Architecture) -> list[str]:
    """The names of tensors with numbers that are not finite."""
    good = jax.device_get(finite(weights))
    by_name = {EMBEDDING: good.embed_VD, FINAL_NORM: good.final_norm_D}
    by_name |= {} if arch.tied else {HEAD: good.head_VD}
    for field in fields(arch):
        by_name |= {tensor_name(arch, field, layer): yes for layer, yes in enumerate(good.layers[field])}
    return [name for name, yes in by_name.items() if not yes]


def weight_shapes(arch: Architecture, dtype: jnp.dtype, mesh: Mesh, base_dtype: BaseDtype | None = None) -> Weights:
    """The shapes of weights and their places on the mesh."""

    def stacked(field: str) -> Any:
        zeros = jnp.zeros((arch.num_layers, *_layer_shape(arch, field)), dtype)
        return zeros if base_dtype is None or field not in MATRICES else quantise(zeros, base_dtype)

    def blank() -> Weights:
        return Weights(
            layers={field: stacked(field) for field in fields(arch)},
            embed_VD=jnp.zeros((arch.vocab_size, arch.embed_dim), dtype),
            final_norm_D=jnp.zeros(arch.embed_dim, dtype),
            head_VD=None if arch.tied else jnp.zeros((arch.vocab_size, arch.embed_dim), dtype),
        )

    return abstract(blank, arch, mesh)


def _assemble(
    arch: Architecture,
    dtype: jnp.dtype,
    tensor: Callable[[str, tuple[int, ...]], np.ndarray | jax.Array],
    mesh: Mesh,
    base_dtype: BaseDtype | None,
) -> Weights:
    """Weights, put together from one tensor after another."""
    shapes = weight_shapes(arch, dtype, mesh, base_dtype)
    stacks = make_in_place(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes.layers), arch, mesh)

    def placed(field: str, name: str) -> jax.Array:
        like = getattr(shapes, field)
        return lay(tensor(name, like.shape).astype(dtype), like.sharding)

    def of_layer(layer: int) -> dict[str, jax.Array]:
        found = {}
        for field in fields(arch):
            shape = (arch.num_layers, *_layer_shape(arch, field))
            cuts = (*spec((field,), shape, arch, mesh.shape), *[None] * len(shape))[1 : len(shape)]
            part = NamedSharding(mesh, PartitionSpec(*reversed(cuts)))
            found[field] = lay(tensor(tensor_name(arch, field, layer), shape[:0:-1]), part)
        return found

    for layer in range(arch.num_layers):
        # Waiting keeps layers that are read faster than they are written from piling up.
        stacks = jax.block_until_ready(_write(stacks, layer, of_layer(layer), base_dtype))
    return Weights(
        layers=stacks,
        embed_VD=placed("embed_VD", EMBEDDING),
        final_norm_D=placed("final_norm_D", FINAL_NORM),
        head_VD=None if arch.tied else placed("head_VD", HEAD),
    )


def quantised(weights: Weights, base_dtype: BaseDtype) -> Weights:
    """Weights that come from no checkpoint, quantised as loading would quantise them."""
    matrices = {module: quantise_stack(weights.array(module), base_dtype) for module in MATRICES}
    return dataclasses.replace(weights, layers=weights.layers | matrices)


def init_weights(
    key: jax.Array, arch: Architecture, dtype: jnp.dtype = jnp.float32, base_dtype: BaseDtype | None = None
) -> Weights:
    """Random weights of an architecture, each matrix of variance 1 / in; norms are one, biases zero."""
    matrices = [tensor_name(arch, field, layer) for field in MATRICES for layer in range(arch.num_layers)]
    drawn = [*matrices, EMBEDDING, *([] if arch.tied else [HEAD])]
    keys, one = dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True)), 1.0 - family_of(arch).norm_offset

    def tensor(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name in keys:
            return jax.random.normal(keys[name], shape) * shape[1] ** -0.5
        return jnp.full(shape, 0.0 if name.endswith(".bias") else one, dtype)

    return _assemble(arch, dtype, tensor, mesh_of_sizes(), base_dtype)


def save_weights(folder: Path, weights: Weights, arch: Architecture, dtype: jnp.dtype) -> None:
    """Writes config.json and safetensors that transformers loads."""
    save_tensors(folder, arch, dtype, partial(stacked_tensor, weights, arch))


def save_tensors(
    folder: Path,
    arch: Architecture,
    dtype: jnp.dtype,
    tensor: Callable[[str], jax.Array],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """As `save_weights`, but asks for one tensor after another by its name, and holds no more than a shard of them."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: int(np.prod(shape)) * jnp.dtype(dtype).itemsize for name, shape in tensor_shapes(arch).items()}
    shards = _shards(sizes, shard_bytes)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {name: np.ascontiguousarray(tensor(name), dtype) for name in names}
        save_file(values, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        (folder / safetensors.INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = safetensors.config_of(arch, jnp.dtype(dtype).name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, cut so that no shard is larger than the limit unless a single tensor is."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def stacked_tensor(weights: Weights, arch: Architecture, name: str) -> jax.Array:
    """One tensor of the stacked weights by Hugging Face's name, [out, in] for matrices."""
    whole = {EMBEDDING: weights.embed_VD, FINAL_NORM: weights.final_norm_D, HEAD: weights.head_VD}
    if name in whole:
        return whole[name]  # type: ignore[return-value]  # a head where it is not tied
    layer = int(name.split(".")[2])
    field = next(field for field in fields(arch) if tensor_name(arch, field, layer) == name)
    return weights.array(field)[layer].T
