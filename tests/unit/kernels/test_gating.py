"""Against the formula and its derivative, in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels.gating import gated


def plain(activation: str, gate: np.ndarray, up: np.ndarray, d: np.ndarray) -> list[np.ndarray]:
    """What is made, and the gradients of gate and up."""
    if activation == "silu":
        share = 1 / (1 + np.exp(-gate))
        return [gate * share * up, d * up * (share + gate * share * (1 - share)), d * gate * share]
    inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * gate**2)
    gelu = gate * (1 + np.tanh(inner)) / 2
    gelu_slope = (1 + np.tanh(inner)) / 2 + gate * slope / (2 * np.cosh(inner) ** 2)
    return [gelu * up, d * up * gelu_slope, d * gelu]


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_it_and_its_gradient_are_those_of_the_formula(activation):
    rng = np.random.default_rng(0)
    gate, up, d = (jnp.asarray(3 * rng.normal(size=(40, 50)), jnp.bfloat16) for _ in range(3))
    found, back = jax.vjp(partial(gated, activation=activation), gate, up)
    wanted = plain(activation, *(np.asarray(x, np.float64) for x in (gate, up, d)))
    for x, want in zip((found, *back(d)), wanted, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(x, np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("gate", [-1e4, -50.0, 0.0, 50.0, 1e4])
def test_far_gates_are_shut_or_open(gate):
    found, slope = jax.value_and_grad(lambda x: gated(x, jnp.ones_like(x), "gelu"))(jnp.asarray(gate, jnp.bfloat16))
    assert found == max(gate, 0)
    assert slope == (0.5 if gate == 0 else gate > 0)
