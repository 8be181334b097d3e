"""One optimizer update from one batch: log-probabilities, GRPO loss, gradient, optimizer.

A batch larger than a micro-batch is run in slices of whole groups whose gradients are added, so the result does
not depend on how it was sliced. A group's prompt is read once and its gradient flows back from all its completions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.loss import LossInputs, LossStats, grpo_loss, token_logprobs
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine import compiler
from agent_tunix.models import gemma3
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters, Trainable, policies
from agent_tunix.models.mesh import cut, keep_in_place
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
    """What a state has learnt, to be evaluated and exported; it is not always the very point that is trained."""
    return optimizers.evaluation_params(state.optimizer, state.trainable, optimizer)


def _updates(
    states: tuple[TrainState, ...],
    batches: tuple[Batch, ...],
    weights: Weights,
    hs: tuple[Hyperparameters, ...],
    max_kls: tuple[ArrayLike, ...],
    arch: Architecture,
    micro_batches: int,
    optimizer: str = "adamw",
) -> tuple[tuple[TrainState, UpdateStats], ...]:
    """A step of each of several states, which share every product with the base: all their rows go through it at once."""
    trainables = tuple(state.trainable for state in states)
    zeros = jax.tree.map(jnp.zeros_like, trainables)

    def accumulate(carry, part):
        loss = partial(_loss, part=part, weights=weights, hs=hs, arch=arch)
        (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(trainables)
        return jax.tree.map(jnp.add, carry, grads), stats

    total, stats = jax.lax.scan(accumulate, zeros, _micro_batches(batches, micro_batches))
    sequences = batches[0].tokens_BC.shape[0]
    grads, stats = jax.tree.map(lambda g: g / sequences, total), jax.tree.map(lambda s: s.sum(axis=0) / sequences, stats)
    finish = partial(_finish, arch=arch, optimizer=optimizer)
    return _each(finish, zip(states, grads, stats, hs, max_kls, strict=True))


def _finish(state, grads, stats, h, max_kl, *, arch, optimizer) -> tuple[TrainState, UpdateStats]:
    """One step of the optimizer of that name; where numbers are out of hand the step counts, but nothing else changes."""
    trainable, moments, change = optimizers.step(grads, state.optimizer, state.trainable, h, optimizer)
    grad_norm = optax.tree.norm(grads)
    applied = jnp.isfinite(stats.loss) & jnp.isfinite(grad_norm) & ~(stats.kl > max_kl)
    new, old = (trainable, moments), (state.trainable, state.optimizer)
    trainable, moments = jax.tree.map(partial(jnp.where, applied), new, old)
    survival = _share_changed(state.trainable, trainable)
    lr = jnp.asarray(h.learning_rate)
    stats = UpdateStats(stats, lr, grad_norm, optax.tree.norm(change), survival, applied)
    return keep_in_place(TrainState(trainable, moments, state.step + 1), arch), stats


STATIC = ("arch", "micro_batches", "optimizer")
update_together = jax.jit(_updates, static_argnames=STATIC, compiler_options=compiler.OPTIONS)


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state", compiler_options=compiler.OPTIONS)
def update(
    state: TrainState, batch: Batch, weights: Weights, h: Hyperparameters, max_kl: ArrayLike, **static: Any
) -> tuple[TrainState, UpdateStats]:
    """A step of one state, which is used up."""
    (result,) = _updates((state,), (batch,), weights, (h,), (max_kl,), **static)
    return result


@partial(jax.jit, static_argnames=("arch", "micro_batches"), compiler_options=compiler.OPTIONS)
def reference_logprobs(
    batches: tuple[Batch, ...],
    weights: Weights,
    adapters: Adapters | None,
    temperatures: tuple[ArrayLike, ...],
    *,
    arch: Architecture,
    micro_batches: int,
) -> tuple[jax.Array, ...]:
    """Log-probabilities of the completions under the reference: the base, adapters off or those of an earlier run."""

    def logprobs(part):
        temperature_B = _by_row(temperatures, part[1])
        return completion_logprobs(weights, adapters, *part, arch=arch, temperature=temperature_B)[0]

    parts = _micro_batches(tuple((b.prompts, b.tokens_BC, b.mask_BC) for b in batches), micro_batches)
    found = jax.lax.map(logprobs, parts)
    return tuple(x.reshape(batches[0].tokens_BC.shape) for x in jnp.split(found, len(batches), axis=1))


def _by_row(values: Sequence[ArrayLike], rows: jax.Array) -> jax.Array:
    """The value of each policy for each of its rows."""
    return jnp.repeat(jnp.stack([jnp.asarray(value, jnp.float32) for value in values]), len(rows) // len(values))


def _each(function: Callable[..., Any], members: Iterable[tuple]) -> tuple:
    """The function of every member's arguments: of several, stacked and at once."""
    arguments = list(members)
    if len(arguments) == 1:
        return (function(*arguments[0]),)
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *arguments)
    results = jax.vmap(function)(*stacked)
    return tuple(jax.tree.map(lambda leaf, k=k: leaf[k], results) for k in range(len(arguments)))


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
    hidden_PSD, hidden_BCD = gemma3.forward_groups(weights, adapters, arch, prompts, tokens_BC, positions_BC)
    last_B1D = jnp.repeat(hidden_PSD[:, -1:], G, axis=0)
    before_BCD = jnp.concatenate([last_B1D, hidden_BCD[:, :-1]], axis=1)
    return token_logprobs(before_BCD, tokens_BC, weights.embed_VD, temperature)


def _loss(
    trainables: tuple[Trainable, ...], part: Batch, weights: Weights, hs: tuple[Hyperparameters, ...], arch: Architecture
) -> tuple[jax.Array, tuple[LossStats, ...]]:
    """The sum of the losses of several policies, whose rows lie one policy after another."""
    temperature_B = _by_row([h.temperature for h in hs], part.tokens_BC)
    logprobs_BC, entropy_BC = completion_logprobs(
        *policies(weights, trainables), part.prompts, part.tokens_BC, part.mask_BC, arch=arch, temperature=temperature_B
    )
    inputs = LossInputs(
        logprobs_BC, part.old_logprobs_BC, part.reference_logprobs_BC, entropy_BC, part.mask_BC, part.advantages_B
    )
    own = [jax.tree.map(lambda x, k=k: jnp.split(x, len(hs))[k], inputs) for k in range(len(hs))]
    found = _each(lambda inputs, h: grpo_loss(inputs, h.clip_epsilon, h.kl_beta), zip(own, hs, strict=True))
    losses, stats = zip(*found, strict=True)
    return sum(losses), stats


def _micro_batches(members: tuple, count: int):
    """Cuts leading axes into `count` equal slices, each with the rows of all members, one member after another.

    Groups stay whole, as sequences lie by prompt.
    """

    def slices(*leaves):
        return cut(jnp.concatenate([x.reshape(count, -1, *x.shape[1:]) for x in leaves], axis=1), None, "fsdp")

    return jax.tree.map(slices, *members)


def _share_changed(old, new) -> jax.Array:
    changed = jax.tree.map(lambda a, b: (a != b).sum(), old, new)
    total = sum(leaf.size for leaf in jax.tree.leaves(old))
    return sum(jax.tree.leaves(changed)) / total
