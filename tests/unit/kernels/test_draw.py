from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.kernels import draw


@dataclasses.dataclass(frozen=True)
class Cut:
    """What tokens are drawn from: the k likeliest (None: all) and the nucleus p of these, never padding."""

    k: int | None = None
    top_p: float = 1.0
    pad_id: int = 0


PLAIN = Cut()
LOGITS = jnp.asarray(np.random.default_rng(0).normal(0, 1.5, 12), jnp.float32)
by_sorting = jax.jit(draw.by_sorting, static_argnames=("k", "top_p", "pad_id"))


def with_(**changes) -> Cut:
    return dataclasses.replace(PLAIN, **changes)


def draw_each(logits_BV, uniform_B1, cut: Cut) -> jax.Array:
    return by_sorting(
        logits_BV, uniform_B1, k=min(cut.k or logits_BV.shape[1], logits_BV.shape[1]), top_p=cut.top_p, pad_id=cut.pad_id
    )


def uniform(rows: int, key: int = 0) -> jax.Array:
    return jax.random.uniform(jax.random.key(key), (rows, 1))


def frequencies(cut: Cut, logits=LOGITS, rows=20_000) -> np.ndarray:
    tokens = draw_each(jnp.broadcast_to(logits, (rows, len(logits))), uniform(rows), cut)
    return np.bincount(tokens, minlength=len(logits))


def truncated(cut: Cut, logits=LOGITS) -> np.ndarray:
    """The exact distribution: the k likeliest, then the smallest set that holds p of those."""
    scores = np.asarray(logits, np.float64)
    scores[cut.pad_id] = -np.inf
    order = np.argsort(-scores)[: cut.k]
    probs = np.exp(scores[order]) / np.exp(scores[order]).sum()
    size = int(np.searchsorted(np.cumsum(probs), cut.top_p)) + 1 if cut.top_p < 1 else len(probs)
    exact = np.zeros(len(scores))
    exact[order[:size]] = probs[:size] / probs[:size].sum()
    return exact


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k": 5},
        {"k": 1},
        {"k": 99},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"k": 6, "top_p": 0.8},
    ],
    ids=str,
)
def test_tokens_are_drawn_from_the_exact_truncated_distribution(changes):
    """Nothing outside of the set, and within it a chi-square below the 99.9 % quantile for up to 11 degrees (31.3)."""
    cut = with_(**changes)
    counts, exact = frequencies(cut), truncated(cut)
    inside = exact > 0
    assert (counts[~inside] == 0).all()
    expected = exact[inside] * counts.sum()
    assert ((counts[inside] - expected) ** 2 / expected).sum() < 31.3
    assert expected.min() > 5, "the test can tell"


@pytest.mark.parametrize("pad_id", [0, 7, 11])
@pytest.mark.parametrize("changes", [{}, {"k": 3}, {"k": 1}, {"top_p": 0.5}], ids=str)
def test_padding_is_never_drawn_even_when_its_logit_is_the_largest(pad_id, changes):
    counts = frequencies(with_(pad_id=pad_id, **changes), LOGITS.at[pad_id].set(50.0), rows=500)
    assert counts[pad_id] == 0


def test_greedy_takes_the_likeliest_token():
    logits = np.random.default_rng(1).normal(size=(50, 12)).astype(np.float32)
    want = logits[:, 1:].argmax(axis=1) + 1
    np.testing.assert_array_equal(draw_each(logits, uniform(50), with_(k=1)), want)


@pytest.mark.parametrize("temperature", [1e-12, 3e-38])
def test_a_temperature_near_zero_draws_the_likeliest_token(temperature):
    """Divided by it as they are, logits would be too large for numbers."""
    logits_BV = jnp.asarray([[50.0, 52.0, 51.0], [-52.0, -51.0, -50.0]])
    numbers_B1 = jnp.full((2, 1), temperature), jnp.full((2, 1), 0.5)
    tokens_B, logprobs_B = draw.draw_tokens(logits_BV, *numbers_B1, k=None, top_p=1.0, pad_id=9)
    assert tokens_B.tolist() == [1, 2]
    np.testing.assert_array_equal(logprobs_B, 0.0)


def test_equal_logits_with_top_p_keep_just_enough_tokens():
    counts = frequencies(with_(top_p=0.5), jnp.zeros(9), rows=2000)
    assert (counts > 0).sum() == 4


def test_rows_are_drawn_independently():
    """Two rows that saw the same noise would agree always; independent ones agree with the probability of the sum of p^2."""
    tokens = np.asarray(draw_each(jnp.broadcast_to(LOGITS, (20_000, 12)), uniform(20_000, key=1), PLAIN)).reshape(-1, 2)
    agree, expected = (tokens[:, 0] == tokens[:, 1]).mean(), (truncated(PLAIN) ** 2).sum()
    assert abs(agree - expected) < 4 * np.sqrt(expected / len(tokens))


def test_an_index_is_drawn_from_its_lower_bound_on_and_below_its_upper_one():
    """As by numpy, with numbers that are exact in binary."""
    weights, share = np.float32([1, 0, 2, 4, 1]) / 8, np.arange(8, dtype=np.float32) / 8
    drawn = draw.invert_cdf(jnp.asarray(share)[:, None], jnp.broadcast_to(weights, (8, 5)))
    assert drawn.tolist() == np.searchsorted(np.cumsum(weights), share, side="right").tolist()


def test_no_index_of_weight_zero_is_drawn_whatever_the_rounding_of_the_sum():
    """A parallel prefix sum rounds each entry in its own way, so it may rise where the weight is zero."""
    rng = np.random.default_rng(0)
    weights = np.sort(rng.dirichlet(np.full(2048, 0.3), 200).astype(np.float32))[:, ::-1].copy()
    weights[:, 1024:] = 0
    for share in (0.0, 1.0):  # the least and the greatest number a generator can give
        drawn = np.asarray(draw.invert_cdf(jnp.full((200, 1), share), jnp.asarray(weights)))
        assert (np.take_along_axis(weights, drawn[:, None], 1) > 0).all()
    holes = weights.copy()
    holes[:, ::2] = 0
    cdf = np.cumsum(holes, axis=1)
    for column in (0, 1, 100, 1022, 1023):
        share = cdf[:, column : column + 1] / cdf[:, -1:]
        drawn = np.asarray(draw.invert_cdf(jnp.asarray(share), jnp.asarray(holes)))
        assert (np.take_along_axis(holes, drawn[:, None], 1) > 0).all()
