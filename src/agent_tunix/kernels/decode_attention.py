"""Attention of one new token a sequence, as kernels for an NVIDIA GPU: norm, RoPE, cache and shares of softmax; their sum.

A sequence sees itself, its prompt's keys, which its group shares, and its own. A prompt of S slots is padded on its left, so
the token in slot t of any completion lies S + t slots after the first of its prompt, and sees the same slots through a
window. A prompt's length is all there is to know of it. So that even a few sequences fill the device, what each one sees is
cut into shares: the first is the token itself; the tiles of keys, the prompt's, then its own, are dealt out to the others.

Axes as in kernels.py, and: A the cosines and the sines of RoPE's angles in local layers, then those in global ones.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from agent_tunix.kernels.matmul import FLOAT32, LEAST_TILE, call, dot_transposed, power_of_two

KEY_TILE = 32
LEAST_SHARES, MOST_SHARES = 4, 8  # of what a sequence sees
PROGRAMS = 512  # about; a sequence has more shares where there are few sequences
LOWEST = -1e30  # a score that counts nothing, yet whose differences are finite


def whole_tiles(slots: int) -> int:
    """A number of slots, rounded up to whole tiles; prompts are padded on the left."""
    return -(-slots // KEY_TILE) * KEY_TILE


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the rows are: completions of each prompt, rows of each policy, slots of prompts; how a layer sees and scales.

    `angles` is the place along A of the layer's cosines; its sines follow.
    """

    group: int
    policy_rows: int
    prompt_slots: int
    window: int
    angles: int
    scale: float
    eps: float


def cache(prompt_PSKN: jax.Array, rows: int, slots: int) -> jax.Array:
    """The keys, or values, of all prompts and then room for those of every row, in whole tiles, one after another."""
    _, S, K, N = prompt_PSKN.shape
    prompts = jnp.pad(prompt_PSKN, ((0, 0), (whole_tiles(S) - S, 0), (0, 0), (0, 0)))
    return jnp.concatenate([prompts.reshape(-1, K, N), jnp.zeros((rows * whole_tiles(slots), K, N), prompts.dtype)])


def attend(qkv_RHN, norms, angles_RAN, slot_1, lengths_P, kv, rows: Rows, interpret: bool):
    """Shares of attention, [R, Z, H, N], and logarithms of their normalisers, [R, Z, H]; the cache with this token."""
    (R, heads, N), K = qkv_RHN.shape, kv[0].shape[1]
    H, most = heads - 2 * K, max(LEAST_SHARES, min(MOST_SHARES, PROGRAMS // (R * K)))
    shares = 1 << (most.bit_length() - 1)
    arguments = (qkv_RHN, *(norm[None] for norm in norms), angles_RAN, slot_1, lengths_P, *kv)
    shapes = ((R, shares, H, N), qkv_RHN.dtype), ((R, shares, H), FLOAT32), *((x.shape, x.dtype) for x in kv)
    out = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    specs = [_whole(x) for x in arguments], [_whole(x) for x in out]
    kernel, grid = partial(_attend_kernel, rows), (R, K, shares)
    run = call(kernel, grid, *specs, out, stages=3, aliases={6: 2, 7: 3}, interpret=interpret)
    parts, logs, *kv = run(*arguments)
    return parts, logs, tuple(kv)


def _attend_kernel(rows, qkv_ref, q_norm, k_norm, angles_ref, slot_ref, lengths_ref, *caches_and_outs):
    k_ref, v_ref, out_ref, log_ref, *stored = caches_and_outs
    row, kv_head, share = (pl.program_id(axis) for axis in range(3))
    (R, shares, H, N), (slots, K, _), prompt_slots = out_ref.shape, k_ref.shape, lengths_ref.shape[0] * rows.prompt_slots
    own_start = prompt_slots + row * ((slots - prompt_slots) // R)
    # Any number of heads may share keys; to make it a power of two, the last is computed again.
    Q, slot = power_of_two(H // K), slot_ref[0]
    heads = _heads(kv_head, H // K, jax.lax.broadcasted_iota(jnp.int32, (Q,), 0))
    rotary_parts = partial(_rotary_parts, qkv_ref, row, angles_ref, rows.angles)
    q_parts = rotary_parts(heads, q_norm)

    def queries():
        return (_rotated(q_parts, rows.eps).astype(FLOAT32) * rows.scale).astype(qkv_ref.dtype)

    @pl.when(share == 0)
    def see_token():
        """The token sees itself, and goes into the cache."""
        k = _rotated(rotary_parts(jnp.full((Q,), H + kv_head), k_norm), rows.eps)
        v = qkv_ref[row, jnp.full((Q,), H + K + kv_head), :]
        for kept, x in zip(stored, (k, v), strict=True):
            kept[jnp.full((Q,), own_start + slot), kv_head, :] = x  # the same for every head of the query
        out_ref[row, share, heads, :] = v
        log_ref[row, share, heads] = (queries().astype(FLOAT32) * k.astype(FLOAT32)).sum(axis=1)

    begin, end, tile = _share_of_tiles(rows, (R, shares), slot, own_start, lengths_ref, (k_ref, v_ref))

    @pl.when((share > 0) & (begin >= end))
    def see_nothing():
        out_ref[row, share, heads, :] = jnp.zeros((Q, N), out_ref.dtype)
        log_ref[row, share, heads] = jnp.full((Q,), LOWEST)

    @pl.when((share > 0) & (begin < end))
    def see_tiles():
        times = max(1, LEAST_TILE // Q)  # to fill a tile
        q = jnp.broadcast_to(queries()[:, None], (Q, times, N)).reshape(Q * times, N)
        greatest, total, out = _softmax(q, tile, begin, end)
        repeated = _heads(kv_head, H // K, jax.lax.broadcasted_iota(jnp.int32, (Q * times,), 0) // times)
        out_ref[row, share, repeated, :] = (out / total[:, None]).astype(out_ref.dtype)
        log_ref[row, share, repeated] = greatest + jnp.log(total)


def _share_of_tiles(rows, counts: tuple[int, int], slot, own_start, lengths_ref, caches):
    """Where a share of the tiles that a row sees, the prompt's and then its own, begins and ends; and how to load a tile."""
    row, kv_head, share = (pl.program_id(axis) for axis in range(3))
    (R, shares), (P,), S = counts, lengths_ref.shape, rows.prompt_slots
    prompts = P * rows.policy_rows // R  # of a policy
    prompt = row // rows.policy_rows * prompts + jnp.minimum(row % rows.policy_rows // rows.group, prompts - 1)
    before = S + slot + 1 - rows.window  # slots that lie before the window
    seen, own_seen = jnp.maximum(S - lengths_ref[prompt], before), jnp.maximum(0, before - S)  # the first in it
    first, own_first = seen // KEY_TILE, own_seen // KEY_TILE
    of_prompt = jnp.maximum(0, S // KEY_TILE - first)
    tiles = of_prompt + pl.cdiv(slot, KEY_TILE) - own_first
    size = pl.cdiv(tiles, shares - 1)

    def tile(n):
        """The keys and values of a tile, and which of them are seen."""
        own = n >= of_prompt
        start = jnp.where(own, own_first + n - of_prompt, first + n) * KEY_TILE
        index = start + jax.lax.broadcasted_iota(jnp.int32, (KEY_TILE,), 0)
        here = pl.ds(jnp.where(own, own_start, prompt * S) + start, KEY_TILE)
        of_tile = (index >= jnp.where(own, own_seen, seen)) & (index < jnp.where(own, slot, S))
        return *(x[here, kv_head, :] for x in caches), of_tile

    return (share - 1) * size, jnp.minimum(share * size, tiles), tile


def _heads(kv_head, count: int, index):
    """The query heads of a key/value head, `count` of them; an index beyond the last gives the last."""
    return kv_head * count + jnp.minimum(index, count - 1)


def _rotary_parts(qkv_ref, row, angles_ref, angles, heads, norm_ref):
    """Loads all that norm and RoPE of heads take, at once, as arrays of one shape [heads, N].

    An array of another shape would be converted to this one's layout as soon as it arrived, and later loads would wait.
    """
    (n,), N = heads.shape, qkv_ref.shape[2]
    first, rows = jnp.zeros((n,), jnp.int32), jnp.full((n,), row)
    exchanged = (jax.lax.broadcasted_iota(jnp.int32, (n, N), 1) + N // 2) % N
    flat_first, flat_rows, flat_heads = (jnp.broadcast_to(index[:, None], (n, N)) for index in (first, rows, heads))
    x, y = qkv_ref[row, heads, :], qkv_ref[flat_rows, flat_heads, exchanged]
    cos, sin = (angles_ref[rows, angles + n, :] for n in range(2))
    return x, y, norm_ref[first, :], norm_ref[flat_first, exchanged], cos, sin


def _rotated(parts, eps):
    """Heads after norm and RoPE; y is x with the halves of every head exchanged."""
    x, y, x_norm, y_norm, cos, sin = parts
    dtype, x, y = x.dtype, x.astype(FLOAT32), y.astype(FLOAT32)
    inverse = jax.lax.rsqrt((x * x).sum(axis=1) / x.shape[1] + eps)[:, None]
    x, y = (a * inverse * (1.0 + norm.astype(FLOAT32)) for a, norm in ((x, x_norm), (y, y_norm)))
    x, y = (a.astype(dtype).astype(FLOAT32) for a in (x, y))
    return (x * cos + y * sin).astype(dtype)


def _softmax(q, tile, begin, end):
    """Attention to the tiles from `begin` to before `end` (Milakov & Gimelshein, 2018)."""

    def add(n, state):
        greatest, total, out = state
        keys, values, seen = tile(n)
        scores = jnp.where(seen[None], dot_transposed(q, keys), 2 * LOWEST)
        now = jnp.maximum(greatest, scores.max(axis=1))
        fade, probs = jnp.exp(greatest - now), jnp.exp(scores - now[:, None])
        out = out * fade[:, None] + jnp.dot(probs.astype(values.dtype), values, preferred_element_type=FLOAT32)
        return now, total * fade + probs.sum(axis=1), out

    nothing = jnp.full(q.shape[:1], LOWEST), jnp.zeros(q.shape[:1]), jnp.zeros(q.shape)
    return jax.lax.fori_loop(begin, end, add, nothing)


@partial(jax.jit, static_argnames="interpret")
def combine(parts_RZHN, logs_RZH, *, interpret):
    """Attention, put together from its shares: [R, H * N]."""
    R, _, H, N = parts_RZHN.shape
    out = jax.ShapeDtypeStruct((R, H, N), parts_RZHN.dtype)
    specs = [_whole(parts_RZHN), _whole(logs_RZH)], _whole(out)
    return call(partial(_combine_kernel), (R, H), *specs, out, interpret=interpret)(parts_RZHN, logs_RZH).reshape(R, H * N)


def _combine_kernel(parts_ref, logs_ref, out_ref):
    row, head = pl.program_id(0), pl.program_id(1)
    logs = logs_ref[row, :, head]
    weights = jnp.exp(logs - logs.max())
    out = (parts_ref[row, :, head, :].astype(FLOAT32) * weights[:, None]).sum(axis=0) / weights.sum()
    out_ref[row, head, :] = out.astype(out_ref.dtype)


def _whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))
