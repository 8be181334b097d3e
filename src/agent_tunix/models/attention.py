"""Softmax attention of many tokens over segments of keys and values, with gradients.

A segment with fewer rows than the queries is shared by neighbouring rows. Positions decide who sees whom: -1 marks padding,
which no one attends to. There are two ways. On any device, and on a mesh of several, scores against each segment and one
softmax over all of them. On one NVIDIA GPU of the Hopper kind, where most of that is the moving of scores through memory,
cuDNN's attention, which never writes them down (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp

from agent_tunix.models import kernels, mesh

CUDNN_HEAD = 256  # the largest head that cuDNN takes; any is to be of eights

Past = tuple[jax.Array, jax.Array, jax.Array]  # keys and values [rows, S, K, N], and positions [rows, S]


def attend(q_BTHN: jax.Array, q_positions_BT: jax.Array, segments: Sequence[Past], window: jax.Array) -> jax.Array:
    """Of every token to all that it sees within the window: [B, T, H * N]."""
    way = _by_cudnn if _cudnn_serves(q_BTHN) else _by_scores
    return way(q_BTHN, q_positions_BT, segments, window).reshape(*q_BTHN.shape[:2], -1)


def _cudnn_serves(q_BTHN: jax.Array) -> bool:
    if mesh.several_devices() or kernels.capability() != kernels.HOPPER or q_BTHN.dtype != jnp.bfloat16:
        return False
    _, T, _, N = q_BTHN.shape
    return T > 1 and N <= CUDNN_HEAD and N % 8 == 0


def _by_cudnn(q_BTHN, q_positions_BT, segments, window) -> jax.Array:
    """Lengths that are odd, which it does not take, are filled up by one token that no one sees."""
    B, T = q_BTHN.shape[:2]
    rows = [tuple(jnp.repeat(x, B // len(x), axis=0) for x in segment) for segment in segments]
    keys, values, positions_BS = (_even(jnp.concatenate(parts, axis=1)) for parts in zip(*rows, strict=True))
    seen_B1TS = _seen(_even(q_positions_BT), positions_BS, window)[:, None]
    attention = jax.nn.dot_product_attention
    return attention(_even(q_BTHN), keys, values, mask=seen_B1TS, scale=1.0, implementation="cudnn")[:, :T]


def _even(x: jax.Array) -> jax.Array:
    """Of an even length, its second axis; a token more is of position -1."""
    return jnp.pad(x, [(0, 0), (0, x.shape[1] % 2), *[(0, 0)] * (x.ndim - 2)], constant_values=-1)


def _by_scores(q_BTHN, q_positions_BT, segments, window) -> jax.Array:
    """One softmax over all segments, whose scores are never laid side by side; divided by its sum at the end."""
    scores = [_scores(q_BTHN, q_positions_BT, keys, positions, window) for keys, _, positions in segments]
    top_BTH = _over(jnp.maximum, (_by_query(s.max(axis=-1), q_BTHN) for s in scores))
    top_BTH = jax.lax.stop_gradient(top_BTH)
    shares = [jnp.exp(s - _by_key(top_BTH, keys)[..., None]) for s, (keys, _, _) in zip(scores, segments, strict=True)]
    total_BTH = _over(jnp.add, (_by_query(share.sum(axis=-1), q_BTHN) for share in shares))
    read = [
        jnp.einsum("bktrs,bskn->bktrn", share.astype(q_BTHN.dtype), values)
        for share, (_, values, _) in zip(shares, segments, strict=True)
    ]
    out_BTHN = _over(jnp.add, (_by_query(part, q_BTHN) for part in read))
    return (out_BTHN / total_BTH[..., None]).astype(q_BTHN.dtype)


def _over(combine: Callable[..., jax.Array], parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(combine, parts)


def _scores(q_BTHN, q_positions_BT, keys, positions, window) -> jax.Array:
    """Masked float32 scores against one segment: [its rows, K, queries of a row, queries of a key, S]."""
    scores = jnp.einsum("bktrn,bskn->bktrs", _by_key(q_BTHN, keys), keys, preferred_element_type=jnp.float32)
    seen = _seen(q_positions_BT.reshape(len(keys), -1), positions, window)
    return jnp.where(seen[:, None, :, None, :], scores, jnp.finfo(jnp.float32).min)


def _by_key(of_queries: jax.Array, keys: jax.Array) -> jax.Array:
    """[B, T, H, ...] as [rows of the keys, K, queries of a row, queries of a key, ...]."""
    rows, _, heads, _ = keys.shape
    H, *rest = of_queries.shape[2:]
    return of_queries.reshape(rows, -1, heads, H // heads, *rest).swapaxes(1, 2)


def _by_query(by_key: jax.Array, q_BTHN: jax.Array) -> jax.Array:
    """Back to [B, T, H, ...]."""
    return by_key.swapaxes(1, 2).reshape(*q_BTHN.shape[:3], *by_key.shape[4:])


def _seen(q_positions_BT, positions_BS, window) -> jax.Array:
    """Which slots each query sees: [B, T, S]."""
    distance = q_positions_BT[:, :, None] - positions_BS[:, None, :]
    return (positions_BS[:, None, :] >= 0) & (distance >= 0) & (distance < window)
