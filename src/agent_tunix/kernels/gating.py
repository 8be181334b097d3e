"""A gated feed-forward layer (Shazeer, 2020, arXiv:2002.05202): the gate's activation, times up.

Two-byte numbers mean a GPU, where this takes as long as reading and writing its arrays. So its gradient is computed from
gate and up alone; automatic differentiation would write and read intermediate results. And gelu is written as a sigmoid,
(1 + tanh x) / 2 = 1 / (1 + exp(-2 x)): in its usual form XLA has cuBLAS add it to the product, which then takes a third
longer and saves nothing, as up is still to be multiplied with.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["gelu", "silu"]  # gelu by its tanh approximation


def gated(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """GeGLU or SwiGLU."""
    if gate.dtype == jnp.float32:
        return (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True)) * up
    return _gated(activation, gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return (_ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def _gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_ACTIVATIONS = {"gelu": _gelu, "silu": jax.nn.silu}


def _forward(activation: Activation, gate: jax.Array, up: jax.Array):
    return _gated(activation, gate, up), (gate, up)


def _backward(activation: Activation, given, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    (gate, up), dtype = (x.astype(jnp.float32) for x in given), d.dtype
    made, back = jax.vjp(_ACTIVATIONS[activation], gate)
    d = d.astype(jnp.float32)
    return back(d * up)[0].astype(dtype), (d * made).astype(dtype)


_gated.defvjp(_forward, _backward)
