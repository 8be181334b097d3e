"""Generated word problems of one addition or subtraction, in three families, for models with no data at hand.

    sum         Ann has 12 pears. Ann finds 7 more. How many pears does Ann have?            a + b
    remainder   Ann has 12 pears. Ann gives away 7. How many pears does Ann have?            a - b
    shortfall   Ann has 7 pears. Ann wants 12. How many more pears does Ann need?            a - b

Each has the greater number for a, here 12, wherever it stands. Numbers go up to 49 at level 0, from 100 to 499 at level 1.

Training, validation and test problems are split by the pair of numbers: no held-out problem is a renamed training problem.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import zlib

from agent_tunix.errors import UserError

LEVELS = (range(1, 50), range(100, 500))  # the numbers of each
NAMES = ("Ann", "Ben", "Eva", "Tom")
THINGS = ("pears", "books", "coins", "cards")
TEMPLATES = {
    "sum": "{name} has {a} {thing}. {name} finds {b} more. How many {thing} does {name} have?",
    "remainder": "{name} has {a} {thing}. {name} gives away {b}. How many {thing} does {name} have?",
    "shortfall": "{name} has {b} {thing}. {name} wants {a}. How many more {thing} does {name} need?",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A word problem over numbers a >= b."""

    family: str
    name: str
    thing: str
    a: int
    b: int

    @property
    def question(self) -> str:
        return TEMPLATES[self.family].format(name=self.name, thing=self.thing, a=self.a, b=self.b)

    @property
    def operation(self) -> str:
        """The sign of the calculation that solves the problem."""
        return "+" if self.family == "sum" else "-"

    @property
    def answer(self) -> int:
        return compute(self.a, self.operation, self.b)


def compute(a: int, operation: str, b: int) -> int:
    return a + b if operation == "+" else a - b


def split_of(a: int, b: int) -> str:
    """The split that a pair of numbers belongs to, a fixed property of the pair: 80 % train, 10 % each for the others."""
    bucket = zlib.crc32(f"{a},{b}".encode()) % 10
    return {8: "validation", 9: "test"}.get(bucket, "train")


def how_many(split: str, level: int | None = None) -> int:
    """All problems of a split ("train", "validation", "test")."""
    return len(_pairs(split, level or 0)) * len(_words())


def generate(count: int, seed: int, split: str, level: int | None = None) -> list[Problem]:
    """`count` different problems of a split, the same for the same seed. The level None is 0."""
    pairs, words, available = _pairs(split, level or 0), _words(), how_many(split, level)
    if count > available:
        raise UserError(
            f"{count} problems of arithmetic are asked for, and the {split} split has {available}: "
            f"lower {'data' if split == 'train' else 'evaluation'}.num_examples."
        )
    drawn = random.Random(f"{split}-{seed}").sample(range(available), count)
    return [Problem(*words[i % len(words)], *pairs[i // len(words)]) for i in drawn]


@functools.cache
def _pairs(split: str, level: int) -> list[tuple[int, int]]:
    if level >= len(LEVELS):
        raise UserError(f"data.level={level}: arithmetic has the levels 0 to {len(LEVELS) - 1}.")
    numbers = LEVELS[level]
    return [(a, b) for a in numbers for b in range(numbers.start, a + 1) if split_of(a, b) == split]


def _words() -> list[tuple[str, str, str]]:
    return list(itertools.product(TEMPLATES, NAMES, THINGS))
