"""From completions to the batch that an update learns from: trimming, padding, groups of several draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from agent_tunix.kernels.mesh import cut
from agent_tunix.models.sharding import lay_rows
from agent_tunix.types import Batch, Rollouts

SMALLEST_BUCKET = 8


def trim(rollouts: Rollouts, lengths_B: np.ndarray) -> Rollouts:
    """Completions cut to the bucket of the longest."""
    width = bucket(int(lengths_B.max()), rollouts.tokens_BC.shape[1])
    by_token = rollouts.tokens_BC, rollouts.mask_BC, rollouts.logprobs_BC
    tokens_BC, mask_BC, logprobs_BC = (cut_to(width, array_BC) for array_BC in by_token)
    return Rollouts(tokens_BC, mask_BC, logprobs_BC, rollouts.ended_B)


def cut_to(width: int, array_BC: jax.Array) -> jax.Array:
    """The first `width` tokens of every row; where that is all of them, the array itself, so that no program runs."""
    return array_BC if array_BC.shape[1] == width else array_BC[:, :width]


def with_learning(batch: Batch, advantages_B: np.ndarray, weights_BC: np.ndarray, mesh: Mesh) -> Batch:
    """The batch with what is to be learnt from each completion, and how much each token counts."""
    laid_B, laid_BC = (lay_rows(array.__getitem__, array.shape, mesh) for array in (advantages_B, weights_BC))
    return dataclasses.replace(batch, advantages_B=laid_B, weights_BC=laid_BC)


def widened(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Batches with their completions padded to the widest of them; padding changes neither loss nor gradient."""
    width = max(batch.tokens_BC.shape[1] for batch in batches)
    return tuple(batch if batch.tokens_BC.shape[1] == width else padded(batch, width) for batch in batches)


def padded(batch: Batch, width: int) -> Batch:
    """The batch with its completions padded to a width."""
    by_token = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name.endswith("_BC")}

    def pad(array_BC: jax.Array) -> jax.Array:
        return jnp.pad(array_BC, ((0, 0), (0, width - array_BC.shape[1])))

    return dataclasses.replace(batch, **jax.tree.map(pad, by_token))


def groups_to_learn(has_spread: Sequence[np.ndarray]) -> np.ndarray:
    """Which groups make a batch, of several draws that lie one after another.

    Those of the first draw, in which later ones with a spread take the places of those without, as long as there are any.
    """
    first = has_spread[0]
    groups, without = np.arange(len(first)), np.flatnonzero(~first)
    better = len(first) + np.flatnonzero(np.concatenate([[], *has_spread[1:]]))
    count = min(len(without), len(better))
    groups[without[:count]] = better[:count]
    return groups


@jax.jit
def merged(draws: tuple[Batch, ...], groups: jax.Array) -> Batch:
    """A batch made of groups of several draws, whose groups and widths are alike."""
    G = len(draws[0].tokens_BC) // len(draws[0].prompts.tokens_PS)
    rows = (groups[:, None] * G + jnp.arange(G)).reshape(-1)

    def taken(*arrays: jax.Array) -> jax.Array:
        by_group = len(arrays[0]) * G == len(draws[0].tokens_BC)
        return cut(jnp.concatenate(arrays)[groups if by_group else rows], "fsdp")

    return jax.tree.map(taken, *draws)


def bucket(length: int, longest: int) -> int:
    """The smallest of longest, longest/2, longest/4 that holds `length`: at most three programs are ever compiled."""
    fitting = [longest // part for part in (4, 2) if longest // part >= max(length, SMALLEST_BUCKET)]
    return min(fitting, default=longest)
