"""Stateless randomness: every key follows from the run's seed, the step and the purpose, so resume needs no saved state."""

from __future__ import annotations

import enum

import jax


class Purpose(enum.IntEnum):
    INIT = 0
    ROLLOUT = 1
    SHUFFLE = 2
    EVALUATION = 3
    SOLVE_RATE = 4


@jax.jit  # one program rather than four, for which a device that has nothing else to do would wait
def step_key(seed: int, step: int, purpose: Purpose) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), purpose)
