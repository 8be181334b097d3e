"""The odds of every token of the vocabulary against a row's own token, from which log-probabilities and entropies come.

On one Hopper GPU one kernel makes logits and odds (`vocabulary_odds_mosaic.py`); elsewhere they are made in plain JAX.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from agent_tunix.kernels import device
from agent_tunix.kernels.mesh import EVERYWHERE, cut, several_devices

GREATEST_LOG_ODDS = 60.0  # far above what sampling yields; a vocabulary of e^60 still sums to a finite float32
OLDEST_JAX = (0, 11)  # with which the kernel has run, on a GPU or interpreted


def sums(hidden_nD, tokens_n, sharpness_n, embed_VD, kept: bool) -> tuple[jax.Array, ...]:
    """The sum and the entropy of `odds`; with `kept`, also the odds themselves, rounded to the embedding's precision."""
    if not kernel_serves(hidden_nD, embed_VD):
        odds_nV, *of_rows = odds(hidden_nD, tokens_n, sharpness_n, embed_VD)
        return (*of_rows, odds_nV.astype(embed_VD.dtype)) if kept else tuple(of_rows)
    from agent_tunix.kernels import (
        vocabulary_odds_mosaic,  # here, as importing Mosaic takes a while and few machines need it
    )

    own_n = sharpness_n * jnp.einsum("nd,nd->n", hidden_nD, embed_VD[tokens_n], preferred_element_type=jnp.float32)
    found = vocabulary_odds_mosaic.odds(hidden_nD, embed_VD, own_n, sharpness_n, most=GREATEST_LOG_ODDS, kept=kept)
    total_n, weighted_n, *kept_nV = found
    return total_n, jnp.log(total_n) - weighted_n / total_n, *kept_nV


def odds(hidden_nD, tokens_n, sharpness_n, embed_VD) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def kernel_serves(hidden_nD: jax.Array, embed_VD: jax.Array) -> bool:
    """Whether it makes these: on one GPU, in bfloat16, for shapes that its copy unit takes."""
    if several_devices() or not kernel_is_known():
        return False
    (V, D), bfloat16 = embed_VD.shape, jnp.dtype(jnp.bfloat16)
    return hidden_nD.dtype == embed_VD.dtype == bfloat16 and D % 64 == 0 and V % 8 == 0


def kernel_is_known() -> bool:
    """Whether GPU and JAX are such that one kernel can make logits and odds."""
    return device.capability() == device.HOPPER and jax.__version_info__ >= OLDEST_JAX
