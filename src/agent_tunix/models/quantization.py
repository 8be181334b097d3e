"""Frozen matrices in fewer bits: int8, or the 4-bit NormalFloat of QLoRA (Dettmers et al., 2023, arXiv:2305.14314).

Every 64 inputs of an output share a scale, which maps the largest of them to the end of the code's range; each is rounded
to the nearest code. int8 has 255 even steps. nf4 has 16 levels at quantiles of a normal distribution, two codes to a byte.
The paper quantises its float32 scales once more; ours are bfloat16, an eighth of a bit a weight dearer and without a second
code. Embedding and norms are not quantised.

A matrix is dequantised where it is multiplied, a layer at a time, and by one function alone: sampler, trainer and reference
see the same numbers.
"""

from __future__ import annotations

import itertools
from functools import partial
from statistics import NormalDist
from typing import Literal

import jax
import jax.numpy as jnp

from agent_tunix.errors import UserError
from agent_tunix.types import pytree

BLOCK = 64  # inputs to a scale
LARGEST_INT8 = 127
BaseDtype = Literal["int8", "nf4"]
BYTES = {"int8": 1 + 2 / BLOCK, "nf4": 0.5 + 2 / BLOCK}  # of a weight, its part of a scale included


@pytree
class Quantised:
    """A matrix [..., in, out] as codes [..., blocks, bytes of a block, out] and scales [..., blocks, 1, out]."""

    codes: jax.Array
    scales: jax.Array


Matrix = jax.Array | Quantised


def _normal_levels() -> tuple[float, ...]:
    """Zero, eight levels above it and seven below, at evenly spaced probabilities, the greatest being one."""
    furthest, quantile = (31 / 32 + 29 / 30) / 2, NormalDist().inv_cdf
    above = [quantile(0.5 + (furthest - 0.5) * i / 8) for i in range(1, 9)]
    below = [-quantile(0.5 + (furthest - 0.5) * i / 7) for i in range(1, 8)]
    return tuple(sorted(level / above[-1] for level in (*below, 0.0, *above)))


NF4 = _normal_levels()


def quantise(matrix: jax.Array, base_dtype: BaseDtype) -> Quantised:
    """The nearest codes of a matrix [..., in, out]; raises UserError where its inputs do not make whole blocks."""
    *stack, inputs, outputs = matrix.shape
    if inputs % BLOCK:
        raise UserError(
            f"model.base_dtype={base_dtype}: {inputs} inputs of a matrix are no multiple of {BLOCK}; set it to null."
        )
    blocks = matrix.astype(jnp.float32).reshape(*stack, inputs // BLOCK, BLOCK, outputs)
    whole = jnp.isfinite(blocks).all(axis=-2, keepdims=True)  # a CPU's maximum may ignore NaN
    largest = jnp.where(whole, jnp.abs(blocks).max(axis=-2, keepdims=True), jnp.nan)
    scales = (largest / LARGEST_INT8 if base_dtype == "int8" else largest).astype(jnp.bfloat16)
    shares = blocks / jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    return Quantised(_int8_codes(shares) if base_dtype == "int8" else _nf4_codes(shares), scales)


def _int8_codes(shares: jax.Array) -> jax.Array:
    return jnp.clip(jnp.round(shares), -LARGEST_INT8, LARGEST_INT8).astype(jnp.int8)


def _nf4_codes(shares: jax.Array) -> jax.Array:
    """The second half of a block goes to the upper bits of the bytes of the first."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
    codes = sum((shares > middle).astype(jnp.uint8) for middle in middles)
    lower, upper = jnp.split(jnp.asarray(codes), 2, axis=-2)
    return lower | upper << 4


def dequantise(matrix: Matrix, dtype: jnp.dtype) -> jax.Array:
    """The matrix [..., in, out] that codes and scales stand for; one that is not quantised is returned as it is."""
    if not isinstance(matrix, Quantised):
        return matrix
    codes, scales = matrix.codes, matrix.scales.astype(jnp.float32)
    if codes.dtype == jnp.uint8:
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-2)
        shares = jnp.asarray(NF4, jnp.float32)[codes]
    else:
        shares = codes.astype(jnp.float32)
    *stack, _, _, outputs = codes.shape
    return (shares * scales).astype(dtype).reshape(*stack, -1, outputs)


@partial(jax.jit, static_argnames="base_dtype")
def quantise_stack(matrices: jax.Array, base_dtype: BaseDtype) -> Quantised:
    """Quantises matrices [L, in, out] one after the other, so that no more than one is held in float32."""
    return jax.lax.map(partial(quantise, base_dtype=base_dtype), matrices)
