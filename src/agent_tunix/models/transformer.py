"""A transformer's forward pass, the same for all families but for their blocks (models/families).

Layers are stacked along a leading axis and run under `lax.scan`. What was read before is passed as segments of keys and
values (`past`). A segment with fewer rows than the queries is shared by neighbouring rows: a prompt is read once and serves
its whole group, in the rollout and, with gradients, in the update. Positions decide everything else: -1 marks padding.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from agent_tunix.kernels.attention import Lengths, Reach, attend, attend_groups, attend_to, cudnn_serves, places_of_groups
from agent_tunix.kernels.mesh import cut
from agent_tunix.kernels.norm_rope import rms_norm
from agent_tunix.models.architecture import Architecture, Segment, Weights
from agent_tunix.models.blocks import Layer
from agent_tunix.models.families.table import family_of
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts


def forward(
    weights: Weights,
    adapters: Adapters | None,
    arch: Architecture,
    tokens_BT: jax.Array,
    positions_BT: jax.Array,
    past: tuple[Segment, ...] = (),
) -> tuple[jax.Array, Segment]:
    """Reads tokens after `past`; returns the normalised hidden states and the segment these tokens make."""
    past_kv = tuple((segment.keys_LBSKN, segment.values_LBSKN) for segment in past)

    def read(q_BTHN, k_BTKN, v_BTKN, placing, past_kv, reach):
        q_BTHN, k_BTKN = placing(q_BTHN, k_BTKN)
        kept = k_BTKN, v_BTKN
        if not past:
            return attend(q_BTHN, *kept, positions_BT, reach), kept
        segments = [(k, v, segment.positions_BS) for (k, v), segment in zip(past_kv, past, strict=True)]
        return attend_to(q_BTHN, positions_BT, [*segments, (*kept, positions_BT)], reach), kept

    # With many tokens a device reads its own rows and is sent all weights; with one token, all rows with its own weights.
    stream = ("fsdp", None, None) if tokens_BT.shape[1] > 1 else (None, None, "fsdp")
    hidden_BTD, (keys, values) = _through(weights, adapters, arch, tokens_BT, positions_BT, stream, past_kv, read)
    return hidden_BTD, Segment(keys, values, positions_BT)


def forward_groups(
    weights: Weights, adapters: Adapters | None, arch: Architecture, prompts: Prompts, tokens_BC, positions_BC
) -> tuple[jax.Array, jax.Array]:
    """Hidden states of prompts, [P, S, D], and of their completions, [B, C, D], which share every product of a layer.

    A prompt and its group are one row, so that the rows of a policy lie together, and those of a device.
    """
    P, S = prompts.tokens_PS.shape
    lengths = Lengths(S, len(tokens_BC) // P)
    tokens = jnp.concatenate([prompts.tokens_PS, tokens_BC.reshape(P, -1)], axis=1)
    positions = jnp.concatenate([prompts.positions_PS, positions_BC.reshape(P, -1)], axis=1)

    queries = jax.ShapeDtypeStruct((*tokens.shape, arch.num_heads, arch.head_dim), weights.embed_VD.dtype)
    turned = family_of(arch).kernels and cudnn_serves(queries)

    def read(q, k, v, placing, _, reach):
        return attend_groups(q, k, v, positions, lengths, placing, reach, turned), None

    places = places_of_groups(positions, lengths, turned)
    hidden, _ = _through(weights, adapters, arch, tokens, places, ("fsdp", None, None), (), read)
    return lengths.apart(hidden)


def _through(weights, adapters, arch: Architecture, tokens_BT, places_BT, stream, past_kv, read):
    """Tokens through all layers: normalised hidden states, and what `read` keeps of every layer."""
    family = family_of(arch)
    x_BTD = cut(embed(weights, arch, tokens_BT), *stream)
    of_layers = rotations(arch, places_BT[..., None])

    @jax.checkpoint
    def layer(x_BTD, per_layer):
        w, lora, is_global, past_kv = per_layer
        angles = jax.tree.map(lambda near, far: jnp.where(is_global, far, near), *of_layers)
        reach = Reach(is_global, arch.sliding_window)
        return family.block(Layer(w, lora, arch, family.norm_offset, angles, past_kv, reach, read, stream), x_BTD)

    lora = adapters.by_module() if adapters is not None else {}
    x_BTD, kept = jax.lax.scan(layer, x_BTD, (weights.layers, lora, arch.is_global(), past_kv))
    return rms_norm(x_BTD, weights.final_norm_D, arch.norm_eps, family.norm_offset), kept


def embed(weights: Weights, arch: Architecture, tokens: jax.Array) -> jax.Array:
    x = weights.embed_VD[tokens]
    return x * jnp.asarray(math.sqrt(arch.embed_dim), x.dtype) if family_of(arch).scales_embedding else x


def unembed(weights: Weights, hidden: jax.Array) -> jax.Array:
    """Float32 logits over the vocabulary."""
    return jnp.einsum("...d,vd->...v", hidden, weights.output_VD, preferred_element_type=jnp.float32)


def empty_segment(arch: Architecture, batch: int, slots: int, dtype: jnp.dtype) -> Segment:
    """Room for `slots` tokens of `batch` sequences, none of them in use."""
    shape = (arch.num_layers, batch, slots, arch.num_kv_heads, arch.head_dim)
    return _cut(Segment(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.full((batch, slots), -1, jnp.int32)))


def write_segment(segment: Segment, new: Segment, slot: jax.Array) -> Segment:
    """Puts the tokens of `new` into `segment` from `slot` on."""
    written = Segment(
        jax.lax.dynamic_update_slice_in_dim(segment.keys_LBSKN, new.keys_LBSKN, slot, axis=2),
        jax.lax.dynamic_update_slice_in_dim(segment.values_LBSKN, new.values_LBSKN, slot, axis=2),
        jax.lax.dynamic_update_slice_in_dim(segment.positions_BS, new.positions_BS, slot, axis=1),
    )
    return _cut(written)


def rows_of(segment: Segment, rows_B: jax.Array) -> Segment:
    """Some sequences of a segment; one may be taken several times."""
    return Segment(segment.keys_LBSKN[:, rows_B], segment.values_LBSKN[:, rows_B], segment.positions_BS[rows_B])


def _cut(segment: Segment) -> Segment:
    keys, values = (cut(array, None, "fsdp", None, "tp") for array in (segment.keys_LBSKN, segment.values_LBSKN))
    return Segment(keys, values, cut(segment.positions_BS, "fsdp"))


def rotations(arch: Architecture, positions: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    """(cos, sin) of every angle of RoPE (Su et al., 2021), for local and for global layers; angles are a new last axis."""

    def angles(base: float, factor: float | jax.Array) -> tuple[jax.Array, jax.Array]:
        exponent = jnp.arange(0, arch.head_dim, 2, dtype=jnp.float32) / arch.head_dim
        angle = positions[..., None] / (factor * base**exponent)
        return jnp.cos(angle), jnp.sin(angle)

    far = jnp.asarray(arch.rope_factors, jnp.float32) if arch.rope_factors else arch.rope_global_factor
    return angles(arch.rope_local_base, 1.0), angles(arch.rope_global_base, far)
