"""Optimizers as optax transformations that give a direction; the learning rate is applied by `step`.

AdamW is Loshchilov & Hutter (2019, arXiv:1711.05101): the gradient is clipped by its global norm first, then goes through
Adam's moments; decay is added to the direction, outside of them.

All scalars are inputs of the compiled update rather than constants in it, so runs that differ in them share one program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from agent_tunix.types import pytree


@pytree
class Hyperparameters:
    """The scalars of one update; `learning_rate` is the schedule's at this update."""

    learning_rate: ArrayLike
    weight_decay: ArrayLike
    beta1: ArrayLike
    beta2: ArrayLike
    eps: ArrayLike
    max_grad_norm: ArrayLike
    kl_beta: ArrayLike
    clip_epsilon: ArrayLike
    temperature: ArrayLike


def adamw(h: Hyperparameters) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(h.max_grad_norm),
        optax.scale_by_adam(b1=h.beta1, b2=h.beta2, eps=h.eps),
        optax.add_decayed_weights(h.weight_decay),
    )


def init(params: Any) -> Any:
    """The optimizer's state before the first update; it does not depend on any scalar."""
    return adamw(Hyperparameters(*[0.0] * 9)).init(params)


def step(grads: Any, state: Any, params: Any, h: Hyperparameters) -> tuple[Any, Any, Any]:
    """params - learning_rate * direction; returns the new parameters, the new optimizer state and the change made."""
    direction, state = adamw(h).update(grads, state, params)
    change = jax.tree.map(lambda d: -jnp.asarray(h.learning_rate) * d, direction)
    return optax.apply_updates(params, change), state, change
