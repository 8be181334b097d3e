"""Drawing a token of every row: by two kernels on an NVIDIA GPU (`top_k.py`), where they serve, else in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_tunix.kernels import device, top_k


def draw_tokens(
    logits_BV: jax.Array, temperature_B1: jax.Array, uniform_B1: jax.Array, *, k: int | None, top_p: float, pad_id: int
) -> tuple[jax.Array, jax.Array]:
    """One token per row, and its log-probability among all tokens.

    It is drawn by a uniform number from the k likeliest (None: all; 1: the likeliest) and the nucleus p of these.
    """
    k = min(k or logits_BV.shape[1], logits_BV.shape[1])
    if device.capability() >= device.AMPERE and top_k.serve(k, logits_BV.shape[1]):
        return top_k.draw(logits_BV, temperature_B1, uniform_B1, k=k, top_p=top_p, pad_id=pad_id)
    logits_BV = (logits_BV - logits_BV.max(axis=1, keepdims=True)) / temperature_B1  # the greatest stays finite
    tokens_B = by_sorting(logits_BV, uniform_B1, k=k, top_p=top_p, pad_id=pad_id)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)


def by_sorting(logits_BV: jax.Array, uniform_B1: jax.Array, *, k: int, top_p: float, pad_id: int) -> jax.Array:
    """One token a row, drawn from the distribution cut to the top k and the nucleus p. Never padding."""
    vocab_size = logits_BV.shape[1]
    logits_BV = jnp.where(jnp.arange(vocab_size) == pad_id, -jnp.inf, logits_BV)
    if k == 1:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if k == vocab_size and top_p >= 1:
        return invert_cdf(uniform_B1, jax.nn.softmax(logits_BV, axis=-1)).astype(jnp.int32)
    top_Bk, ids_Bk = jax.lax.top_k(logits_BV, k)
    probs_Bk = jax.nn.softmax(top_Bk, axis=-1)
    before_Bk = jnp.cumsum(probs_Bk, axis=-1) - probs_Bk
    nucleus_Bk = jnp.where(before_Bk < top_p, probs_Bk, 0.0)
    choice_B = invert_cdf(uniform_B1, nucleus_Bk)
    return jnp.take_along_axis(ids_Bk, choice_B[:, None], axis=-1)[:, 0].astype(jnp.int32)


def invert_cdf(uniform_B1: jax.Array, weights_BN: jax.Array) -> jax.Array:
    """An index a row, drawn in proportion to the weights; one of weight zero is never drawn.

    A parallel prefix sum rounds every entry in its own way, so it may rise where a weight is zero; those are left out.
    """
    cdf_BN = jnp.where(weights_BN > 0, jnp.cumsum(weights_BN, axis=-1), -1.0)
    greatest_B1 = cdf_BN.max(axis=-1, keepdims=True)
    threshold_B1 = uniform_B1 * greatest_B1
    return jnp.argmax((cdf_BN > threshold_B1) | (cdf_BN == greatest_B1), axis=-1)
