"""Two sets of answers to the same problems: how much better one is, how sure that is, and whether chance could do it.

Asking both the same problems takes out what is hard or easy for both, which is most of the noise of two separate shares.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from agent_tunix.training.intervals import Z95

DRAWS = 20_000  # of signs, where there are too many ways to list
MCNEMAR, SIGNS = "exact McNemar test", "sign-flip test over the problems"


@dataclasses.dataclass(frozen=True)
class Paired:
    """`difference` is B's share less A's; `only_a` and `only_b` count the problems that one solves more often."""

    n: int
    a: float
    b: float
    only_a: int
    only_b: int
    difference: float
    low: float
    high: float
    p: float
    test: str


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Of the share of right completions that each has of each problem, which is 0 or 1 where one was drawn.

    The test asks how often a difference so large comes about if the two are equally good, so that each problem might as well
    have gone the other way. Where one completion was drawn, only problems count that one solves and the other does not, and
    the odds are known without drawing: this is McNemar's exact test, which needs no large numbers. Where several were, signs
    are drawn.

    The interval is that of Agresti and Min (2005, doi:10.1002/sim.1781): as if each of the four ways in which a problem can
    go had come half a time more often, so that it is not without width where all problems go alike.
    """
    d = np.subtract(b, a, dtype=float)
    n, single = len(d), bool(np.isin(d, (-1, 0, 1)).all())
    only_a, only_b = int((d < 0).sum()), int((d > 0).sum())
    middle = d.sum() / (n + 2)
    half = Z95 * math.sqrt(max(0.0, (d @ d + 1) / (n + 2) - middle**2) / (n + 2))
    p = mcnemar(only_a, only_b) if single else _by_signs(d)
    ends = max(-1.0, middle - half), min(1.0, middle + half)
    return Paired(
        n, float(np.mean(a)), float(np.mean(b)), only_a, only_b, float(d.mean()), *ends, p, (SIGNS, MCNEMAR)[single]
    )


def mcnemar(only_a: int, only_b: int) -> float:
    """How often fair coins, one for each problem that one solves and the other does not, fall as unevenly, either way."""
    n = only_a + only_b
    tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / 2**n)


def _by_signs(d: np.ndarray) -> float:
    moved = d[d != 0]
    rng, seen = np.random.default_rng(0), abs(moved.sum())
    as_large = 0
    for _ in range(20):  # a part at a time, as there may be thousands of problems
        signs = 2 * rng.integers(0, 2, (DRAWS // 20, len(moved)), dtype=np.int8) - 1
        as_large += int((np.abs(signs @ moved) >= seen - 1e-9).sum())
    return (as_large + 1) / (DRAWS + 1)
