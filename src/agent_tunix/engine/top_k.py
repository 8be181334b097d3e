"""The k greatest of each row: `lax.top_k`, and on a GPU, where that sorts the whole vocabulary, the same by narrowing down.

Cut a row into blocks. The k blocks with the greatest maxima hold the k greatest values: any value outside of them has k
maxima before it. So the search goes on inside of these, with smaller blocks, down to single values. Of equal values the one
of lower index comes first, at every stage. Blocks are ranked by comparing all with all, which a GPU does in one pass.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

WIDTHS = (256, 16, 1)  # of blocks, stage by stage
LARGEST_K = 128  # beyond it, comparing all with all costs more than it saves
SMALLEST_ROW = 2**14


def top_k(values_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The values, greatest first, and their indices: both [B, k]."""
    if k > LARGEST_K or values_BV.shape[1] < SMALLEST_ROW:
        return _sorted(values_BV, k)
    return jax.lax.platform_dependent(values_BV, cuda=partial(narrow, k=k), default=partial(_sorted, k=k))


def _sorted(values_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values_Bk, ids_Bk = jax.lax.top_k(values_BV, k)
    return values_Bk, ids_Bk


def narrow(values_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """What `lax.top_k` finds, stage by stage."""
    B, V = values_BV.shape
    fill = -V % math.lcm(*WIDTHS)
    blocks_BnW = jnp.pad(values_BV, ((0, 0), (0, fill)), constant_values=-jnp.inf)[:, None]
    starts_Bn = jnp.zeros((B, 1), jnp.int32)
    for width in WIDTHS:
        offsets = jnp.arange(0, blocks_BnW.shape[-1], width)
        starts_Bn = (starts_Bn[:, :, None] + offsets).reshape(B, -1)
        blocks_BnW = blocks_BnW.reshape(B, -1, width)
        first_Bk = _first(blocks_BnW.max(axis=-1), starts_Bn, k)
        starts_Bn = jnp.take_along_axis(starts_Bn, first_Bk, axis=1)
        blocks_BnW = jnp.take_along_axis(blocks_BnW, first_Bk[:, :, None], axis=1)
    return blocks_BnW[:, :, 0], starts_Bn


def _first(values_Bn: jax.Array, order_Bn: jax.Array, k: int) -> jax.Array:
    """Where the k greatest are, greatest first; of equals, the one of lower order."""
    ours, others = values_Bn[:, :, None], values_Bn[:, None, :]
    earlier = order_Bn[:, None, :] < order_Bn[:, :, None]
    rank_Bn = ((others > ours) | ((others == ours) & earlier)).sum(axis=-1, dtype=jnp.int32)
    is_rank_Bkn = rank_Bn[:, None, :] == jnp.arange(k)[:, None]
    return jnp.where(is_rank_Bkn, jnp.arange(values_Bn.shape[1]), 0).sum(axis=-1)
