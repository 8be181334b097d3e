"""What an update maximises: GRPO (Shao et al., 2024, arXiv:2402.03300) and its kin, as rows of one table.

Every objective is a sum over the learnt tokens t of the completions b of a batch,

    J = sum_bt w_bt { c_bt S(rho_bt, A_b) - beta KL_bt },      rho_bt = pi(o_bt) / pi_old(o_bt),

and a row of `OBJECTIVES` says which ratio rho, which surrogate S, which weights w and which baseline of the advantages A
it has. GRPO's own, equations 3 and 4 of the paper, is

    rho   of each token
    S     min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A)
    w     1 / (B |o_b|): every completion counts the same, whatever its length
    A     reward minus the mean of its group, over the group's standard deviation

Weights are made on the host, once for the whole batch, so nothing is divided after the sum, however a batch is sliced.
Where we depart from the papers or from other programs:

- All log-probabilities are at the sampling temperature: the policy that is trained is the policy that was sampled.
- `pi_old` is what the sampler reported, so the ratio also corrects for any difference between sampler and trainer. With an
  importance correction (c) it is the trainer's own, and the difference is weighed by c = pi_old / pi_sampler.
- The KL is that from the reference at the sampled tokens, as a term of the loss; the gradient flows through it as the paper
  has it. With `kl_correction` each term is multiplied by rho, as TRL does by default: this gives the gradient of the true
  KL where the policy has moved from the one that sampled. At the first update from a batch rho is 1, and still has a
  gradient, so the two differ from the start.
- Where nothing was sampled (demonstrations, with advantage 1) S is A log pi(o), and the loss is the usual cross-entropy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from agent_tunix.types import Batch, pytree


@pytree
class Coefficients:
    """The scalars of a loss. They are inputs of the compiled update, so the runs of a sweep may differ in them."""

    temperature: ArrayLike
    beta: ArrayLike = 0.0
    epsilon: ArrayLike = 0.2
    epsilon_high: ArrayLike = 0.2
    delta: ArrayLike = math.inf
    importance_cap: ArrayLike = math.inf
    sapo_temperature_pos: ArrayLike = 1.0
    sapo_temperature_neg: ArrayLike = 1.05


@dataclasses.dataclass(frozen=True)
class LossForm:
    """What is compiled into an update: names of rows in the tables of this module."""

    objective: str = "grpo"
    kl_estimator: str = "k3"
    kl_correction: bool = False
    importance_correction: str = "none"


@pytree
class LossStats:
    """The loss, and means over the tokens of a sequence, summed over sequences; an update divides these by their number."""

    loss: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clip_fraction: jax.Array
    mismatch_kl: jax.Array


# Ratios, from the log-ratio of each token (zero where none is learnt) and the mask of what is learnt.


def token_ratio(log_ratio_BC: jax.Array, learnt_BC: jax.Array) -> jax.Array:
    return jnp.exp(log_ratio_BC)


def sequence_ratio(log_ratio_BC: jax.Array, learnt_BC: jax.Array) -> jax.Array:
    """GSPO (Zheng et al., 2025, arXiv:2507.18071, equation 7): the geometric mean over a completion, for all its tokens."""
    mean_B1 = sequence_means(log_ratio_BC, learnt_BC)[:, None]
    return jnp.broadcast_to(jnp.exp(mean_B1), log_ratio_BC.shape)


def sequence_ratio_of_tokens(log_ratio_BC: jax.Array, learnt_BC: jax.Array) -> jax.Array:
    """GSPO-token (equation 14 there): the value of the sequence's ratio, with the gradient of the token's."""
    sequence_BC = jax.lax.stop_gradient(sequence_ratio(log_ratio_BC, learnt_BC))
    return sequence_BC * jnp.exp(log_ratio_BC - jax.lax.stop_gradient(log_ratio_BC))


def whole_ratio(log_ratio_BC: jax.Array, learnt_BC: jax.Array) -> jax.Array:
    """The probability of the whole completion over what it was, for all its tokens."""
    product_B1 = jnp.exp((log_ratio_BC * learnt_BC).sum(axis=1, keepdims=True))
    return jnp.broadcast_to(product_B1, log_ratio_BC.shape)


# Surrogates: what a token contributes, and whether its ratio was out of bounds.


def clipped(ratio_BC, logprobs_BC, advantages_B1, c: Coefficients) -> tuple[jax.Array, jax.Array]:
    """PPO's, with a higher upper bound where `epsilon_high` says so (DAPO's clip-higher).

    `delta` bounds the ratio where the advantage is negative too, where PPO's minimum does not (INTELLECT-2, Prime
    Intellect, 2025, arXiv:2505.07291).
    """
    unclipped_BC = ratio_BC * advantages_B1
    bounded_BC = jnp.clip(ratio_BC, 1 - c.epsilon, 1 + c.epsilon_high) * advantages_B1
    surrogate_BC = jnp.minimum(jnp.minimum(ratio_BC, c.delta) * advantages_B1, bounded_BC)
    return surrogate_BC, surrogate_BC != unclipped_BC


def capped_policy_gradient(ratio_BC, logprobs_BC, advantages_B1, c: Coefficients) -> tuple[jax.Array, jax.Array]:
    """CISPO (MiniMax, 2025, arXiv:2506.13585): the ratio is a weight, capped, and every token keeps its gradient."""
    cap = 1 + jnp.asarray(c.epsilon_high)
    weight_BC = jax.lax.stop_gradient(jnp.minimum(ratio_BC, cap))
    return weight_BC * advantages_B1 * logprobs_BC, ratio_BC > cap


def soft_gate(ratio_BC, logprobs_BC, advantages_B1, c: Coefficients) -> tuple[jax.Array, jax.Array]:
    """SAPO (Gao et al., 2025, arXiv:2511.20347): a sigmoid in place of the clip, steeper where the advantage is negative."""
    positive, negative = jnp.asarray(c.sapo_temperature_pos), jnp.asarray(c.sapo_temperature_neg)
    tau_B1 = jnp.where(advantages_B1 > 0, positive, negative)
    gate_BC = jax.nn.sigmoid(tau_B1 * (ratio_BC - 1)) * 4 / tau_B1
    return gate_BC * advantages_B1, jnp.zeros_like(ratio_BC, bool)


# Weights of the tokens of a batch, on the host; `longest` is the most tokens that a completion may have.


def per_sequence(learnt_BC: np.ndarray, longest: int) -> np.ndarray:
    """Completions count the same: each token 1 / (B |o_b|)."""
    return learnt_BC / (len(learnt_BC) * np.maximum(learnt_BC.sum(axis=1, keepdims=True), 1))


def per_token(learnt_BC: np.ndarray, longest: int) -> np.ndarray:
    """Tokens of the batch count the same, so long completions count more (DAPO, Yu et al., 2025, arXiv:2503.14476)."""
    return learnt_BC / max(learnt_BC.sum(), 1)


def per_longest(learnt_BC: np.ndarray, longest: int) -> np.ndarray:
    """Tokens count the same in every batch, by a constant (Dr. GRPO, Liu et al., 2025, arXiv:2503.20783)."""
    return learnt_BC / (len(learnt_BC) * longest)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A row of the table; the fields that it leaves out are GRPO's."""

    ratio: Callable[[jax.Array, jax.Array], jax.Array] = token_ratio
    surrogate: Callable[..., tuple[jax.Array, jax.Array]] = clipped
    weights: Callable[[np.ndarray, int], np.ndarray] = per_sequence
    baseline: Literal["mean", "leave_one_out"] = "mean"


OBJECTIVES = {
    "grpo": Objective(),
    "dr_grpo": Objective(weights=per_longest),
    "bnpo": Objective(weights=per_token),
    "dapo": Objective(weights=per_token),  # what else makes DAPO are keys, which grpo=dapo sets
    "gspo": Objective(ratio=sequence_ratio),
    "gspo_token": Objective(ratio=sequence_ratio_of_tokens),
    "cispo": Objective(surrogate=capped_policy_gradient, weights=per_token),
    "rloo": Objective(ratio=whole_ratio, baseline="leave_one_out"),  # Ahmadian et al., 2024, arXiv:2402.14740
    "sapo": Objective(surrogate=soft_gate),
}


def k3(log_ratio: jax.Array) -> jax.Array:
    """Schulman's unbiased, non-negative estimate of KL(p || q) from samples of p, given log q - log p."""
    return jnp.expm1(log_ratio) - log_ratio


# Estimates of KL(p || q) at a sample of p, given log q - log p (Schulman, 2020, joschu.net/blog/kl-approx.html).
KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio**2 / 2,
    "k3": k3,
}

# Weights of tokens that the sampler drew from a policy a little other than the trainer's, given trainer / sampler and a cap.
IMPORTANCE_CORRECTIONS: dict[str, Callable[[jax.Array, ArrayLike], jax.Array] | None] = {
    "none": None,
    "truncate": jnp.minimum,
    "mask": lambda ratio, cap: jnp.where(ratio > cap, 0.0, ratio),
}


def policy_loss(
    logprobs_BC: jax.Array, entropy_BC: jax.Array, batch: Batch, c: Coefficients, form: LossForm
) -> tuple[jax.Array, LossStats]:
    """Minus the objective, of a batch or of a slice of one: with the weights that tokens were given, slices add up.

    `logprobs_BC` and `entropy_BC` are those of the policy that is trained.
    """
    assert batch.advantages_B is not None and batch.weights_BC is not None, "the batch has been scored"  # noqa: PT018
    row, learnt_BC, advantages_B1 = OBJECTIVES[form.objective], batch.learnt_BC, batch.advantages_B[:, None]

    def where_learnt(log_ratio_BC: jax.Array) -> jax.Array:
        """Zero elsewhere, as a model may find padding so unlikely that the exponential of the ratio is infinite."""
        return jnp.where(learnt_BC, log_ratio_BC, 0.0)

    ratio_BC = jnp.ones_like(logprobs_BC)
    from_sampler_BC = jnp.zeros_like(logprobs_BC)
    if batch.old_logprobs_BC is None:
        surrogate_BC, clipped_BC = advantages_B1 * logprobs_BC, jnp.zeros_like(learnt_BC)
    else:
        from_sampler_BC = where_learnt(logprobs_BC - batch.old_logprobs_BC)
        old_BC = batch.old_logprobs_BC if batch.trainer_logprobs_BC is None else batch.trainer_logprobs_BC
        ratio_BC = row.ratio(where_learnt(logprobs_BC - old_BC), learnt_BC)
        surrogate_BC, clipped_BC = row.surrogate(ratio_BC, logprobs_BC, advantages_B1, c)
        if (correction := IMPORTANCE_CORRECTIONS[form.importance_correction]) and batch.trainer_logprobs_BC is not None:
            drift_BC = where_learnt(batch.trainer_logprobs_BC - batch.old_logprobs_BC)
            surrogate_BC = surrogate_BC * correction(jnp.exp(drift_BC), c.importance_cap)
    objective_BC, kl_BC = surrogate_BC, jnp.zeros_like(logprobs_BC)
    if batch.reference_logprobs_BC is not None:
        to_reference_BC = where_learnt(batch.reference_logprobs_BC - logprobs_BC)
        kl_BC = k3(to_reference_BC)  # what is measured, whichever estimate is learnt from
        term_BC = KL_ESTIMATORS[form.kl_estimator](to_reference_BC)
        objective_BC = surrogate_BC - c.beta * (ratio_BC * term_BC if form.kl_correction else term_BC)

    loss = -(jnp.where(learnt_BC, objective_BC, 0.0) * batch.weights_BC).sum()
    stats = LossStats(
        loss=loss,
        kl=sequence_means(kl_BC, learnt_BC).sum(),
        entropy=sequence_means(entropy_BC, learnt_BC).sum(),
        clip_fraction=sequence_means(clipped_BC, learnt_BC).sum(),
        mismatch_kl=sequence_means(k3(from_sampler_BC), learnt_BC).sum(),  # of the trainer from the sampler
    )
    return loss, jax.lax.stop_gradient(stats)


def sequence_means(values_BC: jax.Array, mask_BC: jax.Array) -> jax.Array:
    """Mean over each sequence's own tokens; a sequence with none counts zero."""
    return (values_BC * mask_BC).sum(axis=1) / jnp.maximum(mask_BC.sum(axis=1), 1)
