"""What a model is made of: the numbers that tell one from another, its weights, and what is kept of tokens already read."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from agent_tunix.models.quantization import Matrix
from agent_tunix.types import pytree

NO_WINDOW = 2**30  # as a sliding window, which then reaches as far as any text


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The numbers that tell one model of a family from another; hashable, so it is a compile-time constant."""

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_dim: int
    sliding_window: int
    global_every: int
    query_scale: float
    rope_local_base: float
    rope_global_base: float
    rope_global_factor: float
    norm_eps: float
    family: str = "gemma3"
    tied: bool = True  # whether the head is the embedding
    biases: tuple[str, ...] = ()  # the modules that add one
    rope_factors: tuple[float, ...] = ()  # by which each angle of global layers is divided; none: by nothing
    own: tuple[tuple[str, Any], ...] = ()  # what one family alone has, by name

    def is_global(self) -> np.ndarray:
        """For each layer, whether it attends to everything before it."""
        return np.arange(1, self.num_layers + 1) % self.global_every == 0

    def numbers(self) -> dict[str, Any]:
        """As configurations and runs record it: plain data, and the scale of queries as config.json has it."""
        found = dataclasses.asdict(self)
        found["query_pre_attn_scalar"] = round(found.pop("query_scale") ** -2, 6)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @property
    def query_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


def fields_of(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an `Architecture` that are recorded; raises ValueError for a name that none has."""
    found: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in numbers.items()}
    if (scalar := found.pop("query_pre_attn_scalar", None)) is not None:
        found["query_scale"] = scalar**-0.5
    if unknown := found.keys() - {field.name for field in dataclasses.fields(Architecture)}:
        raise ValueError(f"{sorted(unknown)[0]} is no number of an architecture")
    return found


Layers = dict[str, Matrix]
"""The weights of all layers by field, stacked: matrices are [L, in, out], or quantised; norms and biases [L, width]."""


@pytree
class Weights:
    """The weights of a model; `head_VD` is None where the embedding is the head too."""

    embed_VD: jax.Array
    layers: Layers
    final_norm_D: jax.Array
    head_VD: jax.Array | None = None

    @property
    def output_VD(self) -> jax.Array:  # noqa: N802  # as arrays are named
        """What hidden states are multiplied by to give logits."""
        return self.embed_VD if self.head_VD is None else self.head_VD

    def array(self, field: str) -> jax.Array:
        """What the layers have in a field that is not quantised."""
        return typing.cast(jax.Array, self.layers[field])


@pytree
class Segment:
    """Keys and values of tokens already read, with their positions; -1 is a slot not (yet) in use."""

    keys_LBSKN: jax.Array
    values_LBSKN: jax.Array
    positions_BS: jax.Array
