"""The parts of a layer that read one token of every sequence, as kernels for an NVIDIA GPU (Pallas, by way of Triton).

One token a sequence is little work on many bytes: what counts is how few kernels there are, and that each has its loads
under way at once. A product takes its low-rank adapter along as more rows of the same operand. The sum over a split
product, the residual and both norms around it are one kernel. Sizes of tiles are those that were fastest on an H200.
Each is jitted by itself, so that the compiler makes it once for all layers.

Axes as in types.py, and: R rows, which are sequences, those of each policy filled up to whole tiles; E inputs and U outputs
of a product; r rank, filled up to a power of two; M policies; Z shares of a split sum. Policies of few rows share tiles,
for which their adapters lie side by side: M then counts those that do as one, and r their ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from agent_tunix.types import pytree, static

LEAST_TILE = 16  # of rows: what a matrix unit takes at least
LARGEST_TILE = 64
LEAST_RANK = 32  # with as many columns of the weight, the 64 rows of one instruction
DEPTH = 128  # inputs of a product that are loaded at a time, at most
ACCUMULATED = 2**13  # numbers that a program holds in registers without spilling them
SHARES = 6  # of a split product, at most
SPLIT_PROGRAMS = 220  # of a split product, at most
SHARED_MEMORY = 220 * 2**10  # bytes of a multiprocessor that loads under way may take
MULTIPROCESSORS = 132  # of the GPU that tiles were chosen on
FLOAT32 = jnp.float32


@pytree
class Product:
    """A product's weights: the columns of W as rows, with those of every policy's A after them, and B.

    `parts` are the numbers of columns of the modules that lie side by side in W, `sharing` that of policies in a tile.
    """

    rows_UE: jax.Array
    b_MUr: jax.Array
    parts: tuple[int, ...] = static()
    sharing: int = static()

    @property
    def rank(self) -> int:
        return self.b_MUr.shape[-1]


def power_of_two(least: int) -> int:
    """The smallest that is at least `least`: a kernel holds only arrays whose sizes are powers of two."""
    return 1 << (least - 1).bit_length()


def filled(values_B: jax.Array, policies: int, rows: int) -> jax.Array:
    """Values of all sequences, with zeros after those of each policy up to so many rows."""
    values_KB = values_B.reshape(policies, -1)
    return jnp.pad(values_KB, ((0, 0), (0, rows - values_KB.shape[1]))).reshape(-1)


def row_tile(rows: int) -> int:
    """How many rows a program takes, for so many rows of one policy."""
    return max(LEAST_TILE, min(LARGEST_TILE, power_of_two(rows)))


@partial(jax.jit, static_argnames=("eps", "interpret"))
def norm(x_RD, delta_ZRD, post_D, pre_D, eps: float, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The residual stream after a block whose output is the sum of `delta`, and what the next block reads of it."""
    R, D = x_RD.shape
    row, scale = pl.BlockSpec((None, D), lambda i: (i, 0)), pl.BlockSpec((D,), lambda i: (0,))
    shares = pl.BlockSpec((len(delta_ZRD), None, D), lambda i: (0, i, 0))
    out = jax.ShapeDtypeStruct((R, D), x_RD.dtype)
    run = call(partial(_norm, eps), (R,), [row, shares, scale, scale], [row, row], [out, out], warps=8, interpret=interpret)
    return run(x_RD, delta_ZRD, post_D, pre_D)


def _norm(eps, x_ref, delta_ref, post_ref, pre_ref, x_out, h_out):
    Z, D = delta_ref.shape
    index = jax.lax.broadcasted_iota(jnp.int32, (power_of_two(D),), 0)
    there, dtype = index < D, x_out.dtype

    def load(ref, *share):
        return triton.load(ref.at[*share, index], mask=there, other=0.0).astype(FLOAT32)

    x, post, pre, delta = load(x_ref), load(post_ref), load(pre_ref), sum(load(delta_ref, z) for z in range(Z))
    delta = delta.astype(dtype).astype(FLOAT32)
    x = (x + _normed(delta, post, D, eps).astype(dtype).astype(FLOAT32)).astype(dtype)
    h = _normed(x.astype(FLOAT32), pre, D, eps).astype(dtype)
    for out, value in ((x_out, x), (h_out, h)):
        triton.store(out.at[index], value, mask=there)


def _normed(x, scale, width: int, eps: float):
    return x * jax.lax.rsqrt((x * x).sum() / width + eps) * (1.0 + scale)


@partial(jax.jit, static_argnames=("tile", "interpret"))
def product(h_RE, w: Product, tile: int, interpret: bool) -> jax.Array:
    """h W + (h A) B."""
    (y_RU,) = _product(h_RE, w, tile, 1, h_RE.dtype, interpret)
    return y_RU


@partial(jax.jit, static_argnames=("tile", "interpret"))
def split_product(h_RE, w: Product, tile: int, interpret: bool) -> jax.Array:
    """As `product`, with the sum over the first axis still to be taken: [Z, R, U] in float32."""
    chunks = h_RE.shape[1] // _depth(h_RE, 2 * w.rank + tile)
    whole = len(h_RE) // tile * (w.b_MUr.shape[1] // w.rank)
    most = max(1, min(SHARES, SPLIT_PROGRAMS // whole))
    shares = max(z for z in range(1, most + 1) if chunks % z == 0)
    return _product(h_RE, w, tile, shares, FLOAT32, interpret)


def _product(h_RE, w, tile, shares, dtype, interpret):
    (R, E), (M, U, r) = h_RE.shape, w.b_MUr.shape
    policy_tiles, grid = R // M // tile, (R // tile, U // r, shares)
    in_specs = [
        pl.BlockSpec((tile, E), lambda i, j, z: (i, 0)),
        pl.BlockSpec(w.rows_UE.shape, lambda i, j, z: (0, 0)),
        pl.BlockSpec((None, r, r), lambda i, j, z: (i // policy_tiles, j, 0)),
    ]
    out_spec, out = pl.BlockSpec((None, tile, r), lambda i, j, z: (z, i, j)), jax.ShapeDtypeStruct((shares, R, U), dtype)
    depth = _depth(h_RE, 2 * r + tile)
    stages = _stages(4, (2 * r + tile) * depth, math.prod(grid))
    kernel = partial(_product_kernel, w.parts, w.sharing, policy_tiles, E // shares, depth)
    return call(kernel, grid, in_specs, out_spec, out, stages=stages, interpret=interpret)(h_RE, w.rows_UE, w.b_MUr)


def _product_kernel(parts, sharing, policy_tiles, width, depth, h_ref, w_ref, b_ref, y_out):
    i, j, z = (pl.program_id(axis) for axis in range(3))
    rows = _operand_rows(parts, i // policy_tiles, j, b_ref.shape[1])
    (total,) = _accumulate(h_ref, w_ref, [rows], z * width, width, depth)
    base, low = jnp.split(total, 2)
    y_out[...] = _with_adapter(base, low, b_ref, sharing, h_ref.dtype).T.astype(y_out.dtype)


def _operand_rows(parts: Sequence[int], policy, block, rank: int):
    """Which rows a program multiplies with: `rank` columns of W, and the A of their module and policy."""
    module = sum((block * rank >= sum(parts[: n + 1])).astype(jnp.int32) for n in range(len(parts) - 1))
    first_a = sum(parts) + (policy * len(parts) + module) * rank
    index = jax.lax.broadcasted_iota(jnp.int32, (2 * rank,), 0)
    return jnp.where(index < rank, block * rank + index, first_a + index - rank)


def _accumulate(h_ref, w_ref, operands, start, width, depth):
    """Products of the rows of each operand with h over `width` inputs: [rows, tile] in float32."""

    def add(n, totals):
        at = pl.ds(start + n * depth, depth)
        h = h_ref[:, at]
        return tuple(total + dot_transposed(w_ref[rows, at], h) for total, rows in zip(totals, operands, strict=True))

    zeros = tuple(jnp.zeros((rows.shape[0], h_ref.shape[0]), FLOAT32) for rows in operands)
    return jax.lax.fori_loop(0, width // depth, add, zeros)


def _with_adapter(base, low, b_ref, sharing, dtype):
    """W h + B (A h), of W h and A h; of policies that share a tile, each with its own part of A and B."""
    if sharing > 1:
        policy, owner = (jax.lax.broadcasted_iota(jnp.int32, low.shape, n) // (low.shape[n] // sharing) for n in (0, 1))
        low = jnp.where(policy == owner, low, 0.0)
    return base + jnp.dot(b_ref[...], low.astype(dtype), preferred_element_type=FLOAT32)


def dot_transposed(a, b):
    """a b^T"""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=FLOAT32)


def _depth(h_RE, rows: int) -> int:
    """How many inputs of so many rows are loaded at a time: a power of two that divides their number."""
    E = h_RE.shape[1]
    return min(E & -E, DEPTH if rows <= 2 * DEPTH else DEPTH // 2)


def _stages(most: int, size: int, programs: int) -> int:
    """Stages of the pipeline that loads so many numbers at a time: as many as there is room for."""
    room = SHARED_MEMORY if programs <= MULTIPROCESSORS else SHARED_MEMORY // 2
    return max(2, min(most, room // (2 * size)))


@partial(jax.jit, static_argnames=("tile", "interpret"))
def gated_product(h_RD, w: Product, tile: int, interpret: bool) -> jax.Array:
    """gelu(h gate) * (h up), where gate and up are the two parts of the product."""
    (R, D), (M, _, r), F = h_RD.shape, w.b_MUr.shape, w.parts[0]
    policy_tiles, columns = R // M // tile, _gated_columns(F, r, tile, R // tile)
    in_specs = [
        pl.BlockSpec((tile, D), lambda i, j: (i, 0)),
        pl.BlockSpec(w.rows_UE.shape, lambda i, j: (0, 0)),
        pl.BlockSpec((None, columns, r), lambda i, j: (i // policy_tiles, j, 0)),
        pl.BlockSpec((None, columns, r), lambda i, j: (i // policy_tiles, F // columns + j, 0)),
    ]
    out_spec, out = pl.BlockSpec((tile, columns), lambda i, j: (i, j)), jax.ShapeDtypeStruct((R, F), h_RD.dtype)
    grid, loaded = (R // tile, F // columns), 2 * (columns + r) + tile
    depth = _depth(h_RD, loaded)
    stages = _stages(5, loaded * depth, math.prod(grid))
    kernel = partial(_gated_kernel, F, w.sharing, policy_tiles, depth)
    run = call(kernel, grid, in_specs, out_spec, out, stages=stages, interpret=interpret)
    return run(h_RD, w.rows_UE, w.b_MUr, w.b_MUr)


def _gated_columns(F: int, rank: int, tile: int, tiles: int) -> int:
    """How many of gate, and as many of up, a program takes: the more, the less often A is read, but the fewer programs."""

    def serve(columns: int) -> bool:
        enough = tiles * F // columns >= MULTIPROCESSORS // 2
        return enough and F % columns == 0 and 2 * (columns + rank) * tile <= ACCUMULATED

    return next((columns for columns in (128, 64) if serve(columns)), LEAST_RANK)


def _gated_kernel(F, sharing, policy_tiles, depth, h_ref, w_ref, gate_b_ref, up_b_ref, y_out):
    """Columns of gate and of up are one operand, the A of both another."""
    i, j, (columns, rank) = pl.program_id(0), pl.program_id(1), gate_b_ref.shape
    index = jax.lax.broadcasted_iota(jnp.int32, (2 * columns,), 0)
    of_w = j * columns + jnp.where(index < columns, index, F + index - columns)
    of_a = 2 * F + i // policy_tiles * 2 * rank + jax.lax.broadcasted_iota(jnp.int32, (2 * rank,), 0)
    both, low = _accumulate(h_ref, w_ref, [of_w, of_a], 0, h_ref.shape[1], depth)
    parts = zip(jnp.split(both, 2), jnp.split(low, 2), (gate_b_ref, up_b_ref), strict=True)
    gate, up = (_with_adapter(base, low, b_ref, sharing, h_ref.dtype) for base, low, b_ref in parts)
    y_out[...] = (jax.nn.gelu(gate, approximate=True) * up).T.astype(y_out.dtype)


def call(kernel, grid, in_specs, out_specs, out_shape, *, warps=4, stages=1, aliases=None, interpret) -> Any:
    kernel.__name__ = kernel.func.__name__  # by which a profile shows it
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        input_output_aliases=aliases or {},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
    )
