"""Odds p_v / p_o of every token v against a row's own token o, as one kernel for NVIDIA's Hopper GPUs (Pallas and Mosaic).

The vocabulary is large: logits of 1,024 rows are a gigabyte, which XLA writes, reads, and writes again as exponentials. Here
each program multiplies a tile of rows by a tile of the vocabulary and takes exponentials while it holds the products. It
writes their sums and, if asked to, the exponentials themselves in bfloat16.

A program is three warpgroups: two multiply, each for a half of the tile's columns, and one has operands copied into shared
memory ahead of them. There are as many programs as multiprocessors, and each takes tile after tile.

Axes as in types.py, and: n rows, R of them to a tile; U columns that a warpgroup takes, t such parts of the vocabulary.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mosaic

from agent_tunix.kernels import device

ROWS, COLUMNS, DEPTH = 128, 128, 64  # of what a warpgroup multiplies: rows, columns, and inputs at a time
WARPGROUPS = 2  # that multiply
STAGES = 4  # of operands, in shared memory at a time
WRITTEN = (64, 32)  # rows and columns of odds that are written at a time
NEIGHBOURS = 8  # tiles of rows that one part of the vocabulary is multiplied with, before the next is read
NEVER = -1e4  # in place of log 0: finite, as 0 times infinity is no number
LOG2_E = math.log2(math.e)
FLOAT32 = jnp.float32


def odds(hidden_nD, embed_VD, own_n, sharpness_n, *, most: float, kept: bool) -> tuple[jax.Array, ...]:
    """The sum of e^z over all tokens, that of z e^z, and, with `kept`, every e^z.

    z is a logit times the row's sharpness (1 / temperature), less the same of the row's own token, `own_n`; at most `most`.
    """
    (n, _), V = hidden_nD.shape, len(embed_VD)
    rows, parts = -(-n // ROWS) * ROWS, -(-V // (WARPGROUPS * COLUMNS)) * WARPGROUPS
    of_rows_2n = LOG2_E * jnp.stack([sharpness_n, own_n])  # the GPU's own exponential has base 2
    hidden_nD, of_rows_2n = jnp.pad(hidden_nD, ((0, rows - n), (0, 0))), jnp.pad(of_rows_2n, ((0, 0), (0, rows - n)))
    made = jax.ShapeDtypeStruct((2, parts, rows), FLOAT32), jax.ShapeDtypeStruct((rows, V), hidden_nD.dtype)
    program = mosaic.kernel(
        partial(_program, most=LOG2_E * most),
        out_type=made if kept else made[:1],
        grid=(device.multiprocessors(),),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Warpgroup),
    )
    sums_2tn, *odds_nV = program(hidden_nD, embed_VD, of_rows_2n)
    total_n, weighted_n = sums_2tn.sum(axis=1)[:, :n]
    return total_n, weighted_n / LOG2_E, *(x[:n] for x in odds_nV)


def _swizzled(columns: int) -> tuple:
    """How a tile of bfloat16 lies in shared memory, so that neither copies nor products wait for its banks."""
    return mosaic.TilingTransform((8, columns)), mosaic.SwizzleTransform(2 * columns)


def _program(hidden_nD, embed_VD, of_rows_2n, sums_2tn, odds_nV=None, *, most: float) -> None:
    n, D = hidden_nD.shape
    tiles = n // ROWS, sums_2tn.shape[1] // WARPGROUPS
    operand = partial(mosaic.BlockSpec, index_map=lambda k: (0, k), transforms=_swizzled(DEPTH), memory_space=mosaic.SMEM)
    pipeline = partial(
        mosaic.emit_pipeline_warp_specialized,
        grid=(D // DEPTH,),
        in_specs=[operand((ROWS, DEPTH)), operand((WARPGROUPS * COLUMNS, DEPTH))],
        memory_registers=40,
        wg_axis="warpgroup",
        num_compute_wgs=WARPGROUPS,
        max_concurrent_steps=STAGES,
    )
    scratch = {
        "operands": pipeline(_nothing, compute_context=_nothing).get_allocations(hidden_nD, embed_VD),
        "of_rows": mosaic.SMEM((WARPGROUPS, 2, ROWS), FLOAT32),
        "arrived": mosaic.Barrier(num_barriers=WARPGROUPS),
        "sums": mosaic.SMEM((WARPGROUPS, 2, ROWS), FLOAT32),
        "written": mosaic.SMEM((WARPGROUPS, 2, *WRITTEN), hidden_nD.dtype, transforms=_swizzled(WRITTEN[1])),
    }

    def with_scratch(**scratch):
        @mosaic.nd_loop((math.prod(tiles),), collective_axes="program")
        def _(turn):
            tile = mosaic.planar_snake(turn.index[0], tiles, 0, NEIGHBOURS)
            _multiply_tile(tile, (hidden_nD, embed_VD, of_rows_2n), (sums_2tn, odds_nV), scratch, pipeline, most)

    pl.run_scoped(with_scratch, collective_axes="warpgroup", **scratch)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)


def _nothing(*_, **__) -> None:
    """Stands in for the work on operands where only the room they take is asked for."""


def _multiply_tile(tile, given, made, scratch, pipeline, most: float) -> None:
    """Multiplies one tile; each warpgroup writes the odds of its half."""
    hidden_nD, embed_VD, of_rows_2n = given
    (row, column), warpgroup = tile, lax.axis_index("warpgroup")
    rows, columns = pl.ds(row * ROWS, ROWS), pl.ds(column * WARPGROUPS * COLUMNS, WARPGROUPS * COLUMNS)
    part = column * WARPGROUPS + warpgroup
    arrived, of_rows_2R, sums_2R, written = (scratch[k].at[warpgroup] for k in ("arrived", "of_rows", "sums", "written"))

    def multiply(_, hidden_RE, embed_UE, logits_RU):
        mine_UE = embed_UE.at[pl.ds(warpgroup * COLUMNS, COLUMNS)]
        mosaic.wgmma(logits_RU, hidden_RE, mine_UE.transpose((1, 0)))
        mosaic.wgmma_wait(0)
        return logits_RU

    def with_logits(logits_RU, multiply_all):
        mosaic.copy_gmem_to_smem(of_rows_2n.at[:, rows], of_rows_2R, arrived)
        multiply_all(logits_RU)
        mosaic.barrier_wait(arrived)
        sharpness_RU, own_RU = (lax.broadcast_in_dim(of_rows_2R[k], (ROWS, COLUMNS), [0]) for k in range(2))
        log_odds_RU = jnp.minimum(logits_RU[...] * sharpness_RU - own_RU, most)
        if embed_VD.shape[0] % (WARPGROUPS * COLUMNS):
            column_RU = mosaic.broadcasted_iota(jnp.int32, (ROWS, COLUMNS), 1, layout=mosaic.Layout.WGMMA)
            log_odds_RU = jnp.where(part * COLUMNS + column_RU < embed_VD.shape[0], log_odds_RU, NEVER)
        _write_tile(log_odds_RU, row, part, made, sums_2R, written)

    def with_multiplication(multiply_all):
        pl.run_scoped(partial(with_logits, multiply_all=multiply_all), mosaic.ACC((ROWS, COLUMNS), FLOAT32))

    pipelined = pipeline(multiply, compute_context=with_multiplication)
    pipelined(hidden_nD.at[rows, :], embed_VD.at[columns, :], allocations=scratch["operands"])


def _write_tile(log_odds_RU, row, part, made, sums_2R, written) -> None:
    """Writes through shared memory, which the copy unit must have emptied before it is filled again."""
    sums_2tn, odds_nV = made
    odds_RU = jnp.exp2(log_odds_RU)
    mosaic.wait_smem_to_gmem(0, wait_read_only=True)
    sums_2R[0] = odds_RU.sum(axis=1)
    sums_2R[1] = (odds_RU * log_odds_RU).sum(axis=1)
    mosaic.commit_smem()
    mosaic.copy_smem_to_gmem(sums_2R, sums_2tn.at[:, part, pl.ds(row * ROWS, ROWS)])
    if odds_nV is None:
        return
    height, width = WRITTEN
    for n, (i, j) in enumerate(itertools.product(range(0, ROWS, height), range(0, COLUMNS, width))):
        if n > 1:
            mosaic.wait_smem_to_gmem(1, wait_read_only=True)
        written[n % 2] = odds_RU[i : i + height, j : j + width].astype(odds_nV.dtype)
        mosaic.commit_smem()
        there = pl.ds(row * ROWS + i, height), pl.ds(part * COLUMNS + j, width)
        mosaic.copy_smem_to_gmem(written.at[n % 2], odds_nV.at[there])
