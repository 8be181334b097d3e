"""x A B, the product of an adapter, with its gradient written out.

Left to automatic differentiation, the gradient of B has the wide cotangent of y as its left operand, which a CPU transposes
first, taking along whatever the cotangent is made of; that was a third of an update. Here the narrow operand is always
the left one. Gradients of A and B come out in float32, as A and B are, whatever x is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def low_rank(x_NE: jax.Array, a_ER: jax.Array, b_RU: jax.Array) -> jax.Array:
    """Of rows x, in their precision; all may have a leading axis of adapters."""
    return _forward(x_NE, a_ER, b_RU)[0]


def _forward(x_NE, a_ER, b_RU):
    low_NR = x_NE @ a_ER.astype(x_NE.dtype)
    return low_NR @ b_RU.astype(x_NE.dtype), (x_NE, low_NR, a_ER, b_RU)


def _backward(saved, dy_NU):
    x_NE, low_NR, a_ER, b_RU = saved
    dlow_NR = dy_NU @ b_RU.astype(dy_NU.dtype).mT
    return dlow_NR @ a_ER.astype(dy_NU.dtype).mT, _over_rows(dlow_NR, x_NE).mT, _over_rows(low_NR, dy_NU)


def _over_rows(narrow_NR, wide_NE) -> jax.Array:
    """narrow^T wide, summed over rows: [R, E] in float32."""
    *members, rows = range(narrow_NR.ndim - 1)
    contracted = ((rows,), (rows,)), (tuple(members), tuple(members))
    return jax.lax.dot_general(narrow_NR, wide_NE, contracted, preferred_element_type=jnp.float32)


low_rank.defvjp(_forward, _backward)
