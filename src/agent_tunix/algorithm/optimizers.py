"""Optimizers as optax transformations that give a direction; the learning rate is applied by `step`, and logged there.

AdamW is Loshchilov & Hutter (2019, arXiv:1711.05101): the gradient is clipped by its global norm first, then goes through
Adam's moments; decay is added to the direction, outside of them.
"""

from __future__ import annotations

from typing import Any

import jax
import optax


def adamw(betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps),
        optax.add_decayed_weights(weight_decay),
    )


def step(
    optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any, learning_rate: jax.Array
) -> tuple[Any, Any, Any]:
    """params - learning_rate * direction; returns the new parameters, the new optimizer state and the change made."""
    direction, state = optimizer.update(grads, state, params)
    updates = jax.tree.map(lambda d: -learning_rate * d, direction)
    return optax.apply_updates(params, updates), state, updates
