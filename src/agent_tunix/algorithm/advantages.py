"""Group-relative advantages (Shao et al., 2024, arXiv:2402.03300, section 4.1.2).

The standard deviation is the sample one (G - 1 in the denominator), as in TRL; the paper does not say which. Rewards are
computed on the host, and so are advantages: the device is busy meanwhile.
"""

from __future__ import annotations

import jax
import numpy as np

EPSILON = 1e-4  # keeps a group of nearly equal rewards from being blown up into noise


def group_advantages(rewards_PG: np.ndarray) -> np.ndarray:
    """A = (r - mean(r)) / (std(r) + eps) within each group; a group of equal rewards gets exactly zero."""
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    spread_PG = np.ptp(rewards_PG, axis=1, keepdims=True)
    advantages_PG = centred_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + EPSILON)
    return np.where(spread_PG > 0, advantages_PG, 0.0).astype(np.float32)


def shuffle_within_groups(key: jax.Array, advantages_PG: np.ndarray) -> np.ndarray:
    """The control experiment: each completion gets the advantage of a random member of its group."""
    return np.asarray(jax.random.permutation(key, advantages_PG, axis=1, independent=True))
