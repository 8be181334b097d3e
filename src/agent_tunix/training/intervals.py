"""How sure a measured share is."""

from __future__ import annotations

import math

from agent_tunix.types import Record

Z95 = 1.96  # standard errors on each side of a 95 % interval
SHARES = ("accuracy", "pass@", "episode/calling")  # how the names of shares of problems end or begin


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval: it stays within 0 and 1, and 0 of n is not taken for certain.

    It is also no narrower than it should be for a mean of n numbers between 0 and 1, as of several passes over n problems.
    """
    z2 = Z95**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n**2)) / (1 + z2 / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def interval_text(share: float, n: int) -> str:
    low, high = wilson(share, n)
    return f"{100 * low:.1f} to {100 * high:.1f}"


def is_share(name: str) -> bool:
    """Whether a number of an evaluation is a share of its problems."""
    return name.endswith(SHARES[0]) or name.startswith(SHARES[1:])


def intervals(record: Record) -> dict[str, list[float]]:
    """The 95 % interval of each share in the record of an evaluation."""
    shares = {name: value for name, value in record.items() if is_share(name) and isinstance(value, float)}
    return {name: [round(end, 4) for end in wilson(value, record["n"])] for name, value in shares.items()}
