"""The rows that are in flight on the device, and the three programs that work on them.

    fill      reads prompts into rows of the cache and draws the first token of each
    advance   draws so many further tokens of every row
    resized   the same rows in a cache of another size

A row is one choice of one request. It has its own length, so a prompt may enter whenever another row has ended. Slot s of a
row's cache holds its token at position s: what lies behind its length is of no account, and a row of length -1 is free.
How a row is drawn is data and not a part of the program, and its noise follows from its own key and position alone.

A row is read by `transformer.forward`, the way that serves every device and family; the kernels for Hopper GPUs read rows
that all began together (`models/decoding.py`).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from agent_tunix.engine import compiler_options
from agent_tunix.kernels.draw import invert_cdf
from agent_tunix.models import lora, transformer
from agent_tunix.models.architecture import Architecture, Segment, Weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts, pytree

MOST_TOP = 20  # likeliest tokens that are told of beside the one that was drawn, as in OpenAI's interface
BLOCK = 16  # positions whose logits are held at once when a prompt is scored
Ways = Literal["greedy", "drawn", "filtered"]  # what the rows of a program need at most; each includes those before it


@dataclasses.dataclass(frozen=True)
class Form:
    """What a program that draws is made for. Hashable: a different one is a different program."""

    arch: Architecture
    pad_id: int
    ways: Ways
    top: int


@pytree
class How:
    """How the tokens of each row are drawn. Temperature 0 takes the likeliest; top_k is the vocabulary's size for all."""

    key_B2: jax.Array
    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array


@pytree
class Slots:
    """`last_B` is the token that each row reads next, and `drawn_B` counts those that were drawn for it."""

    keys_LBSKN: jax.Array
    values_LBSKN: jax.Array
    length_B: jax.Array
    last_B: jax.Array
    drawn_B: jax.Array
    how: How


class Drawn(NamedTuple):
    """Tokens with their log-probabilities under the model, at temperature 1; and the likeliest tokens beside each.

    Without those, their axis is empty.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def empty(arch: Architecture, rows: int, width: int, dtype: jnp.dtype) -> Slots:
    """Free rows with room for so many tokens each."""
    cache = transformer.empty_segment(arch, rows, width, dtype)
    free_B, last_B, drawn_B = (jnp.full(rows, value, jnp.int32) for value in (-1, 0, 0))  # programs take each for their own
    how = How(jnp.zeros((rows, 2), jnp.uint32), jnp.zeros(rows), jnp.ones(rows, jnp.int32), jnp.ones(rows))
    return Slots(cache.keys_LBSKN, cache.values_LBSKN, free_B, last_B, drawn_B, how)


@partial(jax.jit, static_argnames="width")
def resized(slots: Slots, take_B: jax.Array, *, width: int) -> Slots:
    """The rows `take_B`, of which -1 stands for a free one, in a cache of another width."""
    there_B, from_B = take_B >= 0, jnp.maximum(take_B, 0)

    def cache(x_LBSKN: jax.Array) -> jax.Array:
        taken = x_LBSKN[:, from_B, :width]
        return jnp.pad(taken, [(0, 0), (0, 0), (0, width - taken.shape[2]), (0, 0), (0, 0)])

    return Slots(
        cache(slots.keys_LBSKN),
        cache(slots.values_LBSKN),
        jnp.where(there_B, slots.length_B[from_B], -1),
        slots.last_B[from_B],
        slots.drawn_B[from_B],
        jax.tree.map(lambda x: x[from_B], slots.how),
    )


@partial(jax.jit, static_argnames="form", donate_argnames="slots", compiler_options=compiler_options.OPTIONS)
def fill(
    weights: Weights,
    adapters: Adapters | None,
    slots: Slots,
    prompts: Prompts,
    source_B: jax.Array,
    how: How,
    *,
    form: Form,
) -> tuple[Slots, Drawn]:
    """Puts prompt `source_B` into each row, where that is not -1, to be drawn as `how` says; and draws its first token."""
    adapters = lora.over(weights, adapters)
    hidden_PSD, read = transformer.forward(weights, adapters, form.arch, prompts.tokens_PS, prompts.positions_PS)
    S = prompts.tokens_PS.shape[1]
    length_P = (prompts.positions_PS >= 0).sum(axis=1)
    places_PS = (jnp.arange(S) + (S - length_P)[:, None]) % S  # without the padding on the left
    new_B, from_B = source_B >= 0, jnp.maximum(source_B, 0)

    def cache(x_LBSKN: jax.Array, read_LPSKN: jax.Array) -> jax.Array:
        begun = jnp.take_along_axis(read_LPSKN, places_PS[None, :, :, None, None], axis=2)[:, from_B]
        kept = jnp.where(new_B[None, :, None, None, None], begun, x_LBSKN[:, :, :S])
        return x_LBSKN.at[:, :, :S].set(kept)

    def where_new(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(new_B[:, None] if new.ndim == 2 else new_B, new, old)

    how = jax.tree.map(where_new, how, slots.how)
    logits_BV = transformer.unembed(weights, hidden_PSD[:, -1])[from_B]
    drawn = _draw(logits_BV, how, jnp.zeros_like(slots.drawn_B), form)
    filled = Slots(
        cache(slots.keys_LBSKN, read.keys_LBSKN),
        cache(slots.values_LBSKN, read.values_LBSKN),
        where_new(length_P[from_B], slots.length_B),
        where_new(drawn.tokens, slots.last_B),
        where_new(jnp.ones_like(slots.drawn_B), slots.drawn_B),
        how,
    )
    return filled, drawn


@partial(jax.jit, static_argnames=("form", "steps"), donate_argnames="slots", compiler_options=compiler_options.LOOP_OPTIONS)
def advance(
    weights: Weights, adapters: Adapters | None, slots: Slots, live_B: jax.Array, *, form: Form, steps: int
) -> tuple[Slots, Drawn]:
    """Draws `steps` tokens of every row under `live_B`, [steps, B]; the others become free."""
    adapters = lora.over(weights, adapters)
    B, W = slots.keys_LBSKN.shape[1:3]
    rows_B, how = jnp.arange(B), slots.how

    def step(carry, _):
        keys, values, length_B, last_B, drawn_B = carry
        seen_BS = jnp.where(jnp.arange(W) < length_B[:, None], jnp.arange(W), -1)
        past = Segment(keys, values, seen_BS)
        hidden_B1D, new = transformer.forward(weights, adapters, form.arch, last_B[:, None], length_B[:, None], (past,))
        place_B = jnp.where(length_B < 0, W, length_B)  # past the end nothing is written
        keys = keys.at[:, rows_B, place_B].set(new.keys_LBSKN[:, :, 0], mode="drop")
        values = values.at[:, rows_B, place_B].set(new.values_LBSKN[:, :, 0], mode="drop")
        drawn = _draw(transformer.unembed(weights, hidden_B1D[:, 0]), how, drawn_B, form)
        return (keys, values, jnp.where(length_B < 0, -1, length_B + 1), drawn.tokens, drawn_B + 1), drawn

    length_B = jnp.where(live_B, slots.length_B, -1)
    begun = slots.keys_LBSKN, slots.values_LBSKN, length_B, slots.last_B, slots.drawn_B
    ended, drawn = jax.lax.scan(step, begun, length=steps)
    return Slots(*ended, how), drawn


@partial(jax.jit, static_argnames=("arch", "top"), compiler_options=compiler_options.OPTIONS)
def score(weights: Weights, adapters: Adapters | None, prompts: Prompts, *, arch: Architecture, top: int) -> Drawn:
    """The tokens of prompts as if each had been drawn after those before it, [P, S]; the first one's mean nothing."""
    adapters = lora.over(weights, adapters)
    hidden_PSD, _ = transformer.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
    P, S, _ = hidden_PSD.shape
    blocks = -(-S // BLOCK)
    next_PS = jnp.roll(prompts.tokens_PS, -1, axis=1)

    def cut(x_PS: jax.Array) -> jax.Array:
        padded = jnp.pad(x_PS, [(0, 0), (0, blocks * BLOCK - S), *[(0, 0)] * (x_PS.ndim - 2)])
        return padded.reshape(P, blocks, BLOCK, *x_PS.shape[2:]).swapaxes(0, 1)

    def of_block(part: tuple[jax.Array, jax.Array]) -> Drawn:
        hidden, tokens = part
        logits = transformer.unembed(weights, hidden)
        return _told(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), top)

    def whole(x: jax.Array) -> jax.Array:
        joined = x.reshape(blocks, P, BLOCK, *x.shape[2:]).swapaxes(0, 1).reshape(P, blocks * BLOCK, *x.shape[2:])
        return jnp.roll(joined[:, :S], 1, axis=1)

    return jax.tree.map(whole, jax.lax.map(of_block, (cut(hidden_PSD), cut(next_PS))))


def _draw(logits_BV: jax.Array, how: How, step_B: jax.Array, form: Form) -> Drawn:
    """A token of every row, never padding."""
    allowed_BV = jnp.where(jnp.arange(logits_BV.shape[1]) == form.pad_id, -jnp.inf, logits_BV)
    tokens_B = jnp.argmax(allowed_BV, axis=1).astype(jnp.int32)
    if form.ways != "greedy":
        greedy_B = how.temperature_B == 0
        scaled_BV = allowed_BV - allowed_BV.max(axis=1, keepdims=True)  # the greatest stays finite
        scaled_BV = scaled_BV / jnp.where(greedy_B, 1.0, how.temperature_B)[:, None]
        if form.ways == "filtered":
            scaled_BV = _filtered(scaled_BV, how.top_k_B, how.top_p_B)
        uniform_B = jax.vmap(_uniform)(how.key_B2, step_B)
        drawn_B = invert_cdf(uniform_B[:, None], jax.nn.softmax(scaled_BV, axis=1)).astype(jnp.int32)
        tokens_B = jnp.where(greedy_B, tokens_B, drawn_B)
    return _told(logits_BV, tokens_B, form.top)


def _uniform(key_2: jax.Array, step: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key_2, impl="threefry2x32"), step))


def _told(logits_NV: jax.Array, tokens_N: jax.Array, top: int) -> Drawn:
    """What is said of tokens: their log-probabilities, and the likeliest others."""
    whole_N1 = jax.nn.logsumexp(logits_NV, axis=1, keepdims=True)
    chosen_N1 = jnp.take_along_axis(logits_NV, tokens_N[:, None], axis=1)
    if top:
        top_Nt, ids_Nt = jax.lax.top_k(logits_NV, min(top, logits_NV.shape[1]))
    else:
        top_Nt, ids_Nt = logits_NV[:, :0], jnp.zeros((len(tokens_N), 0), jnp.int32)
    return Drawn(tokens_N, (chosen_N1 - whole_N1)[:, 0], ids_Nt, top_Nt - whole_N1)


def _filtered(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Logits cut to the k likeliest, and to the nucleus p of these. Tokens that are as likely as the last one stay too."""
    order_BV = _ordered(logits_BV)
    by_k_B = _greatest(lambda bound_B: (order_BV >= bound_B[:, None]).sum(axis=1) >= top_k_B, len(top_k_B))
    logits_BV = jnp.where(order_BV >= by_k_B[:, None], logits_BV, -jnp.inf)
    probs_BV = jax.nn.softmax(logits_BV, axis=1)

    def enough(bound_B: jax.Array) -> jax.Array:
        return jnp.where(order_BV >= bound_B[:, None], probs_BV, 0.0).sum(axis=1) >= top_p_B

    by_p_B = jnp.where(top_p_B < 1, _greatest(enough, len(top_p_B)), 0)
    return jnp.where(order_BV >= by_p_B[:, None], logits_BV, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """Whole numbers in the order of floats."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)  # there is one zero
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _greatest(holds, rows: int) -> jax.Array:
    """The greatest whole number of 32 bits for which something holds, of each row; it must hold for all below it.

    Bit by bit, from the highest. To sort the vocabulary would take longer.
    """

    def try_bit(number: jax.Array, bound_B: jax.Array) -> jax.Array:
        higher_B = bound_B | (jnp.uint32(1) << (31 - number).astype(jnp.uint32))
        return jnp.where(holds(higher_B), higher_B, bound_B)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros(rows, jnp.uint32))
