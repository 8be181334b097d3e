"""How much better a completion did than others of its prompt. Computed on the host, while the device is busy.

GRPO's are group-relative (Shao et al., 2024, arXiv:2402.03300, section 4.1.2). The standard deviation is the sample one
(G - 1 in the denominator), as in TRL; the paper does not say which.
"""

from __future__ import annotations

import jax
import numpy as np

EPSILON = 1e-4  # keeps a group of nearly equal rewards from being blown up into noise


def _deviation(rewards: np.ndarray, axis: int | None) -> np.ndarray:
    return rewards.std(axis=axis, ddof=1, keepdims=True) + EPSILON


# What the differences within a group are divided by.
REWARD_SCALES = {
    "group": lambda rewards_PG: _deviation(rewards_PG, axis=1),
    "batch": lambda rewards_PG: _deviation(rewards_PG, axis=None),
    "none": lambda rewards_PG: 1.0,
}


def group_advantages(
    rewards_PG: np.ndarray, scale: str = "group", leave_one_out: bool = False, kept_PG: np.ndarray | None = None
) -> np.ndarray:
    """A = (r - baseline) / scale; a group of equal rewards gets exactly zero.

    The baseline is the mean of the group or, with `leave_one_out`, of the others in it, which makes the difference
    G / (G - 1) times as great (Kool et al., 2019; Ahmadian et al., 2024, arXiv:2402.14740). Those that are not kept count
    as if they were not there, and get zero.
    """
    if kept_PG is not None and not kept_PG.all():
        return _of_those_kept(rewards_PG, scale, leave_one_out, kept_PG)
    G = rewards_PG.shape[1]
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if leave_one_out:
        centred_PG = centred_PG * (G / (G - 1))
    advantages_PG = centred_PG / REWARD_SCALES[scale](rewards_PG)
    return np.where(has_spread(rewards_PG)[:, None], advantages_PG, 0.0).astype(np.float32)


def _of_those_kept(rewards_PG: np.ndarray, scale: str, leave_one_out: bool, kept_PG: np.ndarray) -> np.ndarray:
    """As `group_advantages`, for groups of different sizes; one alone has none to be compared with."""
    advantages_PG, own_scale = np.zeros(rewards_PG.shape, np.float32), "none" if scale == "batch" else scale
    for p, kept_G in enumerate(kept_PG):
        if kept_G.sum() > 1:
            advantages_PG[p, kept_G] = group_advantages(rewards_PG[p : p + 1, kept_G], own_scale, leave_one_out)
    return advantages_PG / _deviation(rewards_PG[kept_PG], axis=None) if scale == "batch" else advantages_PG


def has_spread(rewards_PG: np.ndarray) -> np.ndarray:
    """Of each group, whether its rewards differ: from one in which they do not, nothing can be learnt."""
    return np.ptp(rewards_PG, axis=1) > 0


def overlong_penalty(lengths: np.ndarray, longest: int, buffer: int) -> np.ndarray:
    """DAPO's soft penalty (Yu et al., 2025, arXiv:2503.14476, equation 13): from 0 to -1 over the last `buffer` tokens."""
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)


def shuffle_within_groups(key: jax.Array, advantages_PG: np.ndarray) -> np.ndarray:
    """The control experiment: each completion gets the advantage of a random member of its group."""
    return np.asarray(jax.random.permutation(key, advantages_PG, axis=1, independent=True))
