"""Microseconds that a token takes through all layers, without logits and drawing, by one kernel and by eight a layer.

    PYTHONPATH=src python benchmarks/read_token.py 270m 1 4 4         one Hopper GPU; size, policies, prompts, generations

256 + 512 tokens, adapters of rank 32 that have learnt something, no two prompts of a length. Also says how far hidden
states are from those of the forward pass, and whether a second run gives the same bits.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from decode import learnt_adapters
from shipped import architecture

from agent_tunix.engine import compiler_options
from agent_tunix.environments.stream import left_pad
from agent_tunix.models import decoding, lora, transformer
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import init_weights

S, SLOTS, RANK, REPEATS = 256, 512, 32, 5
FEW, MANY = 1, 500  # tokens; what the two take apart is that of the tokens between
WAYS = {"forward pass": decoding._by_forward, "kernels": decoding._by_kernels, "one kernel": decoding.by_token_kernel}


def reading(way: Callable, arch: Architecture, rows: int, group: int) -> Callable:
    """A program that reads so many tokens one after another, and returns the last hidden states."""

    def read_all(weights, members, prompts, count):
        adapters = lora.stack(members)
        _, prompt = transformer.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
        cache, read, *_ = way(weights, adapters, arch, prompt, group, SLOTS)

        def step(slot, carry):
            cache, _, tokens_B = carry
            hidden_BD, cache = read(cache, tokens_B, slot, jnp.zeros(rows, bool))
            return cache, hidden_BD, (tokens_B * 7 + slot) % 1000

        first_B = jnp.arange(rows, dtype=jnp.int32) * 37 % 1000
        nothing = jnp.zeros((rows, arch.embed_dim), weights.embed_VD.dtype)
        return jax.lax.fori_loop(0, count, step, (cache, nothing, first_B))[1]

    return jax.jit(read_all, compiler_options=compiler_options.LOOP_OPTIONS)


def seconds_of(program: Callable, *given: object) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(program(*given))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def main() -> None:
    size, policies, prompts, group = sys.argv[1], *map(int, sys.argv[2:5])
    arch, rng = architecture(size), np.random.default_rng(0)
    weights = jax.jit(init_weights, static_argnums=(1, 2))(jax.random.key(0), arch, jnp.bfloat16)
    texts = [list(rng.integers(6, 1000, S - 7 * (n % 30))) for n in range(policies * prompts)]
    given = weights, [learnt_adapters(arch, n, RANK) for n in range(policies)], left_pad(texts, S, 0)
    hidden: dict[str, np.ndarray] = {}
    for name, way in WAYS.items():
        program = reading(way, arch, policies * prompts * group, group)
        hidden[name] = np.asarray(program(*given, MANY), np.float32)
        again = np.asarray(program(*given, MANY), np.float32)
        program(*given, FEW)
        few, many = (seconds_of(program, *given, count) for count in (FEW, MANY))
        apart = np.linalg.norm(hidden[name] - hidden["forward pass"]) / np.linalg.norm(hidden["forward pass"])
        same = "the same bits again" if (again == hidden[name]).all() else "OTHER BITS THE SECOND TIME"
        print(f"{name:12s} {(many - few) / (MANY - FEW) * 1e6:8.1f} microseconds a token, {apart:.4f} apart, {same}")


if __name__ == "__main__":
    main()
