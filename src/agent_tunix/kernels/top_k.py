"""Drawing a token of every row from its k likeliest, as two kernels for an NVIDIA GPU (Pallas, by way of Triton).

XLA sorts the whole vocabulary to find the k greatest, then takes some forty kernels to draw one of them. Here one kernel
reads the logits once, for the maximum of every block of them and their normaliser. The second narrows down: the k blocks
with the greatest maxima hold the k greatest values, as k maxima come before any value outside of them; so it goes on with
the parts of these blocks, then with single values, and draws. Of equal values the one of lower index comes first.

Axes as in types.py, and: n blocks of a row, filled up to a power of two; s slots for what is selected, which are a few more
than k: with this much freedom a threshold is found in half as many steps as the k-th value itself.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from agent_tunix.kernels.matmul import FLOAT32, call, power_of_two

BLOCKS = 1024  # of a row, at most
PARTS = 16  # of a block
NOWHERE = 2**29  # an index beyond any row
CHUNK = 4096  # logits that a program of the first kernel reads
LARGEST_K = 112
SMALLEST_ROW = BLOCKS * PARTS  # a part has at least one value
WARPS = 8
DIGIT = 2  # bits of a threshold that are found at a time


def serve(k: int, vocab_size: int) -> bool:
    """Whether the kernels can draw from the k likeliest of so many tokens."""
    return k <= LARGEST_K and vocab_size >= SMALLEST_ROW


@dataclasses.dataclass(frozen=True)
class _Cuts:
    """What is drawn from: the k likeliest and the nucleus p of these, never padding. `width` is that of a block."""

    k: int
    top_p: float
    pad_id: int
    width: int


@partial(jax.jit, static_argnames=("k", "top_p", "pad_id", "interpret"))
def draw(logits_BV, temperature_B1, uniform_B1, *, k: int, top_p: float, pad_id: int, interpret: bool = False):
    """One token per row, and its log-probability among all tokens."""
    B, V = logits_BV.shape
    cuts = _Cuts(k, top_p, pad_id, width=power_of_two(-(-V // BLOCKS)))
    n, slots = power_of_two(-(-V // cuts.width)), power_of_two(k + k // 8 + 1)
    blocks = min(n, max(1, CHUNK // cuts.width))
    row, one = pl.BlockSpec((None, V), lambda i, *_: (i, 0)), pl.BlockSpec((None, 1), lambda i, *_: (i, 0))
    parts = [pl.BlockSpec((None, blocks), lambda i, j: (i, j)), pl.BlockSpec((None, 1), lambda i, j: (i, j))]
    outs = [jax.ShapeDtypeStruct((B, n), FLOAT32), jax.ShapeDtypeStruct((B, n // blocks), FLOAT32)]
    kernel, options = partial(_summary_kernel, cuts), {"warps": WARPS, "interpret": interpret}
    maxima, log_sums = call(kernel, (B, n // blocks), [row, one], parts, outs, **options)(logits_BV, temperature_B1)

    shapes = ((1, jnp.int32), (1, FLOAT32), (slots + 1, jnp.int32), (slots, FLOAT32))  # the last two are scratch
    drawn = [jax.ShapeDtypeStruct((B, size), dtype) for size, dtype in shapes]
    given, made = ([pl.BlockSpec((None, x.shape[1]), lambda i: (i, 0)) for x in group] for group in (outs, drawn))
    kernel = partial(_draw_kernel, cuts, (lambda: None) if interpret else triton.debug_barrier)
    run = call(kernel, (B,), [row, *given, one, one], made, drawn, **options)
    tokens_B1, logprobs_B1, *_ = run(logits_BV, maxima, log_sums, temperature_B1, uniform_B1)
    return tokens_B1[:, 0], logprobs_B1[:, 0]


def _summary_kernel(cuts, logits_ref, temperature_ref, maxima_out, log_sum_out):
    shape = (maxima_out.shape[0], cuts.width)
    ids = (pl.program_id(1) * shape[0] + _iota(shape, 0)) * cuts.width + _iota(shape, 1)
    values = triton.load(logits_ref.at[ids], mask=ids < logits_ref.shape[0], other=-jnp.inf)
    maxima_out[...] = jnp.where(ids == cuts.pad_id, -jnp.inf, values).max(axis=1)
    greatest = jnp.maximum(values.max(axis=1).max(axis=0), jnp.finfo(FLOAT32).min)
    sharpness = 1.0 / temperature_ref[0]
    total = jnp.exp((values - greatest) * sharpness).sum(axis=1).sum(axis=0)
    log_sum_out[0] = greatest * sharpness + jnp.log(total)


def _draw_kernel(cuts, synchronise, logits_ref, maxima_ref, log_sums_ref, temperature_ref, uniform_ref, *outs):
    token_out, logprob_out, places_ref, values_ref = outs
    (slots,) = values_ref.shape
    ids_s, values_s = _likeliest(cuts, synchronise, logits_ref, maxima_ref, places_ref, slots)
    place_s = _descending_ranks(values_s)
    places_ref[place_s], values_ref[place_s] = ids_s, values_s
    synchronise()
    scores_s = jnp.where(_iota((slots,), 0) < cuts.k, values_ref[...], -jnp.inf) / temperature_ref[0]
    weights_s = jnp.exp(scores_s - jnp.maximum(scores_s.max(axis=0), jnp.finfo(FLOAT32).min))
    probs_s = weights_s / weights_s.sum(axis=0)
    before_s = jnp.cumsum(probs_s) - probs_s
    mine_s = _iota((slots,), 0) == _inverted(jnp.where(before_s < cuts.top_p, probs_s, 0.0), uniform_ref[0])
    token = jnp.where(mine_s, places_ref[pl.ds(0, slots)], 0).sum(axis=0)
    token_out[0] = jnp.minimum(token, logits_ref.shape[0] - 1)  # in a row of NaN it may be NOWHERE
    log_sums = log_sums_ref[...]
    most = log_sums.max(axis=0)
    logprob_out[0] = jnp.where(mine_s, scores_s, 0.0).sum(axis=0) - most - jnp.log(jnp.exp(log_sums - most).sum(axis=0))


def _likeliest(cuts, synchronise, logits_ref, maxima_ref, places_ref, slots):
    """Indices of the k greatest logits, and maybe of some more, in their order, and the logits: [slots]."""

    def load(starts_s, size):
        """Logits from each of some indices on, [slots * size]; minus infinity for padding and for what is not there."""
        ids = starts_s[:, None] + _iota((slots, size), 1)
        values = triton.load(logits_ref.at[ids], mask=ids < logits_ref.shape[0], other=-jnp.inf)
        return jnp.where(ids == cuts.pad_id, -jnp.inf, values).reshape(slots * size)

    def greatest(keys_n, least):
        """Indices of the greatest, ascending, and the threshold that they reach; unused slots hold NOWHERE."""
        chosen_n, threshold = _chosen(keys_n, cuts.k, slots, least)
        slot_n = jnp.where(chosen_n, jnp.cumsum(chosen_n.astype(jnp.int32)) - 1, slots)
        triton.store(places_ref.at[slot_n], _iota(keys_n.shape, 0), mask=chosen_n)
        synchronise()
        found_s = places_ref[pl.ds(0, slots)]
        synchronise()
        return jnp.where(_iota((slots,), 0) < chosen_n.astype(jnp.int32).sum(axis=0), found_s, NOWHERE), threshold

    def take(values_s, places_s):
        found_s = jnp.where(places_s[:, None] == _iota((slots, slots), 1), values_s[None, :], 0).sum(axis=1)
        return jnp.where(places_s < slots, found_s, NOWHERE)

    part = cuts.width // PARTS
    keys_n = _ordered(maxima_ref[...])
    chosen_s, reached = greatest(keys_n, keys_n.min(axis=0))
    starts_s = jnp.minimum(chosen_s, NOWHERE // cuts.width) * cuts.width
    keys_n = _ordered(load(starts_s, cuts.width).reshape(slots * PARTS, part).max(axis=1))
    chosen_s, reached = greatest(keys_n, reached)  # as k blocks reached it, so do k of their parts
    starts_s = take(starts_s, chosen_s // PARTS) + chosen_s % PARTS * part
    chosen_s, _ = greatest(_ordered(load(starts_s, part)), reached)
    ids_s = take(starts_s, chosen_s // part) + chosen_s % part
    return ids_s, load(ids_s, 1)


def _chosen(keys_n, k, slots, least):
    """Marks the greatest, k to `slots` of them, and gives the threshold they reach; of equals, those of lower index."""
    threshold, reach = _threshold(keys_n, k, slots, least)
    above_n, equal_n = keys_n > threshold, keys_n == threshold
    room = jnp.where(reach <= slots, jnp.int32(slots), jnp.int32(k)) - above_n.astype(jnp.int32).sum(axis=0)
    return above_n | (equal_n & (jnp.cumsum(equal_n.astype(jnp.int32)) <= room)), threshold


def _ordered(values):
    """Integers in the order of floats."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _threshold(keys_n, k, slots, least):
    """A number that k to `slots` of the integers reach, else the k-th greatest, and how many reach it.

    At least k reach `least`. The distance from there is found digit by digit, the highest first: each is the greatest with
    which k integers still reach the sum.
    """
    span = keys_n.max(axis=0) - least  # negative where it overflows
    exponent = (jax.lax.bitcast_convert_type(span.astype(FLOAT32), jnp.int32) >> 23) - 127
    highest = jnp.where(span < 0, 32 - DIGIT, jnp.maximum(exponent, 0) // DIGIT * DIGIT)

    def undecided(state):
        shift, _, reach = state
        return (reach > slots) & (shift >= 0)

    def add_digit(state):
        shift, found, _ = state
        tried = found + (_iota((2**DIGIT,), 0) << shift)
        reach = (keys_n[None, :] >= tried[:, None]).astype(jnp.int32).sum(axis=1)
        enough = (reach >= k) & (tried >= found)  # a smaller one has overflowed
        found += (enough.astype(jnp.int32).sum(axis=0) - 1) << shift
        return shift - DIGIT, found, jnp.where(enough, reach, 2**30).min(axis=0)

    _, found, reach = jax.lax.while_loop(undecided, add_digit, (highest, least, jnp.int32(2**30)))
    return found, reach


def _descending_ranks(values_s):
    """The rank of each value, the greatest first; equal values keep their order."""
    (slots,) = values_s.shape
    mine, others = values_s[:, None], values_s[None, :]
    earlier = _iota((slots, slots), 1) < _iota((slots, slots), 0)
    return ((others > mine) | ((others == mine) & earlier)).astype(jnp.int32).sum(axis=1)


def _inverted(weights_s, uniform):
    """The index drawn in proportion to weights, as `rollout._invert_cdf` draws it."""
    (slots,) = weights_s.shape
    cdf_s = jnp.where(weights_s > 0, jnp.cumsum(weights_s), -1.0)
    greatest = cdf_s.max(axis=0)
    reached_s = (cdf_s > uniform * greatest) | (cdf_s == greatest)
    return jnp.where(reached_s, _iota((slots,), 0), slots - 1).min(axis=0)


def _iota(shape, axis):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
