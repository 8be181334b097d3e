"""Objectives: the papers' formulas by hand in float64, and what must hold of all of them. TRL's numbers: test_goldens.py."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.algorithm import objectives
from agent_tunix.algorithm.objectives import KL_ESTIMATORS, OBJECTIVES, Coefficients, LossForm, k3, sequence_means
from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.training.horizon import coefficients, loss_form
from agent_tunix.types import Batch, Prompts

LENGTHS = (4, 1, 3, 2)
LONGEST = 6
C = Coefficients(temperature=1.0, beta=0.1, epsilon=0.2, epsilon_high=0.3, delta=1.5, importance_cap=1.1)
ALL = sorted(OBJECTIVES)
policy_loss = jax.jit(objectives.policy_loss, static_argnames="form")


@dataclasses.dataclass(frozen=True)
class Case:
    logprobs_BC: jax.Array
    entropy_BC: jax.Array
    batch: Batch


@pytest.fixture
def case() -> Case:
    """Four sequences of 4, 1, 3 and 2 tokens in two groups; ratios between 0.6 and 1.6, advantages of both signs."""
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, -0.5, (4, 5)).astype(np.float32)
    new = old + np.log(rng.uniform(0.6, 1.6, (4, 5))).astype(np.float32)
    trainer = old + rng.normal(0, 0.2, (4, 5)).astype(np.float32)
    reference = new + rng.normal(0, 0.5, (4, 5)).astype(np.float32)
    mask = np.arange(5) < np.array(LENGTHS)[:, None]
    entropy = rng.uniform(0, 2, (4, 5)).astype(np.float32)
    prompts = Prompts(jnp.zeros((2, 1), jnp.int32), jnp.zeros((2, 1), jnp.int32))
    batch = Batch(prompts, jnp.zeros((4, 5), jnp.int32), mask, mask, old, trainer, reference)
    advantages = np.array([1.5, -0.7, -1.2, 0.4], np.float32)
    return Case(*map(jnp.asarray, (new, entropy)), dataclasses.replace(batch, advantages_B=advantages))


def with_weights(case: Case, objective: str, form: dict | None = None) -> tuple[Batch, LossForm]:
    weights = OBJECTIVES[objective].weights(np.asarray(case.batch.learnt_BC), LONGEST).astype(np.float32)
    batch = dataclasses.replace(case.batch, weights_BC=jnp.asarray(weights))
    if not form or form.get("importance_correction", "none") == "none":
        batch = dataclasses.replace(batch, trainer_logprobs_BC=None)
    return batch, LossForm(objective, **form or {})


def value_and_gradient(case: Case, objective: str, c: Coefficients = C, **form):
    batch, of = with_weights(case, objective, form)

    def loss(new):
        return objectives.policy_loss(new, case.entropy_BC, batch, c, of)

    (value, stats), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(case.logprobs_BC)
    return value, gradient, stats


def by_hand(case: Case, objective: str, c: Coefficients = C, estimator="k3", kl_correction=False, correction="none"):
    """The papers' formulas, token by token in float64: the loss as a function of all log-probabilities."""
    old, trainer, reference = (
        np.asarray(x, np.float64)
        for x in (case.batch.old_logprobs_BC, case.batch.trainer_logprobs_BC, case.batch.reference_logprobs_BC)
    )
    advantages, tokens = np.asarray(case.batch.advantages_B, np.float64), sum(LENGTHS)

    def loss(new: np.ndarray, held: np.ndarray) -> float:
        """`held` stands where the papers stop the gradient."""
        total = 0.0
        for b, (length, A) in enumerate(zip(LENGTHS, advantages, strict=True)):
            base = old if correction == "none" else trainer
            logs, held_logs = (x[b, :length] - base[b, :length] for x in (new, held))
            for t in range(length):
                if objective == "gspo":
                    rho = math.exp(logs.mean())
                elif objective == "gspo_token":
                    rho = math.exp(held_logs.mean()) * math.exp(logs[t] - held_logs[t])
                elif objective == "rloo":
                    rho = math.exp(logs.sum())
                else:
                    rho = math.exp(logs[t])
                if objective == "cispo":
                    value = min(math.exp(held_logs[t]), 1 + c.epsilon_high) * A * new[b, t]
                elif objective == "sapo":
                    tau = c.sapo_temperature_pos if A > 0 else c.sapo_temperature_neg
                    value = 4 / tau / (1 + math.exp(-tau * (rho - 1))) * A
                else:
                    value = min(min(rho, c.delta) * A, min(max(rho, 1 - c.epsilon), 1 + c.epsilon_high) * A)
                drift = math.exp(trainer[b, t] - old[b, t])
                value *= {
                    "none": 1.0,
                    "truncate": min(drift, c.importance_cap),
                    "mask": drift if drift <= c.importance_cap else 0.0,
                }[correction]
                x = reference[b, t] - new[b, t]
                kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - x - 1}[estimator]
                value -= c.beta * kl * (rho if kl_correction else 1.0)
                by_token = {"dr_grpo": len(LENGTHS) * LONGEST} | dict.fromkeys(("bnpo", "dapo", "cispo"), tokens)
                total += value / by_token.get(objective, len(LENGTHS) * length)
        return -total

    new = np.asarray(case.logprobs_BC, np.float64)
    gradient = np.zeros_like(new)
    for index in np.ndindex(*new.shape):
        step = np.zeros_like(new)
        step[index] = 1e-6
        gradient[index] = (loss(new + step, new) - loss(new - step, new)) / 2e-6
    return loss(new, new), gradient


def assert_same(got, want):
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=2e-4, atol=2e-6)
    assert np.abs(want[1]).max() > 1e-3


@pytest.mark.parametrize("objective", ALL)
def test_loss_and_gradient_are_the_papers_formulas(case, objective):
    assert_same(value_and_gradient(case, objective), by_hand(case, objective))


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS))
@pytest.mark.parametrize("kl_correction", [False, True])
def test_every_estimate_of_the_divergence(case, estimator, kl_correction):
    got = value_and_gradient(case, "grpo", kl_estimator=estimator, kl_correction=kl_correction)
    assert_same(got, by_hand(case, "grpo", estimator=estimator, kl_correction=kl_correction))


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo"])
def test_tokens_are_weighed_by_how_far_the_sampler_was_off(case, objective, correction):
    got = value_and_gradient(case, objective, importance_correction=correction)
    assert_same(got, by_hand(case, objective, correction=correction))


@pytest.mark.parametrize("objective", ALL)
def test_padding_and_what_lies_in_it_changes_nothing(case, objective):
    """Not even where a model finds it so unlikely that the exponential of a log-ratio is infinite."""
    loss, gradient, stats = value_and_gradient(case, objective)
    learnt = np.asarray(case.batch.learnt_BC)

    def dirty(values):
        return jnp.pad(jnp.where(learnt, values, -300.0), ((0, 0), (0, 3)), constant_values=-900.0)

    wide = jnp.pad(learnt, ((0, 0), (0, 3)))
    batch = dataclasses.replace(
        case.batch,
        mask_BC=wide,
        learnt_BC=wide,
        old_logprobs_BC=jnp.where(wide, dirty(case.batch.old_logprobs_BC), 0.0),
        reference_logprobs_BC=dirty(case.batch.reference_logprobs_BC),
    )
    wider = Case(dirty(case.logprobs_BC), dirty(case.entropy_BC), batch)
    got, wide_gradient, got_stats = value_and_gradient(wider, objective)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), got_stats, stats)
    np.testing.assert_allclose(wide_gradient[:, :5], gradient, rtol=1e-5, atol=1e-8)
    assert (np.asarray(wide_gradient)[~np.asarray(wide)] == 0).all()


@pytest.mark.parametrize("objective", ALL)
def test_slices_of_a_batch_add_up_and_the_order_of_a_group_does_not_matter(case, objective):
    batch, form = with_weights(case, objective)
    given = case.logprobs_BC, case.entropy_BC, batch
    whole, stats = policy_loss(*given, C, form=form)

    def rows(indices):
        taken = jax.tree.map(lambda x: x[jnp.asarray(indices)] if len(x) == 4 else x, given)
        return policy_loss(*taken, C, form=form)

    (first, _), (second, _) = rows([0, 1]), rows([2, 3])
    np.testing.assert_allclose(first + second, whole, rtol=1e-5)
    swapped, swapped_stats = rows([1, 0, 3, 2])
    np.testing.assert_allclose(swapped, whole, rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), swapped_stats, stats)


def test_weights_of_a_batch_sum_to_what_the_objective_says():
    learnt = np.arange(5) < np.array(LENGTHS)[:, None]
    assert objectives.per_sequence(learnt, LONGEST).sum() == pytest.approx(1)
    np.testing.assert_allclose(objectives.per_sequence(learnt, LONGEST).sum(axis=1), 1 / len(LENGTHS))
    assert objectives.per_token(learnt, LONGEST).sum() == pytest.approx(1)
    assert objectives.per_longest(learnt, LONGEST).sum() == pytest.approx(sum(LENGTHS) / len(LENGTHS) / LONGEST)
    for weights in (objectives.per_sequence, objectives.per_token, objectives.per_longest):
        assert (weights(np.zeros((2, 3), bool), LONGEST) == 0).all()


def test_a_clipped_token_has_no_gradient_and_is_counted(case):
    ratio = np.exp(np.asarray(case.logprobs_BC - case.batch.old_logprobs_BC))
    positive = np.asarray(case.batch.advantages_B)[:, None] > 0
    out = np.where(positive, ratio > 1.3, (ratio < 0.8) | (ratio > 1.5)) & np.asarray(case.batch.learnt_BC)
    _, gradient, stats = value_and_gradient(case, "grpo", dataclasses.replace(C, beta=0.0))
    assert out.any()
    assert not np.asarray(gradient)[out].any()
    assert np.asarray(gradient)[~out & np.asarray(case.batch.learnt_BC)].all()
    np.testing.assert_allclose(stats.clip_fraction, (out.sum(1) / np.array(LENGTHS)).sum(), rtol=1e-6)


def test_the_divergence_that_is_measured_is_k3_whichever_is_learnt_from(case):
    measured = {name: value_and_gradient(case, "grpo", kl_estimator=name)[2].kl for name in KL_ESTIMATORS}
    assert len({float(kl) for kl in measured.values()}) == 1
    assert measured["k1"] > 0


def test_demonstrations_are_learnt_by_cross_entropy(case):
    batch = dataclasses.replace(case.batch, old_logprobs_BC=None, reference_logprobs_BC=None, advantages_B=jnp.ones(4))
    loss, gradient, stats = value_and_gradient(dataclasses.replace(case, batch=batch), "grpo")
    np.testing.assert_allclose(loss, -sequence_means(case.logprobs_BC, batch.learnt_BC).mean(), rtol=1e-6)
    assert not (np.asarray(gradient) > 0).any()
    assert stats.kl == stats.mismatch_kl == stats.clip_fraction == 0


def test_the_mismatch_is_that_of_trainer_and_sampler(case):
    same = dataclasses.replace(case, logprobs_BC=case.batch.old_logprobs_BC)
    assert value_and_gradient(same, "grpo")[2].mismatch_kl == 0
    assert value_and_gradient(case, "grpo")[2].mismatch_kl > 0


def test_k3_estimates_the_kl_divergence_without_bias():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    expected = (p * np.asarray(k3(jnp.log(q / p)))).sum()
    np.testing.assert_allclose(expected, (p * np.log(p / q)).sum(), rtol=1e-5)
    assert (k3(jnp.linspace(-5, 5, 101)) >= 0).all()


def test_a_sequence_without_tokens_counts_zero():
    values = jnp.array([[2.0, 4.0], [5.0, 6.0]])
    np.testing.assert_array_equal(sequence_means(values, jnp.array([[1, 1], [0, 0]], bool)), [3, 0])


@pytest.mark.parametrize("preset", ALL)
def test_each_objective_has_a_file_that_sets_it(preset):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", [f"grpo={preset}"]), Config)
    assert loss_form(cfg).objective == preset
    assert coefficients(cfg).epsilon_high >= coefficients(cfg).epsilon
    own_scale = "none" if preset in ("dr_grpo", "rloo") else "group"
    assert cfg.grpo.scale_rewards == own_scale
