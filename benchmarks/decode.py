"""Seconds of one GRPO step, phase by phase, with random weights that never end a completion.

    PYTHONPATH=src python benchmarks/decode.py 270m 4 4 256 512 4 32 1
                                               size P G prompt completion micro_batch lora_rank policies [base_dtype]

`policies` above one samples that many at once, each with its own adapters, and updates none. Medians of five after a
warm-up; the first calls, which compile, apart. For memory run with XLA_PYTHON_CLIENT_PREALLOCATE=false. On a CPU:

    PYTHONPATH=src python benchmarks/decode.py tiny 16 8 32 24 16 16 1
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from memory import TEMPERATURE, random_weights
from shipped import architecture

from agent_tunix.algorithm.objectives import Coefficients, per_sequence
from agent_tunix.algorithm.optimizers import Hyperparameters
from agent_tunix.engine.sampler import Draw, Sampling, sample
from agent_tunix.engine.update import batch_logprobs, init_state, update
from agent_tunix.environments.stream import left_pad
from agent_tunix.models import lora
from agent_tunix.models.checkpoints.loading import init_weights
from agent_tunix.models.lora import Adapters
from agent_tunix.types import Batch

REPEATS = 5


def timed(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds of the first call, the median of the later ones, and the last result."""
    seconds = []
    for _ in range(REPEATS + 2):
        begin = time.perf_counter()
        result = jax.block_until_ready(function())
        seconds.append(time.perf_counter() - begin)
    return seconds[0], statistics.median(seconds[2:]), result


def learnt_adapters(arch, seed: int, rank: int) -> Adapters:
    """Adapters whose B is not zero."""
    fresh = lora.init_adapters(jax.random.key(seed), arch, lora.select_modules("_proj", arch.num_layers), rank, float(rank))
    b = {name: 0.01 * jax.random.normal(jax.random.key(seed), leaf.shape) for name, leaf in fresh.b.items()}
    return dataclasses.replace(fresh, b=b)


def main() -> None:
    size = sys.argv[1]
    P, G, S, C, micro, rank, policies = map(int, sys.argv[2:9])
    arch, rng = architecture(size), np.random.default_rng(0)
    dtype = jnp.bfloat16 if size != "tiny" else jnp.float32
    weights = (
        random_weights(arch, sys.argv[9])
        if len(sys.argv) > 9
        else jax.jit(init_weights, static_argnums=(1, 2))(jax.random.key(0), arch, dtype)
    )
    prompts = left_pad([list(rng.integers(6, min(1000, arch.vocab_size), S)) for _ in range(P)], S, 0)
    draws = tuple(Draw(learnt_adapters(arch, n, rank), prompts, jax.random.key(n), TEMPERATURE) for n in range(policies))
    sampling = Sampling(min(50, arch.vocab_size), 1.0, C, G, (arch.vocab_size,), 0)

    first, rollout, (drawn, *_) = timed(lambda: sample(weights, draws, arch=arch, sampling=sampling))
    print(f"{size} {P}x{G} {S}+{C} rank {rank}, {policies} policies on {jax.devices()[0].device_kind}")
    print(f"rollout   {rollout:8.4f} s, {rollout / C * 1e3:.3f} ms a token, ", end="")
    print(f"{policies * P * G * C / rollout:,.0f} tokens/s, first {first:.1f} s")
    if policies == 1:
        plain = Batch(prompts, drawn.tokens_BC, drawn.mask_BC, drawn.mask_BC, drawn.logprobs_BC)
        static = {"arch": arch, "micro_batches": P // micro}
        first, reference, (logprobs_BC,) = timed(lambda: batch_logprobs((plain,), weights, None, (TEMPERATURE,), **static))
        print(f"reference {reference:8.4f} s, first {first:.1f} s")
        weights_BC = jnp.asarray(per_sequence(np.asarray(drawn.mask_BC), C), jnp.float32)
        learnt = {"weights_BC": weights_BC, "advantages_B": jnp.asarray(rng.normal(size=P * G), jnp.float32)}
        batch = dataclasses.replace(plain, reference_logprobs_BC=logprobs_BC, **learnt)
        h, c = Hyperparameters(1e-5, 0.01, 0.9, 0.999, 1e-8, 0.1), Coefficients(TEMPERATURE, beta=0.08)
        history = [(init_state(draws[0].adapters), None)]  # of which only the last state is not used up

        def learn():
            history.append(update(history[-1][0], batch, weights, h, c, jnp.inf, **static))
            return history[-1]

        first, learning, _ = timed(learn)
        mismatch = float(history[1][1].loss.mismatch_kl)
        print(f"update    {learning:8.4f} s, first {first:.1f} s, mismatch/kl {mismatch:.2e}")
        print(f"step      {rollout + reference + learning:8.4f} s")
    memory = jax.local_devices()[0].memory_stats() or {}
    print(f"peak memory {memory.get('peak_bytes_in_use', 0) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
