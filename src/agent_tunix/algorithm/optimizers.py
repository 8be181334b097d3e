"""Optimizers as optax transformations from a gradient to the change of the parameters.

In all of them the gradient is first clipped by its global norm; decay is decoupled from the moments (Loshchilov & Hutter,
2019, arXiv:1711.05101) and shrinks a weight by learning_rate * weight_decay; norms, biases and DoRA's magnitudes, which
begin as norms of columns, decay by `norm_decay` instead, 0 by default; and scalars are inputs of the compiled update rather
than constants in it, so runs that differ in them share one program. Only the algorithm's name is a compile-time constant.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from agent_tunix.types import pytree

ADAMW_RMS = 0.2  # root mean square of a typical AdamW step at rate 1, to which Muon's steps are scaled


@pytree
class Hyperparameters:
    """The scalars of one update; `learning_rate` is the schedule's at this update, `norm_decay` the decay of norms."""

    learning_rate: ArrayLike
    weight_decay: ArrayLike
    beta1: ArrayLike
    beta2: ArrayLike
    eps: ArrayLike
    max_grad_norm: ArrayLike
    norm_decay: ArrayLike = 0.0


def adamw(h: Hyperparameters) -> optax.GradientTransformation:
    """Loshchilov & Hutter (2019, arXiv:1711.05101)."""
    return optax.chain(optax.scale_by_adam(b1=h.beta1, b2=h.beta2, eps=h.eps), _decay_and_rate(h))


def adafactor(h: Hyperparameters) -> optax.GradientTransformation:
    """Shazeer & Stern (2018, arXiv:1804.04235), without momentum, and with absolute steps: adapters start at zero.

    The second moment's decay rate, 1 - t^-0.8, is bounded by beta2, as in Zhai et al. (2021, arXiv:2106.04560), so that
    the average never freezes.
    """

    def decay_rate(updates_done: Any, exponent: Any) -> jax.Array:
        return jnp.minimum(1.0 - (updates_done + 1.0) ** -exponent, h.beta2)

    moments = optax.scale_by_factored_rms(epsilon=h.eps, decay_rate_fn=decay_rate)
    return optax.chain(moments, optax.clip_by_block_rms(1.0), _decay_and_rate(h))


def lion(h: Hyperparameters) -> optax.GradientTransformation:
    """Chen et al. (2023, arXiv:2302.06675): the sign of a moving average, so every weight moves by the rate itself."""
    return optax.chain(optax.scale_by_lion(b1=h.beta1, b2=h.beta2), _decay_and_rate(h))


def sgd(h: Hyperparameters) -> optax.GradientTransformation:
    """Heavy-ball momentum: m = beta1 m + g."""
    return optax.chain(optax.trace(decay=h.beta1), _decay_and_rate(h))


def muon(h: Hyperparameters) -> optax.GradientTransformation:
    """Jordan et al. (2024, kellerjordan.github.io/posts/muon) for matrices, Adam for the rest, then decay for both.

    A matrix's momentum is orthogonalised by Newton-Schulz, for each layer on its own, and scaled by
    0.2 sqrt(max(in, out)), which gives its steps the size of AdamW's (Liu et al., 2025, arXiv:2502.16982): one rate
    serves both. Matrices are stacked over layers, [L, in, out]; the embedding and the norms have fewer axes.
    """

    def kind(array: jax.Array) -> str:
        return "matrix" if array.ndim == 3 else "rest"

    def axes(arrays: Any) -> Any:
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), arrays)

    def size_of_adamw(updates: Any, _: Any) -> Any:
        return jax.tree.map(lambda u: ADAMW_RMS * math.sqrt(max(u.shape[-2:])) * u, updates)

    by_kind = {
        "matrix": optax.chain(
            optax.contrib.scale_by_muon(beta=h.beta1, eps=h.eps, weight_dimension_numbers=axes),
            optax.stateless(size_of_adamw),
        ),
        "rest": optax.scale_by_adam(b1=h.beta1, b2=h.beta2, eps=h.eps),
    }
    return optax.chain(optax.partition(by_kind, lambda params: jax.tree.map(kind, params)), _decay_and_rate(h))


def schedule_free_adamw(h: Hyperparameters) -> optax.GradientTransformation:
    """Defazio et al. (2024, arXiv:2405.15682): averaging in place of a decaying rate.

    What is trained is y = beta1 x + (1 - beta1) z: z takes the steps of AdamW without momentum, and x, their average, is
    what is to be evaluated. beta1 is kept in the state for `evaluation_params`.
    """
    rms = optax.scale_by_rms(decay=h.beta2, eps=h.eps, eps_in_sqrt=False, bias_correction=True)
    free = optax.contrib.schedule_free(optax.chain(rms, _decay_and_rate(h)), h.learning_rate, b1=h.beta1)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return free.update(grads, state._replace(b1=jnp.asarray(h.beta1, state.b1.dtype)), params)

    return optax.GradientTransformation(free.init, update)


ALGORITHMS: dict[str, Callable[[Hyperparameters], optax.GradientTransformation]] = {
    "adamw": adamw,
    "adafactor": adafactor,
    "lion": lion,
    "muon": muon,
    "sgd": sgd,
    "schedule_free_adamw": schedule_free_adamw,
}


def init(params: Any, name: str = "adamw") -> Any:
    """The optimizer's state before the first update. No scalar changes it; beta1, which may be divided by, must not be 0."""
    return _clipped(name, Hyperparameters(*[1.0] * len(dataclasses.fields(Hyperparameters)))).init(params)


def step(grads: Any, state: Any, params: Any, h: Hyperparameters, name: str = "adamw") -> tuple[Any, Any, Any]:
    """Returns the new parameters, the new optimizer state and the change made."""
    change, state = _clipped(name, h).update(grads, state, params)
    return optax.apply_updates(params, change), state, change


def evaluation_params(state: Any, params: Any, name: str = "adamw") -> Any:
    """The parameters to evaluate, export and start runs from: the algorithm's average where it keeps one, else `params`."""
    if name != "schedule_free_adamw":
        return params
    _, free = state
    return optax.contrib.schedule_free_eval_params(free, params)


def _clipped(name: str, h: Hyperparameters) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(h.max_grad_norm), ALGORITHMS[name](h))


def _decay_and_rate(h: Hyperparameters) -> optax.GradientTransformation:
    """-learning_rate * (direction + decay * params), with the decay that each array is due."""

    def decayed(path: Any, direction: jax.Array, param: jax.Array) -> jax.Array:
        name, holder = jax.tree_util.keystr(path[-1:]), jax.tree_util.keystr(path[-2:-1])
        vector = "norm" in name or "bias" in name or "magnitudes" in holder
        decay = h.norm_decay if vector else h.weight_decay
        return direction + decay * param

    def update(directions: Any, params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(decayed, directions, params)

    return optax.chain(optax.stateless(update), optax.scale_by_learning_rate(h.learning_rate))
