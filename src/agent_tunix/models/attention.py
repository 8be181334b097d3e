"""Softmax attention of many tokens over segments of keys and values, with gradients.

A segment with fewer rows than the queries is shared by neighbouring rows. Positions decide who sees whom: -1 marks padding,
which no one attends to. There are two ways. On any device, and on a mesh of several, scores against each segment and one
softmax over all of them. On one NVIDIA GPU of the Hopper kind, where most of that is the moving of scores through memory,
cuDNN's attention, which never writes them down (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from agent_tunix.models import kernels, mesh

Past = tuple[jax.Array, jax.Array, jax.Array]  # keys and values [rows, S, K, N], and positions [rows, S]


def attend(q_BTHN: jax.Array, q_positions_BT: jax.Array, segments: Sequence[Past], window: jax.Array) -> jax.Array:
    """Of every token to all that it sees within the window: [B, T, H * N]."""
    way = _by_cudnn if _cudnn_serves(q_BTHN, segments) else _by_scores
    return way(q_BTHN, q_positions_BT, segments, window).reshape(*q_BTHN.shape[:2], -1)


def _cudnn_serves(q_BTHN: jax.Array, segments: Sequence[Past]) -> bool:
    """It wants even lengths, and knows no others."""
    T, S = q_BTHN.shape[1], sum(keys.shape[1] for keys, _, _ in segments)
    if mesh.several_devices() or kernels.capability() != kernels.HOPPER or q_BTHN.dtype != jnp.bfloat16:
        return False
    return T > 1 and T % 2 == 0 and S % 2 == 0


def _by_cudnn(q_BTHN, q_positions_BT, segments, window) -> jax.Array:
    B = len(q_BTHN)
    rows = [tuple(jnp.repeat(x, B // len(x), axis=0) for x in segment) for segment in segments]
    keys, values, positions_BS = (jnp.concatenate(parts, axis=1) for parts in zip(*rows, strict=True))
    seen_B1TS = _seen(q_positions_BT, positions_BS, window)[:, None]
    return jax.nn.dot_product_attention(q_BTHN, keys, values, mask=seen_B1TS, scale=1.0, implementation="cudnn")


def _by_scores(q_BTHN, q_positions_BT, segments, window) -> jax.Array:
    B, T, H, N = q_BTHN.shape
    scores = [_scores(q_BTHN, q_positions_BT, keys, positions, window) for keys, _, positions in segments]
    probs_BTHS = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTHN.dtype)
    out_BTHN, start = jnp.zeros_like(q_BTHN), 0
    for _, values, _ in segments:
        rows, length, heads, _ = values.shape
        share = probs_BTHS[..., start : start + length].reshape(rows, -1, heads, H // heads, length)
        out_BTHN += jnp.einsum("btkrs,bskn->btkrn", share, values).reshape(B, T, H, N)
        start += length
    return out_BTHN


def _scores(q_BTHN, q_positions_BT, keys, positions, window) -> jax.Array:
    """Masked float32 scores [B, T, H, S] against one segment."""
    B, T, H, N = q_BTHN.shape
    rows, length, heads, _ = keys.shape
    q = q_BTHN.reshape(rows, -1, heads, H // heads, N)
    scores = jnp.einsum("btkrn,bskn->btkrs", q, keys, preferred_element_type=jnp.float32)
    seen = _seen(q_positions_BT.reshape(rows, -1), positions, window)
    masked = jnp.where(seen[:, :, None, None, :], scores, jnp.finfo(jnp.float32).min)
    return masked.reshape(B, T, H, length)


def _seen(q_positions_BT, positions_BS, window) -> jax.Array:
    """Which slots each query sees: [B, T, S]."""
    distance = q_positions_BT[:, :, None] - positions_BS[:, None, :]
    return (positions_BS[:, None, :] >= 0) & (distance >= 0) & (distance < window)
