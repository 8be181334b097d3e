from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import loss as loss_module
from agent_tunix.algorithm.loss import LossInputs, k3, sequence_means, token_logprobs

grpo_loss = jax.jit(loss_module.grpo_loss, static_argnames=("epsilon", "beta"))
EPSILON, BETA = 0.2, 0.1
LENGTHS = (4, 1, 3)


@pytest.fixture
def inputs() -> LossInputs:
    """Three sequences of 4, 1 and 3 tokens; ratios between 0.6 and 1.6, advantages of both signs."""
    rng = np.random.default_rng(0)
    old = rng.uniform(-3, -0.5, (3, 5)).astype(np.float32)
    new = old + np.log(rng.uniform(0.6, 1.6, (3, 5))).astype(np.float32)
    reference = new + rng.normal(0, 0.5, (3, 5)).astype(np.float32)
    mask = np.arange(5) < np.array(LENGTHS)[:, None]
    entropy = rng.uniform(0, 2, (3, 5)).astype(np.float32)
    arrays = (new, old, reference, entropy, mask, np.array([1.5, -0.7, -1.2], np.float32))
    return LossInputs(*(jnp.asarray(x) for x in arrays))


def by_hand(x: LossInputs, epsilon: float, beta: float) -> tuple[float, float]:
    """Equation 3 of the paper, token by token: minus the objective and the share clipped, summed over sequences."""
    x = jax.tree.map(lambda v: np.asarray(v, np.float64), x)
    total, clipped = 0.0, 0.0
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            new, old, ref = x.logprobs_BC[b, t], x.old_logprobs_BC[b, t], x.reference_logprobs_BC[b, t]
            advantage = x.advantages_B[b]
            rho = np.exp(new - old)
            bounded = min(max(rho, 1 - epsilon), 1 + epsilon)
            kl = np.exp(ref - new) - (ref - new) - 1
            total += (min(rho * advantage, bounded * advantage) - beta * kl) / length
            clipped += (bounded * advantage < rho * advantage) / length
    return -total, clipped


@partial(jax.jit, static_argnames="beta")
def gradient(inputs: LossInputs, beta: float = BETA) -> jax.Array:
    """Of the loss, with respect to the log-probabilities."""
    return jax.grad(lambda new: grpo_loss(dataclasses.replace(inputs, logprobs_BC=new), EPSILON, beta)[0])(
        inputs.logprobs_BC
    )


def test_the_loss_is_the_equation_of_the_paper(inputs):
    got, stats = grpo_loss(inputs, EPSILON, BETA)
    want, clipped = by_hand(inputs, EPSILON, BETA)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(stats.loss, want, rtol=1e-5)
    np.testing.assert_allclose(stats.clip_fraction, clipped, rtol=1e-6)
    assert 0 < clipped < 3, "the test has clipped tokens and others"


@pytest.mark.parametrize("trash", [-300.0, 0.0])
def test_what_lies_under_the_mask_changes_nothing(inputs, trash):
    dirty = dataclasses.replace(
        inputs,
        logprobs_BC=jnp.where(inputs.mask_BC, inputs.logprobs_BC, trash),
        old_logprobs_BC=jnp.where(inputs.mask_BC, inputs.old_logprobs_BC, 0.0),
        reference_logprobs_BC=jnp.where(inputs.mask_BC, inputs.reference_logprobs_BC, -5.0),
        entropy_BC=jnp.where(inputs.mask_BC, inputs.entropy_BC, 9.0),
    )
    (clean_loss, clean), (dirty_loss, dirtied) = (grpo_loss(x, EPSILON, BETA) for x in (inputs, dirty))
    np.testing.assert_array_equal(dirty_loss, clean_loss)
    jax.tree.map(np.testing.assert_array_equal, dirtied, clean)
    np.testing.assert_array_equal(gradient(dirty), gradient(inputs))
    assert (np.asarray(gradient(dirty))[~np.asarray(inputs.mask_BC)] == 0).all()


def test_a_clipped_token_gets_no_gradient_and_others_that_of_the_ratio(inputs):
    ratio = np.exp(np.asarray(inputs.logprobs_BC - inputs.old_logprobs_BC))
    advantage = np.asarray(inputs.advantages_B)[:, None]
    clipped = np.where(advantage > 0, ratio > 1 + EPSILON, ratio < 1 - EPSILON)
    share = np.asarray(inputs.mask_BC) / np.array(LENGTHS)[:, None]
    np.testing.assert_allclose(gradient(inputs, beta=0.0), np.where(clipped, 0.0, -ratio * advantage * share), rtol=1e-5)


def test_every_sequence_weighs_the_same_whatever_its_length():
    ones = jnp.ones((2, 4))
    mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]], bool)
    inputs = LossInputs(-ones, -ones, None, ones, mask, jnp.array([1.0, 1.0]))
    per_sequence = gradient(inputs).sum(axis=1)
    np.testing.assert_allclose(per_sequence, [-1, -1], rtol=1e-6)


def test_the_kl_term_pulls_back_to_the_reference():
    """A token likelier than under the reference is made less likely by descent, and the other way round."""
    new = jnp.array([[-1.0, -1.0]])
    inputs = LossInputs(new, new, jnp.array([[-2.0, -0.5]]), new, jnp.ones((1, 2), bool), jnp.zeros(1))
    down, up = gradient(inputs)[0]
    assert down > 0 > up
    assert (gradient(dataclasses.replace(inputs, reference_logprobs_BC=new)) == 0).all()


def test_without_a_reference_there_is_no_kl(inputs):
    bare = dataclasses.replace(inputs, reference_logprobs_BC=None)
    loss, stats = grpo_loss(bare, EPSILON, 0.0)
    np.testing.assert_allclose(loss, grpo_loss(inputs, EPSILON, 0.0)[0], rtol=1e-6)
    assert stats.kl == 0


def test_demonstrations_with_advantage_one_give_cross_entropy(inputs):
    shown = dataclasses.replace(inputs, old_logprobs_BC=None, reference_logprobs_BC=None, advantages_B=jnp.ones(3))
    loss, stats = grpo_loss(shown, EPSILON, 0.0)
    want = -sum(np.asarray(inputs.logprobs_BC)[b, :length].mean() for b, length in enumerate(LENGTHS))
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert stats.clip_fraction == stats.mismatch_kl == 0
    share = np.asarray(inputs.mask_BC) / np.array(LENGTHS)[:, None]
    np.testing.assert_allclose(gradient(shown, 0.0), -share, rtol=1e-6)


def test_mismatch_is_zero_for_the_sampled_policy_and_positive_beside_it(inputs):
    same = dataclasses.replace(inputs, old_logprobs_BC=inputs.logprobs_BC)
    assert grpo_loss(same, EPSILON, BETA)[1].mismatch_kl == 0
    assert grpo_loss(inputs, EPSILON, BETA)[1].mismatch_kl > 0


def test_mismatch_is_the_divergence_of_the_sampler_from_the_trainer(inputs):
    """The sampler draws its two tokens as often as it should, three times and once; the trainer has them equally likely."""
    drawn = jnp.log(jnp.array([0.75, 0.75, 0.75, 0.25, 1.0]))
    shared = dataclasses.replace(inputs, old_logprobs_BC=inputs.logprobs_BC.at[0].set(drawn))
    stats = grpo_loss(dataclasses.replace(shared, logprobs_BC=inputs.logprobs_BC.at[0].set(jnp.log(0.5))), EPSILON, BETA)[1]
    np.testing.assert_allclose(stats.mismatch_kl, 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5), rtol=1e-5)


def test_k3_estimates_the_kl_divergence_without_bias():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    expected = (p * np.asarray(k3(jnp.log(q / p)))).sum()
    np.testing.assert_allclose(expected, (p * np.log(p / q)).sum(), rtol=1e-5)
    assert (k3(jnp.linspace(-5, 5, 101)) >= 0).all()


def test_a_sequence_without_tokens_counts_zero():
    values = jnp.array([[2.0, 4.0], [5.0, 6.0]])
    np.testing.assert_array_equal(sequence_means(values, jnp.array([[1, 1], [0, 0]], bool)), [3, 0])


@pytest.fixture
def states():
    """Hidden states of 3 x 5 tokens and the embeddings of a vocabulary of 11."""
    rng = np.random.default_rng(0)
    hidden_BCD, embed_VD = (rng.normal(size=shape).astype(np.float32) for shape in ((3, 5, 4), (11, 4)))
    return jnp.asarray(hidden_BCD), jnp.asarray(rng.integers(0, 11, (3, 5))), jnp.asarray(embed_VD)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.2])
def test_token_logprobs_and_entropy_are_those_of_log_softmax(states, temperature):
    got, entropy = token_logprobs(*states, temperature)
    want, want_entropy = log_softmax(*states, temperature)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, want_entropy, rtol=1e-5, atol=1e-5)


def test_a_token_beyond_all_measure_unlikely_counts_as_just_that_and_has_a_finite_gradient(states):
    hidden_BCD, tokens_BC, embed_VD = states
    got, entropy = token_logprobs(hidden_BCD, tokens_BC, embed_VD, 0.005)
    want, want_entropy = log_softmax(hidden_BCD, tokens_BC, embed_VD, 0.005)
    limit = loss_module.GREATEST_LOG_ODDS
    within = want > -limit
    assert want.min() < -100
    assert 0 < within.sum() < within.size
    np.testing.assert_allclose(got[within], want[within], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(entropy[within], want_entropy[within], rtol=1e-4, atol=1e-4)
    assert (got[~within] <= -limit).all()
    assert (got[~within] >= -limit - np.log(11)).all()
    gradient = jax.grad(lambda h: token_logprobs(h, tokens_BC, embed_VD, 0.005)[0].sum())(hidden_BCD)
    assert np.isfinite(gradient).all()
    assert (np.abs(gradient).max(axis=-1)[~within] > 0).all(), "it is still made more likely"


def log_softmax(hidden_BCD, tokens_BC, embed_VD, temperature):
    """Log-probabilities of the tokens and entropies, in float64."""
    logits = np.asarray(hidden_BCD, np.float64) @ np.asarray(embed_VD, np.float64).T / temperature
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    own = np.take_along_axis(logprobs, np.asarray(tokens_BC)[..., None], -1)[..., 0]
    return own, -(np.exp(logprobs) * logprobs).sum(-1)


@pytest.mark.parametrize("rows", [1, 4, 15])
def test_values_and_gradients_in_chunks_are_those_of_automatic_differentiation(states, rows, monkeypatch):
    """By the hidden states and by the embedding; 4 rows do not divide 15."""
    hidden_BCD, tokens_BC, embed_VD = states
    weight_BC = np.arange(15.0).reshape(3, 5)

    def plain(hidden_BCD, embed_VD):
        logprobs_BCV = jax.nn.log_softmax(hidden_BCD @ embed_VD.T / 0.8)
        return (jnp.take_along_axis(logprobs_BCV, tokens_BC[..., None], axis=-1)[..., 0] * weight_BC).sum()

    def chunked(hidden_BCD, embed_VD):
        logprobs_BC, entropy_BC = token_logprobs(hidden_BCD, tokens_BC, embed_VD, 0.8)
        return (logprobs_BC * weight_BC).sum() + (entropy_BC - jax.lax.stop_gradient(entropy_BC)).sum()

    monkeypatch.setattr(loss_module, "LOGITS_BUDGET", rows * 11)
    want, got = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden_BCD, embed_VD) for f in (plain, chunked))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_entropy_is_a_measurement_and_carries_no_gradient(states):
    hidden_BCD, tokens_BC, embed_VD = states
    grads = jax.grad(lambda h: token_logprobs(h, tokens_BC, embed_VD, 1.0)[1].sum())(hidden_BCD)
    assert (grads == 0).all()


def test_no_array_holds_the_logits_of_all_tokens(states, monkeypatch):
    """In the backward pass too: never [tokens, vocabulary]."""
    hidden_BCD, tokens_BC, embed_VD = states
    monkeypatch.setattr(loss_module, "LOGITS_BUDGET", 2 * 11)
    program = jax.make_jaxpr(jax.grad(lambda h: token_logprobs(h, tokens_BC, embed_VD, 1.0)[0].sum()))(hidden_BCD)
    assert max(_logit_rows(program.jaxpr)) == 2


def test_a_frozen_embedding_costs_no_gradient_of_its_own(states, monkeypatch):
    """The backward pass of a policy with adapters makes no logits: only the chunks of the forward pass are products."""
    hidden_BCD, tokens_BC, embed_VD = states
    monkeypatch.setattr(loss_module, "LOGITS_BUDGET", 2 * 11)

    def loops(arguments) -> int:
        gradient = jax.grad(lambda h, e: token_logprobs(h, tokens_BC, e, 1.0)[0].sum(), arguments)
        return jax.jit(gradient).lower(hidden_BCD, embed_VD).compile().as_text().count(" while(")

    assert loops((0, 1)) == loops(0) + 1 == 2


def _logit_rows(jaxpr) -> list[int]:
    """How many rows of logits each array in a program holds."""
    sizes = [v.aval.size // 11 for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.shape[-1:] == (11,)]
    for eqn in jaxpr.eqns:
        for part in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(part, "jaxpr", part)
            sizes += _logit_rows(inner) if hasattr(inner, "eqns") else []
    return sizes
