"""The records that travel through the pipeline, and the legend of their shapes.

Every array name ends in the letters of its axes, so `rewards_PG[p, g]` is the reward of generation g of prompt p:

    P  prompts in a batch                    L  layers
    G  generations per prompt                D  width of the residual stream
    B  sequences in a batch, B = P * G       H  query heads
    S  prompt tokens, padded on the left     K  key/value heads
    C  completion tokens, padded right       N  width of one head
    T  tokens of whatever is being read      F  width of the feed-forward layer
    V  vocabulary                            R  rank of a LoRA adapter

Sequences of one prompt lie side by side: sequence b belongs to prompt b // G. Outside of a model's layers K also counts
the policies that share a program, and N whatever a function has many of: micro-batches, tokens of all rows, candidates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
Record = dict[str, Any]  # a line of a run's files: numbers and texts by name


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Makes a frozen dataclass that JAX can map over; fields marked `static()` stay outside of tracing."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    jax.tree_util.register_dataclass(
        cls,
        data_fields=[f.name for f in fields if not f.metadata.get("static")],
        meta_fields=[f.name for f in fields if f.metadata.get("static")],
    )
    return cls


def static() -> Any:
    """A field of a `pytree` that is a compile-time constant rather than an array."""
    return dataclasses.field(metadata={"static": True})


@pytree
class Prompts:
    """A batch of prompts. Padding lies on the left and has position -1."""

    tokens_PS: jax.Array
    positions_PS: jax.Array


@pytree
class Rollouts:
    """What the sampler drew. The end token belongs to the completion; the mask covers it and nothing after it.

    `logprobs_BC` are those of the policy that sampled, at the sampling temperature, over the whole vocabulary.
    """

    tokens_BC: jax.Array
    mask_BC: jax.Array
    logprobs_BC: jax.Array
    ended_B: jax.Array


@pytree
class Batch:
    """What one update learns from.

    The model attends to all tokens under `mask_BC` and learns those under `learnt_BC`. `weights_BC` are their shares in the
    objective, over the whole batch; they and the advantages are known once completions are scored, while the reference
    reads them. `old_logprobs_BC` are the sampler's; demonstrations have none. `trainer_logprobs_BC`, of the policy before
    its first update from this batch, are made where the objective corrects for the sampler. Beta 0 needs no reference.
    """

    prompts: Prompts
    tokens_BC: jax.Array
    mask_BC: jax.Array
    learnt_BC: jax.Array
    old_logprobs_BC: jax.Array | None = None
    trainer_logprobs_BC: jax.Array | None = None
    reference_logprobs_BC: jax.Array | None = None
    weights_BC: jax.Array | None = None
    advantages_B: jax.Array | None = None


@pytree
class TrainState:
    """All that training changes. `step` counts optimizer updates done."""

    trainable: Any
    optimizer: Any
    step: jax.Array
