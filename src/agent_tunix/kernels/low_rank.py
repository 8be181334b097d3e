"""x W + x A B, the product of a matrix and its adapter, with the gradient of A and B written out.

Left to automatic differentiation, the gradient of B has the wide cotangent of y as its left operand, which a CPU transposes
first, taking along whatever the cotangent is made of; that was a third of an update. Here the narrow operand is always
the left one. Gradients of A and B come out in float32, as A and B are, whatever x is.

Of many rows x (W + A B) is fewer operations than x W + (x A) B, and two products fewer each way. But W + A B takes part in
a product only as precisely as the product reads its operands: a change that is small beside W is lost in bfloat16, and in
the shortened float32 of accelerators. So adapters are added to the matrix on a CPU, in float32, alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def adapted(x: jax.Array, w_EU: jax.Array, a_ER: jax.Array, b_RU: jax.Array, factor_U: jax.Array | None = None) -> jax.Array:
    """x W + x A B, in the precision of x, [..., E]; each output times its factor, where there are factors.

    Several adapters stacked, [K, E, R], each serve their K-th share of the rows of x; a product with W is one for all.
    """
    rows_NE = x.reshape(*a_ER.shape[:-2], -1, x.shape[-1])
    if adding_pays(rows_NE.shape[-2], w_EU):
        y = _added(rows_NE, w_EU, a_ER, b_RU).reshape(*x.shape[:-1], -1)
    else:
        y = x @ w_EU
        y = y + low_rank(rows_NE, a_ER, b_RU).reshape(y.shape)
    return y if factor_U is None else _scaled(y, factor_U)


def _scaled(y: jax.Array, factor_U: jax.Array) -> jax.Array:
    """In float32, as factors differ from each other by less than shorter numbers can."""
    rows_NU = y.reshape(*factor_U.shape[:-1], -1, y.shape[-1]).astype(jnp.float32)
    return (rows_NU * factor_U[..., None, :]).astype(y.dtype).reshape(y.shape)


def adding_pays(rows: int, w: jax.Array) -> bool:
    """Whether x (W + A B) is cheaper: for N rows x A B takes R N (E + U) multiplications, A B R E U. W is [..., E, U]."""
    E, U = w.shape[-2:]
    return jax.default_backend() == "cpu" and w.dtype == jnp.float32 and rows * (E + U) > E * U


@jax.custom_vjp
def _added(x_NE: jax.Array, w_EU: jax.Array, a_ER: jax.Array, b_RU: jax.Array) -> jax.Array:
    """x (W + A B)."""
    return _added_forward(x_NE, w_EU, a_ER, b_RU)[0]


def _added_forward(x_NE, w_EU, a_ER, b_RU):
    sum_EU = w_EU + a_ER @ b_RU
    return x_NE @ sum_EU, (x_NE, sum_EU, a_ER, b_RU)


def _added_backward(saved, dy_NU):
    """Where W is frozen its gradient is dead code, which the compiler drops."""
    x_NE, sum_EU, a_ER, b_RU = saved
    dw_EU = _over_rows(x_NE, dy_NU).reshape(-1, *sum_EU.shape[-2:]).sum(axis=0)
    # Without the barrier the compiler would transpose x to make A's gradient untransposed, which takes three times as long.
    da_RE = jax.lax.optimization_barrier(_over_rows(dy_NU @ b_RU.mT, x_NE))
    return dy_NU @ sum_EU.mT, dw_EU, da_RE.mT, _over_rows(x_NE @ a_ER, dy_NU)


_added.defvjp(_added_forward, _added_backward)


@jax.custom_vjp
def low_rank(x_NE: jax.Array, a_ER: jax.Array, b_RU: jax.Array) -> jax.Array:
    """x A B of rows x, in their precision; all may have a leading axis of adapters."""
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
