"""One optimizer update from one batch: log-probabilities, loss, gradient, optimizer.

A batch larger than a micro-batch is run in slices of whole groups whose gradients are added. Every token has its weight
in the whole batch, so the result does not depend on how it was sliced. A group's prompt is read once and its gradient
flows back from all its completions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.logprobs import token_logprobs
from agent_tunix.algorithm.objectives import Coefficients, LossForm, LossStats, policy_loss
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import compiler_options
from agent_tunix.kernels.mesh import cut
from agent_tunix.models import transformer
from agent_tunix.models.architecture import Architecture, Weights
from agent_tunix.models.lora import Adapters, Trainable, over, policy_of, stack
from agent_tunix.models.sharding import keep_in_place
from agent_tunix.types import Batch, Prompts, TrainState, pytree


@pytree
class UpdateStats:
    loss: LossStats
    lr: jax.Array
    grad_norm: jax.Array
    update_norm: jax.Array
    update_survival: jax.Array
    applied: jax.Array


def init_state(trainable: Trainable, optimizer: str = "adamw") -> TrainState:
    return TrainState(trainable, optimizers.init(trainable, optimizer), jnp.zeros((), jnp.int32))


def evaluation_trainable(state: TrainState, optimizer: str) -> Trainable:
    """The parameters to evaluate and export, which are not always those that the next update starts from."""
    return optimizers.evaluation_params(state.optimizer, state.trainable, optimizer)


@partial(
    jax.jit,
    static_argnames=("arch", "micro_batches", "form", "optimizer"),
    donate_argnames="state",
    compiler_options=compiler_options.OPTIONS,
)
def update(
    state: TrainState,
    batch: Batch,
    weights: Weights,
    h: Hyperparameters,
    c: Coefficients,
    max_kl: ArrayLike,
    *,
    arch: Architecture,
    micro_batches: int,
    form: LossForm = LossForm(),  # noqa: B008  # frozen
    optimizer: str = "adamw",
) -> tuple[TrainState, UpdateStats]:
    """One update of a state, which is donated."""
    grads, stats_K = _gradients(state.trainable, (batch,), weights, (c,), arch, micro_batches, form)
    return _finish(state, grads, _at(0, stats_K), h, max_kl, arch, optimizer)


@partial(jax.jit, static_argnames=("arch", "micro_batches", "form"), compiler_options=compiler_options.OPTIONS)
def gradients_together(
    adapters: tuple[Adapters, ...],
    batches: tuple[Batch, ...],
    weights: Weights,
    cs: tuple[Coefficients, ...],
    *,
    arch: Architecture,
    micro_batches: int,
    form: LossForm,
) -> tuple[Trainable, LossStats]:
    """Gradients of several policies, stacked as their adapters are, and the statistics of their losses.

    They share every product with the base: all their rows go through it at once.
    """
    return _gradients(stack(adapters), batches, weights, cs, arch, micro_batches, form)


@partial(jax.jit, static_argnames=("arch", "optimizer"), donate_argnames="state", compiler_options=compiler_options.OPTIONS)
def update_one_of(
    state: TrainState,
    index: ArrayLike,
    grads: Trainable,
    stats_K: LossStats,
    h: Hyperparameters,
    max_kl: ArrayLike,
    *,
    arch: Architecture,
    optimizer: str,
) -> tuple[TrainState, UpdateStats]:
    """One update of a state, which is donated, by its own among several policies' gradients: a small program for all."""
    return _finish(state, _at(index, grads, axis=1), _at(index, stats_K), h, max_kl, arch, optimizer)


def _at(index: ArrayLike, stacked: Any, axis: int = 0) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), stacked)


def _gradients(trainable, batches, weights, cs, arch, micro_batches: int, form: LossForm) -> tuple[Trainable, LossStats]:
    """The gradient over a whole batch, of one policy or of several that are stacked, and the statistics of each."""

    def accumulate(carry, part):
        loss = partial(_loss, part=part, weights=weights, cs=cs, arch=arch, form=form)
        (_, stats_K), grads = jax.value_and_grad(loss, has_aux=True)(trainable)
        return jax.tree.map(jnp.add, carry, grads), stats_K

    zeros = jax.tree.map(jnp.zeros_like, trainable)
    grads, stats_NK = jax.lax.scan(accumulate, zeros, _micro_batches(batches, micro_batches))
    stats_K, sequences = jax.tree.map(lambda s: s.sum(axis=0), stats_NK), len(batches[0].tokens_BC)
    means_K = jax.tree.map(lambda s: s / sequences, stats_K)
    return grads, dataclasses.replace(means_K, loss=stats_K.loss)


def _finish(state, grads, stats, h, max_kl, arch, optimizer: str) -> tuple[TrainState, UpdateStats]:
    """One step of the named optimizer; where numbers are out of hand only the count of steps changes."""
    trainable, moments, change = optimizers.step(grads, state.optimizer, state.trainable, h, optimizer)
    grad_norm, update_norm = optax.tree.norm(grads), optax.tree.norm(change)
    finite = jnp.isfinite(stats.loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    applied = finite & ~(stats.kl > max_kl)
    new, old = (trainable, moments), (state.trainable, state.optimizer)
    trainable, moments = jax.tree.map(partial(jnp.where, applied), new, old)
    survival = _share_changed(state.trainable, trainable)
    lr = jnp.asarray(h.learning_rate)
    stats = UpdateStats(stats, lr, grad_norm, update_norm, survival, applied)
    return keep_in_place(TrainState(trainable, moments, state.step + 1), arch), stats


@partial(jax.jit, static_argnames=("arch", "micro_batches"), compiler_options=compiler_options.OPTIONS)
def batch_logprobs(
    batches: tuple[Batch, ...],
    weights: Weights,
    adapters: Adapters | tuple[Adapters, ...] | None,
    temperatures: tuple[ArrayLike, ...],
    *,
    arch: Architecture,
    micro_batches: int,
) -> tuple[jax.Array, ...]:
    """Log-probabilities of the completions of batches under the base alone, with adapters for all, or with those of each."""
    stacked = stack(adapters) if isinstance(adapters, tuple) else adapters

    def logprobs(part):
        temperature_B = _by_row(temperatures, part[1])
        return completion_logprobs(weights, stacked, *part, arch=arch, temperature=temperature_B)[0]

    parts = _micro_batches(tuple((b.prompts, b.tokens_BC, b.mask_BC) for b in batches), micro_batches)
    found = jax.lax.map(logprobs, parts)
    return tuple(x.reshape(batches[0].tokens_BC.shape) for x in jnp.split(found, len(batches), axis=1))


def _by_policy(values: Sequence[ArrayLike]) -> jax.Array:
    return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def _by_row(values: Sequence[ArrayLike], rows: jax.Array) -> jax.Array:
    """Each policy's value, repeated for each of its rows."""
    return jnp.repeat(_by_policy(values), len(rows) // len(values))


def completion_logprobs(
    weights: Weights,
    adapters: Adapters | None,
    prompts: Prompts,
    tokens_BC: jax.Array,
    mask_BC: jax.Array,
    *,
    arch: Architecture,
    temperature: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy of every completion token given its prompt and the tokens before it."""
    B, C = tokens_BC.shape
    G = B // prompts.tokens_PS.shape[0]
    first_B1 = jnp.repeat(prompts.positions_PS[:, -1:] + 1, G, axis=0)
    positions_BC = jnp.where(mask_BC, first_B1 + jnp.arange(C), -1)
    adapters = over(weights, adapters)
    hidden_PSD, hidden_BCD = transformer.forward_groups(weights, adapters, arch, prompts, tokens_BC, positions_BC)
    last_B1D = jnp.repeat(hidden_PSD[:, -1:], G, axis=0)
    before_BCD = jnp.concatenate([last_B1D, hidden_BCD[:, :-1]], axis=1)
    return token_logprobs(before_BCD, tokens_BC, weights.output_VD, temperature)


def _loss(
    trainable: Trainable, part: Batch, weights: Weights, cs: tuple[Coefficients, ...], arch: Architecture, form: LossForm
) -> tuple[jax.Array, LossStats]:
    """The sum of the losses of K policies, whose rows lie one policy after another, and the statistics of each."""
    temperature_B = _by_row([c.temperature for c in cs], part.tokens_BC)
    logprobs_BC, entropy_BC = completion_logprobs(
        *policy_of(weights, trainable), part.prompts, part.tokens_BC, part.mask_BC, arch=arch, temperature=temperature_B
    )
    of_each = jax.tree.map(lambda x: x.reshape(len(cs), -1, *x.shape[1:]), (logprobs_BC, entropy_BC, part))
    c_K = jax.tree.map(lambda *values: _by_policy(values), *cs)
    losses_K, stats_K = jax.vmap(partial(policy_loss, form=form))(*of_each, c_K)  # type: ignore[call-arg]  # mypy and partial
    return losses_K.sum(), stats_K


def _micro_batches(members: tuple, count: int):
    """Cuts leading axes into `count` equal slices, each with the rows of all members, one member after another.

    Groups stay whole, as sequences lie by prompt.
    """

    def slices(*leaves):
        return cut(jnp.concatenate([x.reshape(count, -1, *x.shape[1:]) for x in leaves], axis=1), None, "fsdp")

    return jax.tree.map(slices, *members)


def _share_changed(old, new) -> jax.Array:
    """Counted row by row and added up in float32: all weights of 4B are more than an integer of 32 bits holds."""

    def count(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a != b).sum(axis=tuple(range(1, a.ndim))).astype(jnp.float32).sum()

    changed = jax.tree.leaves(jax.tree.map(count, old, new))
    return jnp.stack(changed).sum() / float(sum(leaf.size for leaf in jax.tree.leaves(old)))
