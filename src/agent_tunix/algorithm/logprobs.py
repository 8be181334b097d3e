"""Log-probabilities of tokens and the entropy of their distributions, without ever holding all logits."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from agent_tunix.kernels import vocabulary_odds
from agent_tunix.kernels.mesh import cut, several_devices

LOGITS_BUDGET = 2**28  # float32 logits alive at once while log-probabilities are taken: 1 GiB
GREATEST_LOG_ODDS = 60.0  # far above what sampling yields; a vocabulary of e^60 still sums to a finite float32
UNWRITTEN = 16  # times as many rows make a chunk where the kernel writes sums only, no logits
FEWEST_CHUNKS = 16  # of many rows where it writes odds too, lest these be what takes most memory
TILE = 128  # rows that it makes odds of at a time
OLDEST_JAX = (0, 11)  # with which the kernel has run, on a GPU or interpreted
SHARES = 8  # into which the sum over the vocabulary is split


def token_logprobs(hidden_BCD, tokens_BC, embed_VD, temperature) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token and the entropy of its distribution, at one temperature for all rows or one for each.

    The vocabulary is large, so logits z = E h / T are made for a few tokens at a time: n of the N = B C there are. The
    gradient of log p(o) is (E_o - sum_v p_v E_v) / T. Its sum is taken while the logits are there, so the backward pass
    makes none, unless the embedding E is trained too. Entropy is a measurement and carries no gradient.
    """
    B, C, D = hidden_BCD.shape
    rows = max(1, LOGITS_BUDGET // embed_VD.shape[0])
    sharpness_BC = jnp.broadcast_to((1.0 / jnp.asarray(temperature, jnp.float32)).reshape(-1, 1), (B, C))
    tokens_N, sharpness_N = tokens_BC.reshape(-1), sharpness_BC.reshape(-1)
    logprobs, entropy = _scores(hidden_BCD.reshape(B * C, D), tokens_N, sharpness_N, embed_VD, rows)
    return logprobs.reshape(B, C), entropy.reshape(B, C)


def odds_rows(N: int, V: int) -> int:
    """Of N rows, how many have their odds written by the kernel at a time."""
    return min(max(1, LOGITS_BUDGET // V), -(-N // (FEWEST_CHUNKS * TILE)) * TILE)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _scores(hidden_ND, tokens_N, sharpness_N, embed_VD, rows: int) -> tuple[jax.Array, jax.Array]:
    def score(hidden_nD, tokens_n, sharpness_n):
        total_n, entropy_n = vocabulary_odds.sums(hidden_nD, tokens_n, sharpness_n, embed_VD, kept=False)
        return -jnp.log(total_n), entropy_n

    if vocabulary_odds.kernel_serves(hidden_ND, embed_VD):
        rows *= UNWRITTEN
    return _by_chunks(score, rows, hidden_ND, tokens_N, sharpness_N)


def _scores_forward(hidden_ND, tokens_N, sharpness_N, embed_VD, rows: int):
    def score(hidden_nD, tokens_n, sharpness_n):
        total_n, entropy_n, odds_nV = vocabulary_odds.sums(hidden_nD, tokens_n, sharpness_n, embed_VD, kept=True)
        expected_nD = _weighted(odds_nV, embed_VD) / total_n[:, None]
        return -jnp.log(total_n), entropy_n, cut(expected_nD, "fsdp")

    if vocabulary_odds.kernel_serves(hidden_ND, embed_VD):
        rows = odds_rows(len(hidden_ND), len(embed_VD))
    logprobs_N, entropy_N, expected_ND = _by_chunks(score, rows, hidden_ND, tokens_N, sharpness_N)
    return (logprobs_N, entropy_N), (hidden_ND, tokens_N, sharpness_N, embed_VD, expected_ND)


def _scores_backward(rows: int, saved, cotangents):
    """Where the embedding is frozen its gradient is dead code, which the compiler drops."""
    hidden_ND, tokens_N, sharpness_N, embed_VD, expected_ND = saved
    scale_N = cotangents[0] * sharpness_N
    hidden_gradient_ND = scale_N[:, None] * (embed_VD[tokens_N] - expected_ND)

    def add(total_VD, part):
        hidden_nD, tokens_n, sharpness_n, scale_n = part
        odds_nV, total_n, _ = vocabulary_odds.odds(hidden_nD, tokens_n, sharpness_n, embed_VD)
        departure_nV = scale_n[:, None] * (jax.nn.one_hot(tokens_n, embed_VD.shape[0]) - odds_nV / total_n[:, None])
        return total_VD + jnp.einsum("nv,nd->vd", departure_nV, hidden_nD.astype(jnp.float32)), None

    zeros_VD = jnp.zeros(embed_VD.shape, jnp.float32)
    embed_gradient_VD, _ = jax.lax.scan(add, zeros_VD, _chunks(rows, hidden_ND, tokens_N, sharpness_N, scale_N))
    return hidden_gradient_ND.astype(hidden_ND.dtype), None, None, embed_gradient_VD.astype(embed_VD.dtype)


_scores.defvjp(_scores_forward, _scores_backward)


def _weighted(odds_nV: jax.Array, embed_VD: jax.Array) -> jax.Array:
    """sum_v odds_v E_v in float32. The sum is long and its result small, so it is split to keep a whole GPU busy."""
    (n, V), D = odds_nV.shape, embed_VD.shape[1]
    shares = math.gcd(V, SHARES)
    if several_devices() or shares == 1:
        return jnp.matmul(odds_nV, embed_VD, preferred_element_type=jnp.float32)
    of_shares = jnp.einsum(
        "nzv,zvd->znd",
        odds_nV.reshape(n, shares, -1),
        embed_VD.reshape(shares, -1, D),
        preferred_element_type=jnp.float32,
    )
    return of_shares.sum(axis=0)


def _chunks(rows: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Leading axes cut into equal chunks of at most `rows` rows, the last padded with zeros."""
    total = arrays[0].shape[0]
    count = -(-total // rows)
    rows = -(-total // count)
    filled = [jnp.pad(x, [(0, count * rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)]) for x in arrays]
    return tuple(cut(x.reshape(count, rows, *x.shape[1:]), None, "fsdp") for x in filled)


def _by_chunks(function, rows: int, *arrays: jax.Array):
    """A function of rows, applied to at most `rows` of them at a time."""
    total = arrays[0].shape[0]
    if rows >= total:
        return function(*arrays)
    results = jax.lax.map(lambda part: function(*part), _chunks(rows, *arrays))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:total], results)
