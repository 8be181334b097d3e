"""What the three kinds of cases have in common: a verdict on each."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Which of the promised outcomes it was, and what was wrong; `struck` counts the signals sent."""

    outcome: str
    faults: list[str]
    struck: int = 0
