"""Log-probabilities of tokens and the entropy of their distributions, without ever holding all logits."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from agent_tunix.kernels import matmul
from agent_tunix.models.sharding import EVERYWHERE, cut, several_devices

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
        total_n, entropy_n = _rounded_odds(hidden_nD, tokens_n, sharpness_n, embed_VD, kept=False)
        return -jnp.log(total_n), entropy_n

    if _kernel_serves(hidden_ND, embed_VD):
        rows *= UNWRITTEN
    return _by_chunks(score, rows, hidden_ND, tokens_N, sharpness_N)


def _scores_forward(hidden_ND, tokens_N, sharpness_N, embed_VD, rows: int):
    def score(hidden_nD, tokens_n, sharpness_n):
        total_n, entropy_n, odds_nV = _rounded_odds(hidden_nD, tokens_n, sharpness_n, embed_VD, kept=True)
        expected_nD = _weighted(odds_nV, embed_VD) / total_n[:, None]
        return -jnp.log(total_n), entropy_n, cut(expected_nD, "fsdp")

    if _kernel_serves(hidden_ND, embed_VD):
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
        odds_nV, total_n, _ = _odds(hidden_nD, tokens_n, sharpness_n, embed_VD)
        departure_nV = scale_n[:, None] * (jax.nn.one_hot(tokens_n, embed_VD.shape[0]) - odds_nV / total_n[:, None])
        return total_VD + jnp.einsum("nv,nd->vd", departure_nV, hidden_nD.astype(jnp.float32)), None

    zeros_VD = jnp.zeros(embed_VD.shape, jnp.float32)
    embed_gradient_VD, _ = jax.lax.scan(add, zeros_VD, _chunks(rows, hidden_ND, tokens_N, sharpness_N, scale_N))
    return hidden_gradient_ND.astype(hidden_ND.dtype), None, None, embed_gradient_VD.astype(embed_VD.dtype)


_scores.defvjp(_scores_forward, _scores_backward)


def _odds(hidden_nD, tokens_n, sharpness_n, embed_VD) -> tuple[jax.Array, jax.Array, jax.Array]:
    """p_v / p_o of all v, where o is the row's own token; their sum, which is 1 / p_o; and the entropy of p.

    A softmax usually subtracts the greatest logit, so that no exponential is infinite; to find it, a GPU reads all logits
    once more. Subtracting the token's own logit serves as well: a token that was drawn, or is to be learnt, is hardly ever
    that much less likely than another. Where it is, log odds are capped at `GREATEST_LOG_ODDS`.

    On a mesh every device has the logits of all rows for its part of the vocabulary.
    """
    logits_nV = jnp.einsum("nd,vd->nv", cut(hidden_nD), embed_VD, preferred_element_type=jnp.float32)
    logits_nV = cut(logits_nV, None, EVERYWHERE) * sharpness_n[:, None]
    own_n1 = jnp.take_along_axis(logits_nV, tokens_n[:, None], axis=-1)
    log_odds_nV = jnp.minimum(logits_nV - own_n1, GREATEST_LOG_ODDS)
    odds_nV = jnp.exp(log_odds_nV)
    total_n = odds_nV.sum(axis=-1)
    return odds_nV, total_n, jnp.log(total_n) - (odds_nV * log_odds_nV).sum(axis=-1) / total_n


def _rounded_odds(hidden_nD, tokens_n, sharpness_n, embed_VD, kept: bool) -> tuple[jax.Array, ...]:
    """The sum and the entropy of `_odds`; with `kept`, also the odds themselves, rounded to the embedding's precision."""
    if not _kernel_serves(hidden_nD, embed_VD):
        odds_nV, *of_rows = _odds(hidden_nD, tokens_n, sharpness_n, embed_VD)
        return (*of_rows, odds_nV.astype(embed_VD.dtype)) if kept else tuple(of_rows)
    from agent_tunix.kernels import vocabulary_odds  # here, as importing Mosaic takes a while and few machines need it

    own_n = sharpness_n * jnp.einsum("nd,nd->n", hidden_nD, embed_VD[tokens_n], preferred_element_type=jnp.float32)
    found = vocabulary_odds.odds(hidden_nD, embed_VD, own_n, sharpness_n, most=GREATEST_LOG_ODDS, kept=kept)
    total_n, weighted_n, *kept_nV = found
    return total_n, jnp.log(total_n) - weighted_n / total_n, *kept_nV


def kernel_is_known() -> bool:
    """Whether GPU and JAX are such that one kernel can make logits and odds."""
    return matmul.capability() == matmul.HOPPER and jax.__version_info__ >= OLDEST_JAX


def _kernel_serves(hidden_nD: jax.Array, embed_VD: jax.Array) -> bool:
    """Whether it makes these: on one GPU, in bfloat16, for shapes that its copy unit takes."""
    if several_devices() or not kernel_is_known():
        return False
    (V, D), bfloat16 = embed_VD.shape, jnp.dtype(jnp.bfloat16)
    return hidden_nD.dtype == embed_VD.dtype == bfloat16 and D % 64 == 0 and V % 8 == 0


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
