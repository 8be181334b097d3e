"""The two programs of a step, rollout and update, with random weights and a batch of a given shape to run them on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from shipped import architecture

from agent_tunix.algorithm.objectives import Coefficients
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import init_state, update
from agent_tunix.environments.stream import left_pad
from agent_tunix.models import lora
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.types import Batch

if TYPE_CHECKING:
    from scaling import Point

TEMPERATURE = 0.9
Program = tuple[Callable[..., Any], Callable[[], tuple], dict[str, Any]]


def build(point: Point) -> dict[str, Program]:
    """Each program with what makes its arguments, afresh since the update uses up its state, and its constants."""
    rng, prompt = np.random.default_rng(0), point.length // 2
    arch = dataclasses.replace(architecture(point.model), vocab_size=point.vocabulary)
    weights = init_weights(jax.random.key(0), arch, jnp.float32 if point.model == "tiny" else jnp.bfloat16)
    modules = lora.select_modules("_proj", arch.num_layers)
    adapters = lora.init_adapters(jax.random.key(1), arch, modules, point.rank, float(point.rank))
    ids = rng.integers(8, point.vocabulary, (point.prompts, prompt))
    prompts = left_pad([list(row) for row in ids], prompt, 0)
    shape = (point.prompts * point.generations, point.length)
    tokens = jnp.asarray(rng.integers(8, point.vocabulary, shape), jnp.int32)
    old, reference = (jnp.asarray(rng.normal(-8, 0.1, shape), jnp.float32) for _ in range(2))
    advantages = jnp.asarray(rng.normal(size=shape[0]), jnp.float32)
    all_BC, shares_BC = jnp.ones(shape, bool), jnp.full(shape, 1 / math.prod(shape))
    batch = Batch(prompts, tokens, all_BC, all_BC, old, None, reference, shares_BC, advantages)
    h, c = Hyperparameters(1e-5, 0.01, 0.9, 0.999, 1e-8, 0.1), Coefficients(TEMPERATURE, beta=0.08)
    never_ends = Sampling(min(50, point.vocabulary), 1.0, point.length, point.generations, (-1,), 0)
    draw = (Draw(adapters, prompts, jax.random.key(2), TEMPERATURE),)
    fresh = init_state(adapters)
    return {
        "rollout": (sample, lambda: (weights, draw), {"arch": arch, "sampling": never_ends}),
        "update": (
            update,
            lambda: (jax.tree.map(jnp.copy, fresh), batch, weights, h, c, jnp.inf),
            {"arch": arch, "micro_batches": 1},
        ),
    }
