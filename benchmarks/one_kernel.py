"""A token through all layers as one CUDA kernel (one_kernel.cu), against the kernels that rollouts use: a study.

    PYTHONPATH=src python benchmarks/one_kernel.py 270m        one Hopper GPU, and nvcc; 4 x 4 sequences, 256 + 512 tokens

Prints the microseconds that a token takes without logits and drawing, by both ways, and how far their hidden states are
apart. XLA calls the kernel as machine code of its own (`__gpu$xla.gpu.ptx`), so it may stand in a graph like any other.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from decode import learnt_adapters
from memory import architecture

from agent_tunix.engine import compiler
from agent_tunix.models import decoding, gemma3
from agent_tunix.models.weights import init_weights
from agent_tunix.tasks.datasets import left_pad

ROWS, RANK, SHARES, STAGES, THREADS = 16, 32, 4, 7, 384
PROMPTS, GROUP, S, SLOTS = 4, 4, 256, 512
BLOCKS, SHARED_BYTES = 132, 96 * 2**10
CUTS = {
    "270m": {"QKV_C": 2, "OUT_C": 2, "GATED_C": 1, "DOWN_C": 2, "DOWN_Z": 4},
    "1b": {"QKV_C": 2, "OUT_C": 4, "GATED_C": 4, "DOWN_C": 4, "DOWN_Z": 6},
}


def ptx(size: str) -> str:
    """The kernel for a model of that size, as XLA takes it."""
    arch, cuts = architecture(size), CUTS[size]
    heads = {"H": arch.num_heads, "K": arch.num_kv_heads, "SCALE": f"{arch.query_scale}f", "EPS": f"{arch.norm_eps}f"}
    sizes = {"L": arch.num_layers, "D": arch.embed_dim, "F": arch.hidden_dim, "WINDOW": arch.sliding_window}
    rows = {"GROUP": GROUP, "PROMPTS": PROMPTS, "S": S, "SLOTS": SLOTS, "BLOCKS": BLOCKS, "SHARED_BYTES": SHARED_BYTES}
    more = {
        "GLOBALS": f"{sum(1 << n for n in np.flatnonzero(arch.is_global()))}ull",
        "WIDEST": max(arch.embed_dim, arch.hidden_dim // cuts["DOWN_Z"], arch.head_dim),
    }
    macros = [f"-D{name}={value}" for name, value in (heads | sizes | rows | more | cuts).items()]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "one_kernel.ptx"
        source = Path(__file__).with_suffix(".cu")
        subprocess.run(["nvcc", "-std=c++17", "-arch=sm_90", "-ptx", *macros, str(source), "-o", str(made)], check=True)
        return made.read_text()


def fragments(w_LEU: jax.Array) -> jax.Array:
    """A matrix in the order in which the lanes of a warp hold it as the left operand: sixteen columns, 32 inputs at a time.

    A lane has eight neighbouring inputs of two columns, so that it finds its part of the right operand in one piece.
    """
    L, E, U = w_LEU.shape
    x = w_LEU.swapaxes(1, 2).reshape(L, U // 16, 2, 8, E // 32, 4, 2, 2, 2)
    return x.transpose(0, 1, 4, 6, 3, 5, 7, 2, 8).reshape(L, U // 16, E // 32, 2, 32, 8)


def tiles(x_LPSKN: jax.Array, split: tuple[int, ...], order: tuple[int, ...]) -> jax.Array:
    """A cache in tiles of sixteen keys, each in the order of the lanes: the prompts', then room for every row's own."""
    L, P, _, K, N = x_LPSKN.shape
    x = x_LPSKN.reshape(L, P * S // 16, 16, K, N).swapaxes(2, 3)
    lead = x.shape[:3]
    x = x.reshape(*lead, *split).transpose(0, 1, 2, *order).reshape(*lead, 16, 32, 8)
    return jnp.concatenate([x, jnp.zeros((L, ROWS * SLOTS // 16, K, 16, 32, 8), x.dtype)], axis=1)


def products(weights, adapters, modules) -> list[jax.Array]:
    pairs = adapters.by_module()
    w = jnp.concatenate([getattr(weights.layers, module) for module in modules], axis=2)
    a, b = (jnp.concatenate([pairs[module][n] for module in modules], axis=2).astype(w.dtype) for n in (0, 1))
    return [fragments(x) for x in (w, a, b)]


def start(code: str, weights, adapters, arch, prompt):
    """As `decoding.start`, by the one kernel."""
    L, D, F, H, K, N = (arch.num_layers, arch.embed_dim, arch.hidden_dim, arch.num_heads, arch.num_kv_heads, arch.head_dim)
    w, bf16, f32 = weights.layers, weights.embed_VD.dtype, jnp.float32
    lengths_P = (prompt.positions_BS[:, -1] + 1).astype(jnp.int32)
    matrices = [x for modules in decoding.PRODUCTS.values() for x in products(weights, adapters, modules)]
    following = jnp.concatenate([w.input_norm[1:], weights.final_norm_D[None]])
    around = [w.post_attention_norm, w.pre_feedforward_norm, w.post_feedforward_norm, following]
    norms, head_norms = (jnp.stack(x, axis=1).astype(f32) for x in (around, [w.q_norm, w.k_norm]))
    rotations = gemma3.rotations(arch, jnp.arange(S + SLOTS))
    angles_TAN = jnp.stack([x for pair in rotations for x in gemma3.both_halves(*pair)], axis=1).astype(f32)
    first_R = jnp.repeat(lengths_P, GROUP)
    scratch = [((ROWS, D), bf16)] * 2 + [((ROWS, (H + 2 * K) * N), bf16), ((ROWS, SHARES, H, N), bf16)]
    scratch += [((ROWS, SHARES, H), f32), ((8, ROWS, D), f32), ((ROWS, F), bf16)]

    def read(cache, tokens_B, slot):
        x_RD = gemma3.embed(weights, arch, tokens_B)
        h_RD = gemma3.rms_norm(x_RD, w.input_norm[0], arch.norm_eps)
        given = [x_RD, h_RD, slot[None], lengths_P, angles_TAN[first_R + slot], norms, head_norms, *matrices, *cache]
        made = [jax.ShapeDtypeStruct(*of) for of in [*((x.shape, x.dtype) for x in cache), *scratch]]
        count = len(given)
        call = jax.ffi.ffi_call("__gpu$xla.gpu.ptx", made, input_output_aliases={count - 3 + n: n for n in range(3)})
        sizes = {"grid_x": BLOCKS, "block_x": THREADS, "shared_mem_bytes": SHARED_BYTES}
        sizes |= dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
        places = tuple(np.int32(count + n) for n in range(len(made)))
        numbers = {name: np.int32(value) for name, value in sizes.items()}
        out = call(*given, name="token", kernel_type="ptx", kernel_data=code, output_indices=places, **numbers)
        return out[3], tuple(out[:3])

    keys = tiles(prompt.keys_LBSKN, (2, 8, 8, 4, 2, 2, 2), (5, 7, 4, 6, 8, 3, 9))
    values = tiles(prompt.values_LBSKN, (4, 2, 2, 16, 2, 8), (6, 8, 3, 4, 7, 5))
    return (keys, values, jnp.zeros(L * STAGES, jnp.int32)), read


def rollouts(size: str, begin: Callable) -> Callable:
    """A program that reads so many tokens one after another, and returns the last hidden states."""
    arch = architecture(size)

    def read_all(weights, adapters, prompts, count):
        _, prompt = gemma3.forward(weights, adapters, arch, prompts.tokens_PS, prompts.positions_PS)
        cache, read = begin(weights, adapters, arch, prompt)

        def step(slot, carry):
            cache, _, tokens_B = carry
            hidden_BD, cache = read(cache, tokens_B, slot)
            return cache, hidden_BD, (tokens_B * 7 + slot) % 1000

        first = jnp.arange(ROWS, dtype=jnp.int32) * 37 % 1000
        nothing = jnp.zeros((ROWS, arch.embed_dim), weights.embed_VD.dtype)
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), step, (cache, nothing, first))[1]

    return jax.jit(read_all, static_argnums=3, compiler_options=compiler.LOOP_OPTIONS)


def main() -> None:
    size = sys.argv[1]
    arch, rng = architecture(size), np.random.default_rng(0)
    weights = jax.jit(init_weights, static_argnums=(1, 2))(jax.random.key(0), arch, jnp.bfloat16)
    prompts = left_pad([list(rng.integers(6, 1000, S - 7 * n)) for n in range(PROMPTS)], S, 0)
    given, code = (weights, learnt_adapters(arch, 0, RANK), prompts), ptx(size)

    def by_kernels(weights, adapters, arch, prompt):
        cache, read = decoding.start(weights, adapters, arch, prompt, GROUP, SLOTS)
        return cache, lambda cache, tokens_B, slot: read(cache, tokens_B, slot, None)

    hidden = {}
    for name, begin in (("kernels", by_kernels), ("one kernel", lambda *model: start(code, *model))):
        program, seconds = rollouts(size, begin), {}
        for count in (1, SLOTS - 12):
            hidden[name] = np.asarray(program(*given, count), np.float32)
            times = []
            for _ in range(5):
                before = time.perf_counter()
                jax.block_until_ready(program(*given, count))
                times.append(time.perf_counter() - before)
            seconds[count] = statistics.median(times)
        least, most = sorted(seconds)
        print(f"{name:10s} {(seconds[most] - seconds[least]) / (most - least) * 1e6:8.1f} microseconds a token")
    apart = np.abs(hidden["one kernel"] - hidden["kernels"]).mean() / np.abs(hidden["kernels"]).mean()
    print(f"hidden states {apart:.4f} apart, of their own size")


if __name__ == "__main__":
    main()
