"""From completions to the batch that an update learns from: rewards, advantages, trimming."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from agent_tunix.algorithm.advantages import group_advantages, shuffle_within_groups
from agent_tunix.engine import processes
from agent_tunix.models.mesh import lay_rows
from agent_tunix.tasks.datasets import Example
from agent_tunix.tasks.rewards import Scorer
from agent_tunix.types import Batch, Rollouts

SMALLEST_BUCKET = 8


@dataclasses.dataclass(frozen=True)
class Scored:
    """A batch of completions with their rewards, on the host; `texts` holds, by row, those that this process has scored."""

    texts: Mapping[int, str]
    values: dict[str, np.ndarray]
    rewards_PG: np.ndarray
    advantages_PG: np.ndarray


def score(
    scorer: Scorer, examples: Sequence[Example], texts: Mapping[int, str], G: int, shuffle_key: jax.Array | None
) -> Scored:
    """Rewards and advantages of G completions per example; each process scores the texts that it holds, given by row.

    With `shuffle_key` the advantages are those of the control experiment.
    """
    of = [examples[row // G] for row in texts]
    truths = [e.answer for e in of]
    own = processes.agreed(lambda: scorer([e.question for e in of], list(texts.values()), truths))
    values = processes.gather_rows(list(texts), own, G * len(examples))
    rewards_PG = scorer.total(values).reshape(-1, G)
    advantages_PG = group_advantages(rewards_PG)
    if shuffle_key is not None:
        advantages_PG = shuffle_within_groups(shuffle_key, advantages_PG)
    return Scored(texts, values, rewards_PG, advantages_PG)


def trim(rollouts: Rollouts) -> tuple[Rollouts, np.ndarray]:
    """Completions cut to the bucket of the longest, and the lengths of all."""
    lengths_B = processes.whole(rollouts.mask_BC).sum(axis=1)
    width = bucket(int(lengths_B.max()), rollouts.tokens_BC.shape[1])
    by_token = rollouts.tokens_BC, rollouts.mask_BC, rollouts.logprobs_BC
    tokens_BC, mask_BC, logprobs_BC = (cut_to(width, array_BC) for array_BC in by_token)
    return Rollouts(tokens_BC, mask_BC, logprobs_BC, rollouts.ended_B), lengths_B


def cut_to(width: int, array_BC: jax.Array) -> jax.Array:
    """The first `width` tokens of every row; where that is all of them, the array itself, so that no program runs."""
    return array_BC if array_BC.shape[1] == width else array_BC[:, :width]


def with_advantages(batch: Batch, scored: Scored, mesh: Mesh) -> Batch:
    advantages_B = scored.advantages_PG.reshape(-1)
    return dataclasses.replace(batch, advantages_B=lay_rows(advantages_B.__getitem__, advantages_B.shape, mesh))


def widened(batches: Sequence[Batch]) -> tuple[Batch, ...]:
    """Batches with their completions padded to the widest of them; padding changes neither loss nor gradient."""
    width = max(batch.tokens_BC.shape[1] for batch in batches)

    def pad(array_BC: jax.Array) -> jax.Array:
        return jnp.pad(array_BC, ((0, 0), (0, width - array_BC.shape[1])))

    def wide(batch: Batch) -> Batch:
        arrays = (batch.tokens_BC, batch.mask_BC, batch.old_logprobs_BC, batch.reference_logprobs_BC)
        tokens_BC, mask_BC, old_BC, reference_BC = jax.tree.map(pad, arrays)
        return Batch(batch.prompts, tokens_BC, mask_BC, old_BC, reference_BC, batch.advantages_B)

    return tuple(batch if batch.tokens_BC.shape[1] == width else wide(batch) for batch in batches)


def bucket(length: int, longest: int) -> int:
    """The smallest of longest, longest/2, longest/4 that holds `length`: at most three programs are ever compiled."""
    fitting = [longest // part for part in (4, 2) if longest // part >= max(length, SMALLEST_BUCKET)]
    return min(fitting, default=longest)
