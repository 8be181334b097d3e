"""Attention of one new token a sequence, as kernels for an NVIDIA GPU: norm, RoPE, cache and shares of softmax; their sum.

A sequence sees its prompt's keys, which its group shares, and its own. A prompt of S slots is padded on its left, so the
token in slot t of any completion lies S + t slots after the first of its prompt, and sees the same slots through a window.
A prompt's length is all there is to know of it. A few sequences fill the device, as each one's keys are cut into shares.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from agent_tunix.models.kernels import FLOAT32, LEAST_TILE, call, dot_transposed

KEY_TILE = 32
SHARES = 8  # of a sequence's keys, at most
PROGRAMS = 128  # about one for each multiprocessor
LOWEST = -1e30  # a score that counts nothing, yet whose differences are finite


def whole_tiles(slots: int) -> int:
    """So many slots, filled up to tiles; a prompt's are filled up on its left."""
    return -(-slots // KEY_TILE) * KEY_TILE


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows are: completions of each prompt, rows of each policy; and how a layer sees and scales."""

    group: int
    policy_rows: int
    window: int
    scale: float
    eps: float


def attend(qkv_RHN, norms, angles, slot_1, lengths_P, prompt_kv, written_kv, rows: Rows, interpret: bool):
    """Shares of attention, [R, Z, H, N], and logarithms of their normalisers, [R, Z, H]; the cache with this token."""
    (R, _, N), K = qkv_RHN.shape, written_kv[0].shape[2]
    H = qkv_RHN.shape[1] - 2 * K
    shares = max(2, min(SHARES, PROGRAMS // (R * K)))
    arguments = (qkv_RHN, *norms, *angles, slot_1, lengths_P, *prompt_kv, *written_kv)
    shapes = ((R, shares, H, N), qkv_RHN.dtype), ((R, shares, H), FLOAT32), *((x.shape, x.dtype) for x in written_kv)
    out = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    specs = [_whole(x) for x in arguments], [_whole(x) for x in out]
    run = call(
        partial(_attend_kernel, rows), (R, K, shares), *specs, out, stages=3, aliases={9: 2, 10: 3}, interpret=interpret
    )
    parts, logs, *kv = run(*arguments)
    return parts, logs, kv


def _attend_kernel(rows, qkv_ref, q_norm, k_norm, cos_ref, sin_ref, slot_ref, lengths_ref, *caches_and_outs):
    prompt_k, prompt_v, k_ref, v_ref, out_ref, log_ref, *stored = caches_and_outs
    row, kv_head, share = (pl.program_id(axis) for axis in range(3))
    (R, shares, H, N), K = out_ref.shape, k_ref.shape[2]
    S, slot = prompt_k.shape[1], slot_ref[0]
    halves = pl.ds(0, N // 2), pl.ds(N // 2, N // 2)
    # A tile of queries takes 16 heads; where a key/value head has fewer, the last is computed again.
    heads = kv_head * (H // K) + jnp.minimum(jax.lax.broadcasted_iota(jnp.int32, (LEAST_TILE,), 0), H // K - 1)
    angles = cos_ref[row, :][None], sin_ref[row, :][None]
    q = _rotated([qkv_ref[row, heads, at] for at in halves], [q_norm[at] for at in halves], angles, rows.eps)
    q = [(part.astype(FLOAT32) * rows.scale).astype(part.dtype) for part in q]
    key_head, value_head = pl.ds(H + kv_head, 1), pl.ds(H + K + kv_head, 1)
    k = _rotated([qkv_ref[row, key_head, at] for at in halves], [k_norm[at] for at in halves], angles, rows.eps)
    v = [qkv_ref[row, value_head, at] for at in halves]
    for cache, parts in zip(stored, (k, v), strict=True):
        for at, part in zip(halves, parts, strict=True):
            mask = jnp.broadcast_to(share == 0, part.shape)
            triton.store(cache.at[row, slot, pl.ds(kv_head, 1), at], part, mask=mask)

    prompts = lengths_ref.shape[0] * rows.policy_rows // R
    prompt = row // rows.policy_rows * prompts + jnp.minimum(row % rows.policy_rows // rows.group, prompts - 1)
    before = S + slot + 1 - rows.window  # slots out of the window
    seen = (jnp.maximum(S - lengths_ref[prompt], before), S - 1), (jnp.maximum(0, before - S), slot - 1)
    prompt_tiles, own_tiles = _tiles(seen, S, slot, share, shares)
    state = _softmax(q, prompt_k, prompt_v, (prompt, kv_head, halves), prompt_tiles, seen[0], _start(q, k, v, share == 0))
    greatest, total, *out = _softmax(q, k_ref, v_ref, (row, kv_head, halves), own_tiles, seen[1], state)
    total = jnp.maximum(total, 1e-30)
    for at, part in zip(halves, out, strict=True):
        out_ref[row, share, heads, at] = (part / total[:, None]).astype(out_ref.dtype)
    log_ref[row, share, heads] = greatest + jnp.log(total)


def _rotated(parts, norms, angles, eps):
    """Heads, as two halves, after norm and RoPE."""
    x, (cos, sin), dtype = [part.astype(FLOAT32) for part in parts], angles, parts[0].dtype
    inverse = jax.lax.rsqrt(sum(part * part for part in x).sum(axis=1) / (2 * x[0].shape[1]) + eps)[:, None]
    a, b = (part * inverse * (1.0 + norm.astype(FLOAT32)[None]) for part, norm in zip(x, norms, strict=True))
    a, b = (part.astype(dtype).astype(FLOAT32) for part in (a, b))
    return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)


def _start(q, k, v, with_token):
    """What softmax begins with: the token itself, or nothing. The cache holds only what came before it."""
    score = sum(a.astype(FLOAT32) * b.astype(FLOAT32) for a, b in zip(q, k, strict=True)).sum(axis=1)
    values = [jnp.broadcast_to(part.astype(FLOAT32), q[0].shape) for part in v]
    begun = jnp.where(with_token, score, LOWEST), jnp.where(with_token, jnp.ones_like(score), 0.0)
    return *begun, *(jnp.where(with_token, part, 0.0) for part in values)


def _tiles(seen, S, slot, share, shares):
    """The tiles of prompt and completion that one share reads, each as (begin, end)."""
    first_in_prompt = jnp.minimum(seen[0][0] // KEY_TILE, S // KEY_TILE)
    in_prompt, end_of_own = S // KEY_TILE - first_in_prompt, pl.cdiv(slot, KEY_TILE)
    first_of_own = jnp.minimum(seen[1][0] // KEY_TILE, end_of_own)
    tiles = in_prompt + end_of_own - first_of_own
    begin = share * pl.cdiv(tiles, shares)
    edges = begin, jnp.minimum(begin + pl.cdiv(tiles, shares), tiles)
    return (
        [first_in_prompt + jnp.minimum(edge, in_prompt) for edge in edges],
        [first_of_own + jnp.maximum(edge - in_prompt, 0) for edge in edges],
    )


def _softmax(q, keys_ref, values_ref, where, tiles, seen, state):
    """Attention to some tiles of slots, of which those from seen[0] to seen[1] count (Milakov & Gimelshein, 2018)."""
    row, kv_head, halves = where

    def add(tile, state):
        greatest, total, *out = state
        slots = tile * KEY_TILE + jax.lax.broadcasted_iota(jnp.int32, (KEY_TILE,), 0)
        here = pl.ds(tile * KEY_TILE, KEY_TILE)
        scores = sum(dot_transposed(part, keys_ref[row, here, kv_head, at]) for part, at in zip(q, halves, strict=True))
        scores = jnp.where(((slots >= seen[0]) & (slots <= seen[1]))[None], scores, 2 * LOWEST)
        now = jnp.maximum(greatest, scores.max(axis=1))
        fade, probs = jnp.exp(greatest - now), jnp.exp(scores - now[:, None])
        values = [values_ref[row, here, kv_head, at] for at in halves]
        out = [
            part * fade[:, None] + jnp.dot(probs.astype(v.dtype), v, preferred_element_type=FLOAT32)
            for part, v in zip(out, values, strict=True)
        ]
        return now, total * fade + probs.sum(axis=1), *out

    begin, end = tiles
    return jax.lax.fori_loop(begin, end, add, state)


@partial(jax.jit, static_argnames="interpret")
def combine(parts_RZHN, logs_RZH, *, interpret):
    """Attention of its shares: [R, H * N]."""
    R, _, H, N = parts_RZHN.shape
    out = jax.ShapeDtypeStruct((R, H, N), parts_RZHN.dtype)
    specs = [_whole(parts_RZHN), _whole(logs_RZH)], _whole(out)
    return call(partial(_combine_kernel), (R,), *specs, out, interpret=interpret)(parts_RZHN, logs_RZH).reshape(R, H * N)


def _combine_kernel(parts_ref, logs_ref, out_ref):
    row = pl.program_id(0)
    logs = logs_ref[row, :, :]
    weights = jnp.exp(logs - logs.max(axis=0)[None])
    weights = weights / weights.sum(axis=0)[None]
    out_ref[row, :, :] = (parts_ref[row, :, :, :].astype(FLOAT32) * weights[:, :, None]).sum(axis=0).astype(out_ref.dtype)


def _whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))
