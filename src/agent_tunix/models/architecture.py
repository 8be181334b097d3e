"""What a model is made of: the numbers that tell one from another, its weights, and what is kept of tokens already read."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from agent_tunix.models.quantization import Matrix
from agent_tunix.types import pytree


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The numbers that tell one Gemma 3 from another; hashable, so it is a compile-time constant."""

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

    def is_global(self) -> np.ndarray:
        """For each layer, whether it attends to everything before it."""
        return np.arange(1, self.num_layers + 1) % self.global_every == 0


@pytree
class Layers:
    """The weights of all layers, stacked; matrices are [L, in, out], or quantised."""

    input_norm: jax.Array
    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    q_norm: jax.Array
    k_norm: jax.Array
    post_attention_norm: jax.Array
    pre_feedforward_norm: jax.Array
    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix
    post_feedforward_norm: jax.Array


@pytree
class Weights:
    embed_VD: jax.Array
    layers: Layers
    final_norm_D: jax.Array


@pytree
class Segment:
    """Keys and values of tokens already read, with their positions; -1 is a slot not (yet) in use."""

    keys_LBSKN: jax.Array
    values_LBSKN: jax.Array
    positions_BS: jax.Array
