"""The algorithms beside AdamW, against their papers' equations in float64, and what all of them have in common."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agent_tunix.algorithm import optimizers
from agent_tunix.algorithm.optimizers import ALGORITHMS, Hyperparameters

BETA1, BETA2, EPS, DECAY, LARGEST = 0.9, 0.97, 1e-6, 0.3, 1.0
RATES = [0.01, 0.02, 0.03, 0.02, 0.01]
L, IN, OUT = 2, 6, 4


@pytest.fixture
def run():
    """Matrices of two layers, an embedding and a norm; gradients of very different norms."""
    rng = np.random.default_rng(0)
    params = {"proj": rng.normal(size=(L, IN, OUT)), "embed": rng.normal(size=(5, IN)), "q_norm": rng.normal(size=(L, 3))}
    gradients = [{k: s * rng.normal(size=v.shape) for k, v in params.items()} for s in (10, 0.01, 3, 0.001, 100)]
    return params, gradients


def scalars(rate: float, norm_decay: float = 0.0, weight_decay: float = DECAY) -> Hyperparameters:
    moments = {"beta1": BETA1, "beta2": BETA2, "eps": EPS}
    decays = {"weight_decay": weight_decay, "norm_decay": norm_decay}
    return Hyperparameters(learning_rate=rate, max_grad_norm=LARGEST, **decays, **moments)


def by_us(name, params, gradients, **decays):
    """The parameters and the optimizer's state after all updates."""
    params = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), params)
    state = optimizers.init(params, name)
    step = jax.jit(optimizers.step, static_argnames="name")
    for grads, rate in zip(gradients, RATES, strict=False):
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), grads)
        params, state, _ = step(grads, state, params, scalars(rate, **decays), name=name)
    return params, state


def by_hand(direction, params, gradients):
    """p - rate * (direction + decay * p), the direction being that of one array's clipped gradients so far."""
    new = {}
    norms = [np.sqrt(sum((g**2).sum() for g in grads.values())) for grads in gradients]
    for name, p in params.items():
        seen = []
        for grads, norm, rate in zip(gradients, norms, RATES, strict=True):
            seen.append(grads[name] * min(1.0, LARGEST / norm))
            p = p - rate * (direction(seen) + (0 if name == "q_norm" else DECAY) * p)
        new[name] = p
    return new


def average(seen, beta, power=1):
    """The moving average of the gradients' powers, not corrected for its start."""
    return sum((1 - beta) * beta**age * g**power for age, g in enumerate(reversed(seen)))


def assert_close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=2e-4, atol=2e-5)


def test_lion_is_the_sign_of_an_average_that_leans_to_the_newest_gradient(run):
    """Algorithm 2 of the paper: c = beta1 m + (1 - beta1) g, and m itself is averaged by beta2."""

    def direction(seen):
        return np.sign(BETA1 * average(seen[:-1], BETA2) + (1 - BETA1) * seen[-1])

    assert_close(by_us("lion", *run)[0], by_hand(direction, *run))


def test_sgd_is_heavy_ball_momentum(run):
    def direction(seen):
        return sum(BETA1**age * g for age, g in enumerate(reversed(seen)))

    assert_close(by_us("sgd", *run)[0], by_hand(direction, *run))


def test_adafactor_without_momentum_whose_average_never_freezes(run):
    """Algorithm 4 of the paper; arrays this small are not factored."""

    def direction(seen):
        v = 0.0
        for t, g in enumerate(seen, 1):
            rate = min(1 - t**-0.8, BETA2)
            v = rate * v + (1 - rate) * (g**2 + EPS)
        u = seen[-1] / np.sqrt(v)
        return u / max(1.0, np.sqrt((u**2).mean()))

    assert_close(by_us("adafactor", *run)[0], by_hand(direction, *run))


def test_adafactor_factors_matrices_of_all_weights_and_keeps_rows_and_columns():
    params = {"proj": jnp.ones((3, 256, 128))}
    sizes = [leaf.size for leaf in jax.tree.leaves(optimizers.init(params, "adafactor"))]
    assert sum(sizes) < 3 * (256 + 128) + 10


def test_the_second_moments_bound_of_adafactor_is_beta2():
    """After a hundred updates the paper's rate is above 0.97: a change of the gradient is forgotten at rate beta2."""
    params, h = {"a": jnp.zeros(1)}, scalars(0.0)
    state = optimizers.init(params, "adafactor")
    for size in [0.1] * 100 + [0.5]:
        _, state, _ = optimizers.step({"a": jnp.full(1, size)}, state, params, h, "adafactor")
    v = next(s for s in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "v_row")) if hasattr(s, "v_row")).v["a"]
    np.testing.assert_allclose(v, BETA2 * 0.01 + (1 - BETA2) * 0.25 + EPS, rtol=1e-4)


def newton_schulz(matrix):
    """Five quintic steps with Jordan's coefficients, from a matrix of Frobenius norm one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (np.linalg.norm(matrix) + EPS)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_muon_orthogonalises_each_layers_momentum_and_leaves_the_rest_to_adam(run):
    def direction(seen):
        t, (m, g) = len(seen), (average(seen, BETA1), seen[-1])
        if seen[-1].ndim < 3:
            v_hat = average(seen, BETA2, 2) / (1 - BETA2**t)
            return m / (1 - BETA1**t) / (np.sqrt(v_hat) + EPS)
        nesterov = BETA1 * m / (1 - BETA1 ** (t + 1)) + (1 - BETA1) * g / (1 - BETA1**t)
        return 0.2 * np.sqrt(IN) * np.stack([newton_schulz(layer) for layer in nesterov])

    assert_close(by_us("muon", *run)[0], by_hand(direction, *run))


@pytest.mark.parametrize("shape", [(3, 64, 8), (3, 8, 64), (2, 16, 16)], ids=str)
def test_muons_step_on_an_adapter_is_nearly_orthogonal_in_every_layer(shape):
    rng = np.random.default_rng(1)
    params = {"a": jnp.zeros(shape)}
    grads = {"a": jnp.asarray(rng.normal(size=shape) * np.geomspace(1e-3, 1, shape[0])[:, None, None], jnp.float32)}
    _, _, change = optimizers.step(grads, optimizers.init(params, "muon"), params, scalars(1.0), "muon")
    for layer in np.asarray(change["a"]):
        values = np.linalg.svd(layer, compute_uv=False) / (0.2 * np.sqrt(max(shape[1:])))
        assert values.min() > 0.3
        assert values.max() < 1.3
        assert np.abs(np.median(values) - 1) < 0.25


def test_schedule_free_trains_between_the_iterate_and_its_average(run):
    """The paper's algorithm 1, whose average is weighted by the square of the greatest rate so far."""
    params, gradients = run
    got, state = by_us("schedule_free_adamw", params, gradients)
    want, averaged = {}, {}
    norms = [np.sqrt(sum((g**2).sum() for g in grads.values())) for grads in gradients]
    for name, start in params.items():
        x = y = z = start
        seen, total = [], 0.0
        for t, (grads, norm, rate) in enumerate(zip(gradients, norms, RATES, strict=True), 1):
            seen.append(grads[name] * min(1.0, LARGEST / norm))
            adam = seen[-1] / (np.sqrt(average(seen, BETA2, 2) / (1 - BETA2**t)) + EPS)
            z = z - rate * (adam + (0 if name == "q_norm" else DECAY) * y)
            weight = max(RATES[:t]) ** 2
            total += weight
            x = x + weight / total * (z - x)
            y = (1 - BETA1) * z + BETA1 * x
        want[name], averaged[name] = y, x
    assert_close(got, want)
    assert_close(optimizers.evaluation_params(state, got, "schedule_free_adamw"), averaged)


def test_schedule_free_adamw_at_one_rate_is_optax_own(run, monkeypatch):
    monkeypatch.setitem(globals(), "RATES", [0.02] * 5)
    settings = {"b1": BETA1, "b2": BETA2, "eps": EPS, "weight_decay": DECAY}
    theirs = optax.chain(optax.clip_by_global_norm(LARGEST), optax.contrib.schedule_free_adamw(0.02, **settings))
    want, gradients = (jax.tree.map(jnp.float32, tree) for tree in run)
    state = theirs.init(want)
    for grads in gradients:
        updates, state = theirs.update(grads, state, want)
        want = optax.apply_updates(want, updates)
    assert_close(by_us("schedule_free_adamw", *run, norm_decay=DECAY)[0], want)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_before_the_first_update_what_is_evaluated_is_what_is_trained(run, name):
    params = jax.tree.map(jnp.float32, run[0])
    evaluated = optimizers.evaluation_params(optimizers.init(params, name), params, name)
    for array in params:
        np.testing.assert_array_equal(evaluated[array], params[array])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_clipping_comes_first(run, name):
    """A gradient of a hundred times the norm, above the bound in both cases, makes the same update."""
    params, gradients = run
    longer = [jax.tree.map(lambda g: 100 * g, grads) for grads in gradients[:1]]
    assert_close(by_us(name, params, longer)[0], by_us(name, params, gradients[:1])[0])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_decay_is_decoupled_and_spares_norms_unless_told_not_to(run, name):
    params, gradients = run
    nothing = [jax.tree.map(np.zeros_like, gradients[0])]
    spared, _ = by_us(name, params, nothing)
    shrunk = 1 - RATES[0] * DECAY
    np.testing.assert_allclose(spared["proj"], params["proj"] * shrunk, rtol=1e-5)
    np.testing.assert_allclose(spared["embed"], params["embed"] * shrunk, rtol=1e-5)
    np.testing.assert_allclose(spared["q_norm"], params["q_norm"], rtol=1e-6)
    decayed, _ = by_us(name, params, nothing, norm_decay=DECAY)
    np.testing.assert_allclose(decayed["q_norm"], params["q_norm"] * shrunk, rtol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_runs_that_differ_in_scalars_share_one_program_and_one_shape_of_state(run, name):
    params, gradients = (jax.tree.map(jnp.float32, tree) for tree in run)
    step = jax.jit(optimizers.step, static_argnames="name")
    state = jax.jit(optimizers.init, static_argnames="name")(params, name=name)
    programs = []
    for rate, decay in ((0.1, 0.0), (0.2, 0.1), (0.3, 0.2)):
        params, state, _ = step(gradients[0], state, params, scalars(rate, weight_decay=decay), name=name)
        programs.append(step._cache_size())
    assert programs[0] == programs[2]
