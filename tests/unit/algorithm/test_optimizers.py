from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.optimizers import Hyperparameters

BETAS, EPS = (0.9, 0.99), 1e-8


def by_hand(params, gradients, rates, weight_decay, max_grad_norm):
    """AdamW as in Loshchilov & Hutter, algorithm 2, on a gradient clipped by its global norm; float64."""
    params = {k: np.array(v, np.float64) for k, v in params.items()}
    m = {k: np.zeros_like(v) for k, v in params.items()}
    v = {k: np.zeros_like(p) for k, p in params.items()}
    for t, (grads, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, max_grad_norm / norm)
        for k in params:
            g = grads[k] * scale
            m[k] = BETAS[0] * m[k] + (1 - BETAS[0]) * g
            v[k] = BETAS[1] * v[k] + (1 - BETAS[1]) * g**2
            m_hat, v_hat = m[k] / (1 - BETAS[0] ** t), v[k] / (1 - BETAS[1] ** t)
            params[k] = params[k] - lr * (m_hat / (np.sqrt(v_hat) + EPS) + weight_decay * params[k])
    return params


def scalars(learning_rate, weight_decay, max_grad_norm) -> Hyperparameters:
    return Hyperparameters(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        max_grad_norm=max_grad_norm,
    )


def by_us(params, gradients, rates, weight_decay, max_grad_norm):
    params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
    state = optimizers.init(params)
    for grads, lr in zip(gradients, rates, strict=True):
        grads = {k: jnp.asarray(g, jnp.float32) for k, g in grads.items()}
        params, state, _ = optimizers.step(grads, state, params, scalars(lr, weight_decay, max_grad_norm))
    return params


@pytest.fixture
def run():
    """Two tensors, gradients of very different norms over the steps, a rate that changes."""
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(3, 2)), "b": rng.normal(size=4)}
    gradients = [{k: s * rng.normal(size=v.shape) for k, v in params.items()} for s in (10, 0.01, 3, 0.001, 100)]
    return params, gradients, [0.01, 0.02, 0.03, 0.02, 0.01]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("max_grad_norm", [0.1, 1.0, 1e9])
def test_adamw_with_clipping_before_it_equals_the_paper(run, weight_decay, max_grad_norm):
    got, want = by_us(*run, weight_decay, max_grad_norm), by_hand(*run, weight_decay, max_grad_norm)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-5, atol=1e-6)


def test_decay_is_decoupled_it_shrinks_weights_that_get_no_gradient():
    params = {"a": np.array([2.0, -4.0])}
    got = by_us(params, [{"a": np.zeros(2)}], [0.1], weight_decay=0.5, max_grad_norm=1.0)
    np.testing.assert_allclose(got["a"], [2.0 * (1 - 0.05), -4.0 * (1 - 0.05)], rtol=1e-6)


def test_step_reports_the_change_it_made(run):
    params, gradients, _ = run
    params = {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}
    grads = {k: jnp.asarray(g, jnp.float32) for k, g in gradients[0].items()}
    new, _, change = optimizers.step(grads, optimizers.init(params), params, scalars(0.1, 0.1, 1.0))
    for name in params:
        np.testing.assert_allclose(new[name] - params[name], change[name], rtol=1e-4, atol=1e-6)


def test_rate_zero_changes_nothing(run):
    params, gradients, _ = run
    got = by_us(params, gradients[:1], [0.0], 0.3, 1.0)
    for name in params:
        np.testing.assert_array_equal(got[name], params[name].astype(np.float32))


def test_a_norm_is_known_by_its_own_name_wherever_it_lies():
    """Without a gradient nothing moves but by decay."""
    params = {"layers": {"pre_norm": jnp.ones((2, 3)), "proj": jnp.ones((2, 3, 3))}, "norms": {"embed": jnp.ones((5, 3))}}
    still = jax.tree.map(jnp.zeros_like, params)
    moved, *_ = optimizers.step(still, optimizers.init(params), params, scalars(0.1, 0.5, 1.0))
    ends = jax.tree.map(lambda array: float(array.min()), moved)
    assert ends == {"layers": {"pre_norm": 1.0, "proj": pytest.approx(0.95)}, "norms": {"embed": pytest.approx(0.95)}}
