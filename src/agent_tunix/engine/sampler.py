"""Sampling completions from exactly the policy being trained, and the logits that it gives to a text.

Prompts are read once each and shared by their group. One compiled program draws a token for every sequence, time after
time. Real completions end at a third of the limit on average, so once three quarters have ended it goes on with the others
alone, and stops when all have. What a sequence draws follows from its key, its place and the step, whatever goes on beside
it. Sampling inverts the cumulative distribution with one uniform number a row, which costs far less than Gumbel noise over
the vocabulary.

Several policies over one base are sampled in the same loop: their rows lie one policy after another and share every
product with the base. Each has its own key, so a policy draws what it would draw alone.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from agent_tunix.engine import compiler_options
from agent_tunix.kernels.draw import draw_tokens
from agent_tunix.kernels.mesh import EVERYWHERE, by_rows, cut, several_devices
from agent_tunix.models import decoding, lora, transformer
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts, Rollouts, pytree

NARROWER = 4  # times fewer sequences, when so many have ended
LEAST_ROWS, LEAST_STEPS = 8, 64  # it does not pay for fewer sequences, or shorter ones
EVERY = slice(None)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Hashable: a different one is a different program."""

    top_k: int | None
    top_p: float
    max_steps: int
    num_generations: int
    end_ids: tuple[int, ...]
    pad_id: int
    greedy: bool = False


@pytree
class Draw:
    """What one policy brings: its adapters, if any, its prompts, its randomness and its temperature (greedy has none)."""

    adapters: Adapters | None
    prompts: Prompts
    key: jax.Array
    temperature: ArrayLike = 1.0


@partial(jax.jit, static_argnames=("arch", "sampling"), compiler_options=compiler_options.LOOP_OPTIONS)
def sample(weights: Weights, draws: tuple[Draw, ...], *, arch: Architecture, sampling: Sampling) -> tuple[Rollouts, ...]:
    """Draws `num_generations` completions of each prompt of each policy; all bring equally many prompts."""
    adapters = lora.stack([draw.adapters for draw in draws])
    prompts = jax.tree.map(lambda *parts: cut(jnp.concatenate(parts), "fsdp"), *(draw.prompts for draw in draws))
    keys_K = jnp.stack([draw.key for draw in draws])
    G, C, K = sampling.num_generations, sampling.max_steps, len(draws)
    B = G * len(prompts.tokens_PS)
    weights, adapters = lora.merged_if_it_pays(weights, adapters, rows=B)
    hidden_PSD, prompt = transformer.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
    temperature_B1 = jnp.repeat(jnp.stack([jnp.asarray(draw.temperature, jnp.float32) for draw in draws]), B // K)[:, None]
    uniform_CB1 = jax.vmap(lambda step: _uniform(keys_K, step, B))(jnp.arange(C))

    def draw(hidden_BD, step, rows):
        logits_BV = cut(transformer.unembed(weights, cut(hidden_BD)), None, EVERYWHERE)
        return by_rows(draw_row, logits_BV, temperature_B1[rows], uniform_CB1[step][rows])

    k = 1 if sampling.greedy else sampling.top_k
    draw_row = partial(draw_tokens, k=k, top_p=sampling.top_p, pad_id=sampling.pad_id)

    def ends(tokens):
        return jnp.isin(tokens, jnp.array(sampling.end_ids))

    def draw_until(few, reading, rows, carry):
        """Goes on with some sequences until at most so many of each policy have not ended."""

        def more(carry):
            last, _, done_B, *_ = carry
            return (last + 1 < C) & ((~done_B).reshape(K, -1).sum(axis=1).max() > few)

        def decode(carry):
            last, last_B, done_B, cache, drawn = carry
            hidden_BD, cache = reading.read(cache, last_B, last, done_B)
            new = draw(hidden_BD, last + 1, rows)
            return last + 1, new[0], done_B | ends(new[0]), cache, record(drawn, new, last + 1, rows)

        return jax.lax.while_loop(more, decode, carry)

    def record(drawn, new, step, rows):
        def put(x_CB, x_B):
            x_B = x_B if rows is EVERY else x_CB[step].at[rows].set(x_B)
            return jax.lax.dynamic_update_index_in_dim(x_CB, x_B, step, 0)

        return jax.tree.map(put, drawn, new)

    reading = decoding.start(weights, adapters, arch, prompt, G, C)
    rows: slice | jax.Array = EVERY
    first = draw(jnp.repeat(hidden_PSD[:, -1], G, axis=0), 0, rows)
    drawn = record(jax.tree.map(lambda x_B: jnp.zeros((C, B), x_B.dtype), first), first, 0, rows)
    carry = 0, first[0], ends(first[0]), reading.cache, drawn
    for few in _narrowed_to(B // K, C):
        last, last_B, done_B, cache, drawn = draw_until(few, reading, rows, carry)
        kept_B = _unended(done_B.reshape(K, -1), few)
        reading, rows = reading.narrowed(cache, kept_B, last), jnp.arange(B)[rows][kept_B]
        carry = last, last_B[kept_B], done_B[kept_B], reading.cache, drawn
    *_, drawn = draw_until(0, reading, rows, carry)
    tokens_CB, logprobs_CB = drawn
    rollouts = _until_the_end(tokens_CB.T, logprobs_CB.T, ends, sampling.pad_id)
    return tuple(jax.tree.map(lambda x, k=k: cut(x[k * B // K : (k + 1) * B // K], "fsdp"), rollouts) for k in range(K))


@partial(jax.jit, static_argnames="arch", compiler_options=compiler_options.OPTIONS)
def logits(weights: Weights, adapters: Adapters | None, prompts: Prompts, *, arch: Architecture) -> jax.Array:
    """Float32 logits (P, S, V) at every token of prompts; those at padding mean nothing."""
    adapters = lora.over(weights, adapters)
    hidden_PSD, _ = transformer.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
    return transformer.unembed(weights, hidden_PSD)


def prepare(weights: Weights, draws: tuple[Draw, ...], *, arch: Architecture, sampling: Sampling) -> None:
    """What tracing `sample` would wait for: a kernel's compiler, which needs no interpreter. Arrays may be shapes."""
    adapters = jax.eval_shape(lora.stack, [draw.adapters for draw in draws])
    (P, S), K = draws[0].prompts.tokens_PS.shape, len(draws)
    few = [K * n for n in _narrowed_to(P * sampling.num_generations, sampling.max_steps)]
    decoding.prepare(weights, adapters, arch, (K * P, S), sampling.num_generations, sampling.max_steps, few)


def narrower(rows: int, steps: int) -> list[int]:
    """To how many sequences of a policy a rollout narrows, one time after the other."""
    few = [rows // NARROWER**n for n in (1, 2)] if steps >= LEAST_STEPS else []
    return [n for n in few if n >= LEAST_ROWS]


def _narrowed_to(rows: int, steps: int) -> list[int]:
    return [] if several_devices() else narrower(rows, steps)


def _unended(done_KR: jax.Array, few: int) -> jax.Array:
    """The places of so many sequences of each policy, among them all that have not ended."""
    policies, rows = done_KR.shape
    first_KF = jnp.sort(jnp.argsort(done_KR, axis=1, stable=True)[:, :few], axis=1)
    return (first_KF + rows * jnp.arange(policies)[:, None]).reshape(-1)


def _until_the_end(tokens_BC, logprobs_BC, ends, pad_id: int) -> Rollouts:
    """What each row drew up to its first end token; the rest becomes padding.

    A row that has ended goes on drawing with the others. The loop stops early only when all have ended, so what was never
    drawn lies after an end too. Cutting all rows here spares each step a few small kernels.
    """
    ends_BC = ends(tokens_BC)
    mask_BC = jnp.cumsum(ends_BC, axis=1) == ends_BC
    tokens_BC, logprobs_BC = jnp.where(mask_BC, tokens_BC, pad_id), jnp.where(mask_BC, logprobs_BC, 0.0)
    return Rollouts(tokens_BC, mask_BC, logprobs_BC, ends_BC.any(axis=1))


def _uniform(keys_K: jax.Array, step: ArrayLike, rows: int) -> jax.Array:
    """One number per row, which follows from the key of its policy and the step alone."""

    def of_one(key):
        return jax.random.uniform(jax.random.fold_in(key, step), (rows // len(keys_K), 1))

    return jax.vmap(of_one)(keys_K).reshape(rows, 1)
