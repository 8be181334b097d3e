"""What turns products into queries and keys: a norm of every head, and RoPE by position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_tunix.types import pytree, static


@pytree
class Placing:
    """Norm and RoPE of queries and keys: scales of the norms, None where there are none, cosines and sines by position,
    [..., T, 1, N / 2], and the factor that queries are multiplied by.
    """

    q_norm: jax.Array | None
    k_norm: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    eps: float = static()
    query_scale: float = static()
    norm_offset: float = static()

    def __call__(self, q_BTHN: jax.Array, k_BTKN: jax.Array) -> tuple[jax.Array, jax.Array]:
        how = self.cos, self.sin, self.eps, self.norm_offset
        return placed(q_BTHN, self.q_norm, *how, self.query_scale), placed(k_BTKN, self.k_norm, *how, 1.0)


def placed(x_BTHN, scale: jax.Array | None, cos, sin, eps: float, norm_offset: float, factor: float) -> jax.Array:
    normed = x_BTHN if scale is None else rms_norm(x_BTHN, scale, eps, norm_offset)
    return rotate(normed, cos, sin) * factor


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, offset: float) -> jax.Array:
    """Zhang & Sennrich (2019) in float32; the weight is `scale + offset`, as Gemma stores its departure from one.

    Sequences and tokens become one axis: a CPU sums the last axis of [B, 1, D] ten times more slowly than that of [B, D].
    """
    x32 = x.reshape(-1, *(size for size in x.shape[2:-1] if size > 1), x.shape[-1]).astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    weight = offset + scale.astype(jnp.float32)
    return (normed * weight).astype(x.dtype).reshape(x.shape)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Halves (a, b) of every head become (a cos - b sin, b cos + a sin)."""
    x32, half, (cos, sin) = x.astype(jnp.float32), x.shape[-1] // 2, both_halves(cos, sin)
    return (x32 * cos + jnp.roll(x32, half, axis=-1) * sin).astype(x.dtype)


def both_halves(cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For RoPE: what each number of a head is multiplied by, and what the number half a head away is multiplied by."""
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
