"""The GRPO objective (Shao et al., 2024, arXiv:2402.03300, equations 3 and 4).

    J = 1/B sum_b 1/|o_b| sum_t { min(rho A, clip(rho, 1 - eps, 1 + eps) A) - beta KL }
    rho = pi(o_t) / pi_old(o_t)            KL = pi_ref(o_t) / pi(o_t) - log(pi_ref(o_t) / pi(o_t)) - 1

All log-probabilities are at the sampling temperature: the policy that is trained is the policy that was sampled. The KL is
Schulman's k3 estimate; as in the paper its gradient flows through the sampled tokens only. `pi_old` is what
the sampler reported, so the ratio also corrects for any difference between sampler and trainer. Where nothing
was sampled (demonstrations, with advantage 1) the surrogate is A log pi(o_t), and the loss is the usual cross-entropy.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_tunix.types import pytree

LOGITS_BUDGET = 2**25  # float32 logits alive at once while log-probabilities are taken: 128 MiB


@pytree
class LossInputs:
    logprobs_BC: jax.Array
    old_logprobs_BC: jax.Array | None
    reference_logprobs_BC: jax.Array | None
    entropy_BC: jax.Array
    mask_BC: jax.Array
    advantages_B: jax.Array


@pytree
class LossStats:
    """Token-weighted sums over sequences, to be divided by the number of sequences."""

    loss: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clip_fraction: jax.Array
    mismatch_kl: jax.Array


def grpo_loss(inputs: LossInputs, epsilon: jax.typing.ArrayLike, beta: jax.typing.ArrayLike) -> tuple[jax.Array, LossStats]:
    """Minus the objective, summed over sequences rather than averaged, so that micro-batches add up."""
    advantages_BC = inputs.advantages_B[:, None]
    if inputs.old_logprobs_BC is None:
        log_ratio_BC = jnp.zeros_like(inputs.logprobs_BC)
        unclipped_BC = surrogate_BC = inputs.logprobs_BC * advantages_BC
    else:
        log_ratio_BC = _where_seen(inputs.logprobs_BC - inputs.old_logprobs_BC, inputs.mask_BC)
        ratio_BC = jnp.exp(log_ratio_BC)
        unclipped_BC = ratio_BC * advantages_BC
        clipped_BC = jnp.clip(ratio_BC, 1 - epsilon, 1 + epsilon) * advantages_BC
        surrogate_BC = jnp.minimum(unclipped_BC, clipped_BC)
    objective_BC = surrogate_BC
    kl_BC = jnp.zeros_like(surrogate_BC)
    if inputs.reference_logprobs_BC is not None:
        kl_BC = k3(_where_seen(inputs.reference_logprobs_BC - inputs.logprobs_BC, inputs.mask_BC))
        objective_BC = surrogate_BC - beta * kl_BC

    def per_sequence(values_BC):
        return sequence_means(values_BC, inputs.mask_BC).sum()

    loss = -per_sequence(objective_BC)
    stats = LossStats(
        loss=loss,
        kl=per_sequence(kl_BC),
        entropy=per_sequence(inputs.entropy_BC),
        clip_fraction=per_sequence(surrogate_BC < unclipped_BC),
        mismatch_kl=per_sequence(k3(-log_ratio_BC)),
    )
    return loss, jax.lax.stop_gradient(stats)


def k3(log_ratio: jax.Array) -> jax.Array:
    """Schulman's unbiased, non-negative estimate of KL(p || q) from samples of p, given log q - log p."""
    return jnp.expm1(log_ratio) - log_ratio


def _where_seen(log_ratio_BC: jax.Array, mask_BC: jax.Array) -> jax.Array:
    """Zero under the mask: what the model thinks of padding may be so unlikely that its exponential is infinite."""
    return jnp.where(mask_BC, log_ratio_BC, 0.0)


def sequence_means(values_BC: jax.Array, mask_BC: jax.Array) -> jax.Array:
    """Mean over each sequence's own tokens; a sequence with none counts zero."""
    return (values_BC * mask_BC).sum(axis=1) / jnp.maximum(mask_BC.sum(axis=1), 1)


def token_logprobs(hidden_BCD, tokens_BC, unembed, temperature) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token and the entropy of its distribution, both at the temperature.

    `unembed` turns hidden states into logits. The vocabulary is large, so logits are made for a few tokens at a time, and
    made again in the backward pass instead of being kept.
    """
    B, C, D = hidden_BCD.shape

    @jax.checkpoint
    def one(args):
        hidden_D, token = args
        logprobs_V = jax.nn.log_softmax(unembed(hidden_D) / temperature)
        frozen_V = jax.lax.stop_gradient(logprobs_V)
        return logprobs_V[token], -(jnp.exp(frozen_V) * frozen_V).sum()

    vocab_size = jax.eval_shape(unembed, hidden_BCD).shape[-1]
    rows = max(1, LOGITS_BUDGET // vocab_size)
    flat = hidden_BCD.reshape(B * C, D), tokens_BC.reshape(B * C)
    logprobs, entropy = jax.lax.map(one, flat, batch_size=rows) if rows < B * C else jax.vmap(one)(flat)
    return logprobs.reshape(B, C), entropy.reshape(B, C)
