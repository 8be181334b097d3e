"""Sampling completions from exactly the policy being trained, and the logits that it gives to a text.

Prompts are read once each and shared by their group. One compiled loop draws a token for every sequence, and stops when
all have ended. Sampling inverts the cumulative distribution with one uniform number a row, which costs far less
than Gumbel noise over the vocabulary.

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
from agent_tunix.kernels.mesh import EVERYWHERE, by_rows, cut
from agent_tunix.models import decoding, lora, transformer
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts, Rollouts, pytree


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

    def draw(hidden_BD, step):
        logits_BV = cut(transformer.unembed(weights, cut(hidden_BD)), None, EVERYWHERE)
        return by_rows(draw_row, logits_BV, temperature_B1, uniform_CB1[step])

    k = 1 if sampling.greedy else sampling.top_k
    draw_row = partial(draw_tokens, k=k, top_p=sampling.top_p, pad_id=sampling.pad_id)

    def ends(tokens):
        return jnp.isin(tokens, jnp.array(sampling.end_ids))

    def more(carry):
        last, _, done_B, *_ = carry
        return (last + 1 < C) & ~done_B.all()

    def decode(carry):
        last, last_B, done_B, cache, drawn = carry
        hidden_BD, cache = read(cache, last_B, last, done_B)
        new = draw(hidden_BD, last + 1)
        return last + 1, new[0], done_B | ends(new[0]), cache, record(drawn, new, last + 1)

    def record(drawn, new, step):
        return jax.tree.map(lambda x_CB, x_B: jax.lax.dynamic_update_index_in_dim(x_CB, x_B, step, 0), drawn, new)

    first = draw(jnp.repeat(hidden_PSD[:, -1], G, axis=0), 0)
    drawn = record(jax.tree.map(lambda x_B: jnp.zeros((C, B), x_B.dtype), first), first, 0)
    cache, read = decoding.start(weights, adapters, arch, prompt, G, C)
    *_, drawn = jax.lax.while_loop(more, decode, (0, first[0], ends(first[0]), cache, drawn))
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
    P, S = draws[0].prompts.tokens_PS.shape
    decoding.prepare(weights, adapters, arch, (len(draws) * P, S), sampling.num_generations, sampling.max_steps)


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
