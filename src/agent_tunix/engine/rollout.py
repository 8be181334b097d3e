"""Sampling completions from exactly the policy being trained.

Prompts are read once each and shared by their group. One compiled loop draws a token for every sequence, and stops when
all have ended. Sampling inverts the cumulative distribution with one uniform number a row, which costs far less
than Gumbel noise over the vocabulary.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from agent_tunix.models import gemma3
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Prompts, Rollouts


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Hashable: a different one is a different program. Temperature 0 is greedy."""

    temperature: float
    top_k: int | None
    top_p: float
    max_steps: int
    num_generations: int
    end_ids: tuple[int, ...]
    pad_id: int


@partial(jax.jit, static_argnames=("arch", "sampling"))
def sample(
    weights: Weights, adapters: Adapters | None, prompts: Prompts, key: jax.Array, *, arch: Architecture, sampling: Sampling
) -> Rollouts:
    """Draws `num_generations` completions of each prompt."""
    G, C = sampling.num_generations, sampling.max_steps
    hidden_PSD, prompt = gemma3.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
    first_B = jnp.repeat(prompts.positions_PS[:, -1] + 1, G)
    B = first_B.shape[0]

    def draw(hidden_BD, step, done_B):
        logits_BV = gemma3.unembed(weights, hidden_BD)
        tokens_B = draw_tokens(logits_BV, jax.random.fold_in(key, step), sampling)
        logprobs_B = _chosen_logprobs(logits_BV, tokens_B, sampling.temperature or 1.0)
        tokens_B = jnp.where(done_B, sampling.pad_id, tokens_B)
        ended_B = done_B | jnp.isin(tokens_B, jnp.array(sampling.end_ids))
        return tokens_B, jnp.where(done_B, 0.0, logprobs_B), ended_B

    def more(carry):
        step, _, done_B, *_ = carry
        return (step < C) & ~done_B.all()

    def decode(carry):
        step, last_B, done_B, written, rollouts = carry
        positions_B1 = jnp.where(done_B, -1, first_B + step - 1)[:, None]
        hidden_B1D, new = gemma3.forward(weights, adapters, arch, last_B[:, None], positions_B1, (prompt, written))
        tokens_B, logprobs_B, ended_B = draw(hidden_B1D[:, 0], step, done_B)
        written = gemma3.write_segment(written, new, step - 1)
        return step + 1, tokens_B, ended_B, written, _record(rollouts, step, tokens_B, logprobs_B, ~done_B, ended_B)

    none_B = jnp.zeros(B, bool)
    tokens_B, logprobs_B, ended_B = draw(jnp.repeat(hidden_PSD[:, -1], G, axis=0), 0, none_B)
    blank = Rollouts(
        jnp.full((B, C), sampling.pad_id, jnp.int32), jnp.zeros((B, C), bool), jnp.zeros((B, C), jnp.float32), none_B
    )
    rollouts = _record(blank, 0, tokens_B, logprobs_B, ~none_B, ended_B)
    written = gemma3.empty_segment(arch, B, C, weights.embed_VD.dtype)
    *_, rollouts = jax.lax.while_loop(more, decode, (1, tokens_B, ended_B, written, rollouts))
    return rollouts


def draw_tokens(logits_BV: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """One token a row: greedy, or from the temperature's distribution cut to the top k and the nucleus p. Never padding."""
    logits_BV = logits_BV.at[:, sampling.pad_id].set(-jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    vocab_size = logits_BV.shape[-1]
    k = min(sampling.top_k or vocab_size, vocab_size)
    scaled = logits_BV / sampling.temperature
    if k == vocab_size and sampling.top_p >= 1:
        return _invert_cdf(key, jax.nn.softmax(scaled, axis=-1)).astype(jnp.int32)
    top_Bk, ids_Bk = jax.lax.top_k(scaled, k)
    probs_Bk = jax.nn.softmax(top_Bk, axis=-1)
    before_Bk = jnp.cumsum(probs_Bk, axis=-1) - probs_Bk
    nucleus_Bk = jnp.where(before_Bk < sampling.top_p, probs_Bk, 0.0)
    choice_B = _invert_cdf(key, nucleus_Bk)
    return jnp.take_along_axis(ids_Bk, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _invert_cdf(key: jax.Array, weights_BN: jax.Array) -> jax.Array:
    """An index a row, drawn in proportion to the weights; one of weight zero is never drawn.

    A parallel prefix sum rounds every entry in its own way, so it may rise where the weight is zero: those are taken out.
    """
    cdf_BN = jnp.where(weights_BN > 0, jnp.cumsum(weights_BN, axis=-1), -1.0)
    greatest_B1 = cdf_BN.max(axis=-1, keepdims=True)
    threshold_B1 = jax.random.uniform(key, greatest_B1.shape) * greatest_B1
    return jnp.argmax((cdf_BN > threshold_B1) | (cdf_BN == greatest_B1), axis=-1)


def _chosen_logprobs(logits_BV: jax.Array, tokens_B: jax.Array, temperature: float) -> jax.Array:
    scaled_BV = logits_BV / temperature
    chosen_B = jnp.take_along_axis(scaled_BV, tokens_B[:, None], axis=-1)[:, 0]
    return chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)


def _record(rollouts: Rollouts, step, tokens_B, logprobs_B, live_B, ended_B) -> Rollouts:
    return Rollouts(
        rollouts.tokens_BC.at[:, step].set(tokens_B),
        rollouts.mask_BC.at[:, step].set(live_B),
        rollouts.logprobs_BC.at[:, step].set(logprobs_B),
        ended_B,
    )
