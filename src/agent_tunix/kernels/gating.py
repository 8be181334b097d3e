"""GeGLU (Shazeer, 2020, arXiv:2002.05202): the gate's approximate gelu, times up.

Two-byte numbers mean a GPU, where this takes as long as reading and writing its arrays. So its gradient is computed from
gate and up alone; automatic differentiation would write and read intermediate results. And gelu is written as a sigmoid,
(1 + tanh x) / 2 = 1 / (1 + exp(-2 x)): in its usual form XLA has cuBLAS add it to the product, which then takes a third
longer and saves nothing, as up is still to be multiplied with.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    if gate.dtype == jnp.float32:
        return jax.nn.gelu(gate, approximate=True) * up
    return _gated(gate, up)


@jax.custom_vjp
def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (_gelu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _forward(gate: jax.Array, up: jax.Array):
    return _gated(gate, up), (gate, up)


def _backward(given, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (gate, up), dtype = (x.astype(jnp.float32) for x in given), d.dtype
    made, back = jax.vjp(_gelu, gate)
    d = d.astype(jnp.float32)
    return back(d * up)[0].astype(dtype), (d * made).astype(dtype)


_gated.defvjp(_forward, _backward)
