"""Successive halving (Jamieson & Talwalkar, 2016, arXiv:1502.07943): all candidates start, the better half goes on.

A rung is not a shorter run but the beginning of the same one: a candidate rests when it has come so far, and goes on from
its checkpoint if it is kept. Every candidate's schedule is that of a run to the last rung, so what is compared at a rung is
the same part of the same schedule. At least two go to the end where two began: a high rate may lead early and collapse late.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

RUNGS = 3
LEAST_KEPT = 2
LEAST_BATCHES = 8  # of a run that is worth comparing


@dataclasses.dataclass(frozen=True)
class Price:
    """What an update of a candidate costs, and what each of its rungs costs besides (evaluations, a checkpoint)."""

    update: float = 1.0
    rung: float = 0.0


@dataclasses.dataclass(frozen=True)
class Bracket:
    """The size of one stage: its candidates, and how many of them an earlier stage has trained to the end already."""

    candidates: int
    trained: int = 0


def rungs(batches: int, iterations: int) -> list[int]:
    """Updates after which candidates are compared, each rung twice as far as the one before; the last is the end."""
    places = sorted({-(-batches // 2**k) for k in range(RUNGS)})
    return [place * iterations for place in places]


def kept(candidates: int, rung: int) -> int:
    """How many candidates, at most, train on the way to a rung, counted from 0."""
    for _ in range(rung):
        candidates = max(min(candidates, LEAST_KEPT), -(-candidates // 2))
    return candidates


def stage_cost(bracket: Bracket, places: Sequence[int], price: Price) -> float:
    """The most that a stage can cost."""
    fresh = bracket.candidates - bracket.trained
    ways = [place - before for before, place in zip([0, *places], places, strict=False)]
    return sum(min(fresh, kept(bracket.candidates, k)) * (way * price.update + price.rung) for k, way in enumerate(ways))


def whole_cost(brackets: Sequence[Bracket], places: Sequence[int], extra_runs: int, price: Price) -> float:
    """The most that all stages can cost, with so many whole runs for the seeds of the finalists."""
    stages = sum(stage_cost(bracket, places, price) for bracket in brackets)
    return stages + extra_runs * (places[-1] * price.update + price.rung)


def longest(budget: float, lengths: Sequence[int], cost: Callable[[int], float]) -> int | None:
    """The greatest of the lengths whose search is sure to stay within the budget; None where none does."""
    return max((length for length in lengths if cost(length) <= budget), default=None)


def lengths(per_epoch: int, epochs: int) -> list[int]:
    """The lengths, in batches, that a shortened run can have: part of the first epoch, or whole epochs."""
    possible = [*range(1, per_epoch + 1), *(per_epoch * n for n in range(2, epochs + 1))]
    return [batches for batches in possible if batches >= min(LEAST_BATCHES, possible[-1])]
