from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.algorithm import logprobs
from agent_tunix.algorithm.logprobs import token_logprobs
from agent_tunix.kernels import vocabulary_odds


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
    limit = vocabulary_odds.GREATEST_LOG_ODDS
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

    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", rows * 11)
    want, got = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden_BCD, embed_VD) for f in (plain, chunked))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


def test_entropy_is_a_measurement_and_carries_no_gradient(states):
    hidden_BCD, tokens_BC, embed_VD = states
    grads = jax.grad(lambda h: token_logprobs(h, tokens_BC, embed_VD, 1.0)[1].sum())(hidden_BCD)
    assert (grads == 0).all()


def test_no_array_holds_the_logits_of_all_tokens(states, monkeypatch):
    """In the backward pass too: never [tokens, vocabulary]."""
    hidden_BCD, tokens_BC, embed_VD = states
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", 2 * 11)
    program = jax.make_jaxpr(jax.grad(lambda h: token_logprobs(h, tokens_BC, embed_VD, 1.0)[0].sum()))(hidden_BCD)
    assert max(_logit_rows(program.jaxpr)) == 2


def test_a_frozen_embedding_costs_no_gradient_of_its_own(states, monkeypatch):
    """The backward pass of a policy with adapters makes no logits: only the chunks of the forward pass are products."""
    hidden_BCD, tokens_BC, embed_VD = states
    monkeypatch.setattr(logprobs, "LOGITS_BUDGET", 2 * 11)

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
