"""Attention of one new token a sequence, as kernels for an NVIDIA GPU: norm, RoPE and cache, shares of softmax, their sum.

A sequence sees its prompt's keys, which its group shares, and its own. A prompt of S slots is padded on its left, so the
token in slot t of any completion lies S + t slots after the first of its prompt, and sees the same slots through a window.
A prompt's length is all there is to know of it. A few sequences fill the device, as each one's keys are cut into shares.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from agent_tunix.models.kernels import FLOAT32, LEAST_TILE, call, dot_transposed

KEY_TILE = 64
SHARES = 8  # of a sequence's keys, at most
PROGRAMS = 128  # about one for each multiprocessor
LOWEST = -1e30  # a score that counts nothing, yet whose differences are finite


def whole_tiles(slots: int) -> int:
    """So many slots, filled up to tiles; a prompt's are filled up on its left."""
    return -(-slots // KEY_TILE) * KEY_TILE


def rotate_and_store(qkv_RHN, q_norm_N, k_norm_N, angles, slot_1, k_RCKN, v_RCKN, *, scale, eps, interpret):
    """Queries ready to be multiplied with keys, and the cache with this token's key and value in their slot."""
    (R, _, N), K = qkv_RHN.shape, k_RCKN.shape[2]
    H = qkv_RHN.shape[1] - 2 * K
    arguments = (qkv_RHN, q_norm_N, k_norm_N, *angles, slot_1, k_RCKN, v_RCKN)
    out = [jax.ShapeDtypeStruct(shape, qkv_RHN.dtype) for shape in ((R, H, N), k_RCKN.shape, v_RCKN.shape)]
    kernel = partial(_rotate_kernel, H, scale, eps)
    specs = [_whole(x) for x in arguments], [_whole(x) for x in out]
    return call(kernel, (R,), *specs, out, aliases={6: 1, 7: 2}, interpret=interpret)(*arguments)


def _rotate_kernel(H, scale, eps, qkv_ref, q_norm_ref, k_norm_ref, cos_ref, sin_ref, slot_ref, _k, _v, q_out, k_out, v_out):
    row, slot, K = pl.program_id(0), slot_ref[0], k_out.shape[2]
    half, dtype = cos_ref.shape[1], q_out.dtype
    halves = pl.ds(0, half), pl.ds(half, half)
    cos, sin = cos_ref[row, :][None], sin_ref[row, :][None]

    def rotated(heads, norm_ref):
        x = [qkv_ref[row, heads, at].astype(FLOAT32) for at in halves]
        inverse = jax.lax.rsqrt(sum((part * part).sum(axis=1) for part in x) / (2 * half) + eps)[:, None]
        a, b = (
            (part * inverse * (1.0 + norm_ref[at].astype(FLOAT32)[None])).astype(dtype).astype(FLOAT32)
            for part, at in zip(x, halves, strict=True)
        )
        return (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)

    values = [qkv_ref[row, pl.ds(H + K, K), at] for at in halves]  # before the first store, past which no load can move
    queries, keys = rotated(pl.ds(0, H), q_norm_ref), rotated(pl.ds(H, K), k_norm_ref)
    for at, q, k, v in zip(halves, queries, keys, values, strict=True):
        q_out[row, :, at] = (q.astype(FLOAT32) * scale).astype(dtype)
        k_out[row, slot, :, at] = k
        v_out[row, slot, :, at] = v


def attend(q_RHN, slot_1, lengths_P, prompt_kv, written_kv, *, group, policy_rows, window, interpret):
    """Shares of attention, [R, Z, H, N], and the logarithm of each one's normaliser, [R, Z, H]."""
    (R, H, N), K = q_RHN.shape, written_kv[0].shape[2]
    shares = max(2, min(SHARES, PROGRAMS // (R * K)))
    arguments = (q_RHN, slot_1, lengths_P, *prompt_kv, *written_kv)
    out = [jax.ShapeDtypeStruct((R, shares, H, N), q_RHN.dtype), jax.ShapeDtypeStruct((R, shares, H), FLOAT32)]
    kernel = partial(_attend_kernel, group, policy_rows, window, shares)
    specs = [_whole(x) for x in arguments], [_whole(x) for x in out]
    return call(kernel, (R, K, shares), *specs, out, stages=2, interpret=interpret)(*arguments)


def _attend_kernel(
    group, policy_rows, window, shares, q_ref, slot_ref, lengths_ref, prompt_k, prompt_v, k_ref, v_ref, out_ref, log_ref
):
    row, kv_head, share = (pl.program_id(axis) for axis in range(3))
    S, ratio, slot = prompt_k.shape[1], q_ref.shape[1] // k_ref.shape[2], slot_ref[0]
    prompts = lengths_ref.shape[0] * policy_rows // q_ref.shape[0]
    prompt = row // policy_rows * prompts + jnp.minimum(row % policy_rows // group, prompts - 1)
    # A tile of queries takes 16 heads; where a key/value head has fewer, the last is computed again.
    heads = kv_head * ratio + jnp.minimum(jax.lax.broadcasted_iota(jnp.int32, (LEAST_TILE,), 0), ratio - 1)
    halves = pl.ds(0, q_ref.shape[2] // 2), pl.ds(q_ref.shape[2] // 2, q_ref.shape[2] // 2)
    q = [q_ref[row, heads, at] for at in halves]

    first_seen = jnp.maximum(S - lengths_ref[prompt], S + slot + 1 - window), jnp.maximum(0, slot + 1 - window)
    first_tile = [jnp.minimum(first_seen[0] // KEY_TILE, S // KEY_TILE), first_seen[1] // KEY_TILE]
    in_prompt = S // KEY_TILE - first_tile[0]
    tiles = in_prompt + slot // KEY_TILE + 1 - first_tile[1]
    begin = share * pl.cdiv(tiles, shares)
    end = jnp.minimum(begin + pl.cdiv(tiles, shares), tiles)

    zeros = jnp.zeros((LEAST_TILE, q[0].shape[1]), FLOAT32)
    state = jnp.full((LEAST_TILE,), LOWEST, FLOAT32), jnp.zeros((LEAST_TILE,), FLOAT32), zeros, zeros
    prompt_tiles = [first_tile[0] + jnp.minimum(edge, in_prompt) for edge in (begin, end)]
    state = _softmax(q, prompt_k, prompt_v, (prompt, kv_head, halves), prompt_tiles, (first_seen[0], S - 1), state)
    own_tiles = [first_tile[1] + jnp.maximum(edge - in_prompt, 0) for edge in (begin, end)]
    greatest, total, *out = _softmax(q, k_ref, v_ref, (row, kv_head, halves), own_tiles, (first_seen[1], slot), state)

    total = jnp.maximum(total, 1e-30)
    for at, part in zip(halves, out, strict=True):
        out_ref[row, share, heads, at] = (part / total[:, None]).astype(out_ref.dtype)
    log_ref[row, share, heads] = greatest + jnp.log(total)


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
