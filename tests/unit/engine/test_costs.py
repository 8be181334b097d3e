"""What an update costs in memory, by XLA's own account of the compiled program: nothing is run."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from agent_tunix.algorithm import logprobs
from agent_tunix.algorithm.objectives import Coefficients
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.update import init_state, update
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.lora import init_adapters
from agent_tunix.types import Batch, Prompts

P, G, S, C, V = 2, 4, 16, 64, 4096
FLOAT_BYTES = 4


def temporary_bytes(arch) -> int:
    """What the program needs beside its inputs and outputs."""
    key = jax.random.key(0)
    weights = jax.eval_shape(partial(init_weights, arch=arch), key)
    adapters = jax.eval_shape(partial(init_adapters, arch=arch, modules=("q_proj", "down_proj"), rank=2, alpha=2.0), key)
    ids, numbers, marks = (partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.int32, jnp.float32, bool))
    prompts, logprobs_BC = Prompts(ids((P, S)), ids((P, S))), numbers((P * G, C))
    tokens_BC, mask_BC = ids((P * G, C)), marks((P * G, C))
    batch = Batch(prompts, tokens_BC, mask_BC, mask_BC, logprobs_BC, None, logprobs_BC, logprobs_BC, numbers((P * G,)))
    h, c = Hyperparameters(1e-5, 0.01, 0.9, 0.999, 1e-8, 0.1), Coefficients(0.9, beta=0.08)
    state = jax.eval_shape(init_state, adapters)
    program = update.lower(state, batch, weights, h, c, 5.0, arch=arch, micro_batches=1).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_the_memory_of_an_update_does_not_grow_with_vocabulary_times_length(arch, monkeypatch):
    """Four times the vocabulary may cost no more than a second embedding; a [B, C, V] array would be 32 of them."""
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", P * G * C * V // 64)
    small, large = (dataclasses.replace(arch, vocab_size=size) for size in (V, 4 * V))
    growth = temporary_bytes(large) - temporary_bytes(small)
    assert growth <= 3 * V * arch.embed_dim * FLOAT_BYTES


def test_the_account_sees_logits_of_all_tokens_where_they_are_made(arch, monkeypatch):
    """With nothing to keep logits to a few tokens at a time, they are there at once: the test above can fail."""
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", 2**60)
    vocabulary = 2 * V  # another shape than above, of which no traced program is kept
    logits = P * G * C * vocabulary * FLOAT_BYTES
    assert temporary_bytes(dataclasses.replace(arch, vocab_size=vocabulary)) > logits
