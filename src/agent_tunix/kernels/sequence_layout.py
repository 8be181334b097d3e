"""Sequences of prompts and their groups, laid out as attention reads them, as kernels for an NVIDIA GPU (Pallas, by Triton).

A row is a prompt, padded on its left, and then its group of completions. Attention reads a sequence for each completion, its
prompt before it, that begins at its first token; padding comes last. So a token's place in it is its position, and queries
and keys are normed and rotated on the way, by the angles of that place. Gradients go back the same way in one kernel, which
adds up what comes to a prompt from all its completions.

Axes as in types.py, and: W tokens of a row, which are those of a prompt and of its whole group; M half of a head.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from agent_tunix.kernels.matmul import FLOAT32, call
from agent_tunix.kernels.norm_rope import placed

TILE = 8  # tokens of a program


@dataclasses.dataclass(frozen=True)
class Turning:
    """Tokens of a prompt and of a completion, and completions of a prompt; how heads are normed and then multiplied."""

    prompt: int
    completion: int
    group: int
    eps: float
    factor: float
    interpret: bool

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion

    def sources(self, places, row, first):
        """Where in its prompt's row the sequence of a completion finds its tokens."""
        tokens = (places + first) % self.tokens
        return jnp.where(tokens < self.prompt, tokens, tokens + row % self.group * self.completion)

    def places(self, sources, first):
        """Where a sequence has tokens of a row, and of which completion they are; those of the prompt are of all."""
        own = jnp.maximum(sources - self.prompt, 0)
        tokens = jnp.where(sources < self.prompt, sources, self.prompt + own % self.completion)
        return (tokens + self.tokens - first) % self.tokens, own // self.completion


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def turned(how: Turning, x_PWHN, first_P, scale_N=None, cos_TM=None, sin_TM=None) -> jax.Array:
    """[B, T, H, N]: of every completion the sequence, from its first token on; normed and rotated, where it is said how."""
    P, _, H, N = x_PWHN.shape
    shape = P * how.group, how.tokens, H, N
    return _run(_turn_kernel, how, (x_PWHN, first_P, scale_N, cos_TM, sin_TM), jax.ShapeDtypeStruct(shape, x_PWHN.dtype))


def _forward(how: Turning, *given):
    return turned(how, *given), given


def _backward(how: Turning, given, dy_BTHN):
    """Where the scale is frozen its gradient is dead code, which the compiler drops."""
    x_PWHN, first_P, scale_N, cos_TM, sin_TM = given
    dx_PWHN = _run(_return_kernel, how, (dy_BTHN, *given), x_PWHN)
    if scale_N is None:
        return dx_PWHN, None, None, None, None
    x_BTHN, angles = turned(how, x_PWHN, first_P), (cos_TM[:, None], sin_TM[:, None])
    _, back = jax.vjp(lambda scale_N: placed(x_BTHN, scale_N, *angles, how.eps, 1.0, how.factor), scale_N)
    return dx_PWHN, None, *back(dy_BTHN), None, None


turned.defvjp(_forward, _backward)


def _run(kernel, how: Turning, given, made):
    """A program takes a tile of tokens of a row of what is made, and one head after another: all have the same angles."""
    given, (rows, tokens, *_) = [x for x in given if x is not None], made.shape
    specs = [pl.BlockSpec(x.shape, lambda *_, axes=x.ndim: (0,) * axes) for x in (*given, made)]
    out = jax.ShapeDtypeStruct(made.shape, made.dtype)
    grid = rows, pl.cdiv(tokens, TILE)
    return call(partial(kernel, how), grid, specs[:-1], specs[-1], out, interpret=how.interpret)(*given)


def _turn_kernel(how, x_ref, first_ref, *placing_and_out):
    *placing, out_ref = placing_and_out
    row, places = pl.program_id(0), _tile(how.tokens)
    prompt = row // how.group
    sources = how.sources(places, row, first_ref[prompt])
    scales_and_angles = _load(placing, places)

    def turn(head, _):
        halves = [x_ref[prompt, sources, head, half] for half in _halves(x_ref)]
        if placing:
            halves = _placed(how, halves, *scales_and_angles)
        for half, x in zip(_halves(x_ref), halves, strict=True):
            out_ref[row, places, head, half] = x

    jax.lax.fori_loop(0, x_ref.shape[2], turn, None)


def _return_kernel(how, dy_ref, x_ref, first_ref, *placing_and_out):
    *placing, dx_ref = placing_and_out
    prompt, sources = pl.program_id(0), _tile(x_ref.shape[1])
    places, members = how.places(sources, first_ref[prompt])
    of_all = sources < how.prompt
    times = 1 + (how.group - 1) * (pl.program_id(1) * TILE < how.prompt).astype(jnp.int32)
    scales_and_angles = _load(placing, places)

    def back(head, _):
        def add(n, sums):
            rows = prompt * how.group + jnp.where(of_all, n, members)
            parts = (dy_ref[rows, places, head, half].astype(FLOAT32) for half in _halves(x_ref))
            return tuple(x + jnp.where((of_all | (n == 0))[:, None], part, 0.0) for x, part in zip(sums, parts, strict=True))

        nothing = jnp.zeros((TILE, x_ref.shape[3] // 2), FLOAT32)
        halves = jax.lax.fori_loop(0, times, add, (nothing, nothing))
        if placing:
            halves = _unplaced(
                how, halves, [x_ref[prompt, sources, head, half] for half in _halves(x_ref)], *scales_and_angles
            )
        for half, x in zip(_halves(x_ref), halves, strict=True):
            dx_ref[prompt, sources, head, half] = x.astype(dx_ref.dtype)

    jax.lax.fori_loop(0, x_ref.shape[2], back, None)


def _tile(tokens: int):
    """A program's tokens; beyond the last, that one again."""
    return jnp.minimum(pl.program_id(1) * TILE + jax.lax.broadcasted_iota(jnp.int32, (TILE,), 0), tokens - 1)


def _halves(x_ref):
    half = x_ref.shape[3] // 2
    return pl.ds(0, half), pl.ds(half, half)


def _load(placing, places):
    """One and the scale, of both halves of a head; cosines and sines of places."""
    if not placing:
        return None
    scale_ref, *angles = placing
    half = scale_ref.shape[0] // 2
    return *(1.0 + scale_ref[pl.ds(n * half, half)].astype(FLOAT32)[None] for n in range(2)), *(x[places, :] for x in angles)


def _normed(how, halves):
    """Halves of heads over the root of their mean square, in float32, and what they were multiplied by."""
    a, b = (x.astype(FLOAT32) for x in halves)
    inverse = jax.lax.rsqrt(((a * a).sum(axis=1) + (b * b).sum(axis=1)) / (2 * a.shape[1]) + how.eps)[:, None]
    return a * inverse, b * inverse, inverse


def _placed(how, halves, a_scale, b_scale, cos, sin):
    """`heads.placed`, which rounds where this does."""
    (a, b, _), dtype = _normed(how, halves), halves[0].dtype
    a, b = (a * a_scale).astype(dtype).astype(FLOAT32), (b * b_scale).astype(dtype).astype(FLOAT32)
    rotated = (a * cos - b * sin).astype(dtype), (b * cos + a * sin).astype(dtype)
    return [(x.astype(FLOAT32) * how.factor).astype(dtype) for x in rotated]


def _unplaced(how, gradients, halves, a_scale, b_scale, cos, sin):
    """The gradient of halves of heads, from that of what was made of them."""
    (a, b, inverse), (da, db) = _normed(how, halves), (how.factor * x for x in gradients)
    da, db = (da * cos + db * sin) * a_scale, (db * cos - da * sin) * b_scale
    along = ((da * a).sum(axis=1) + (db * b).sum(axis=1))[:, None] / (2 * a.shape[1])
    return inverse * (da - a * along), inverse * (db - b * along)
