"""Examples, and the stream of batches made from them.

The stream has no state: the batch at a position follows from the seed and the position alone, so a resumed run needs
nothing but its position to see what the uninterrupted run would have seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from agent_tunix.environments import arithmetic
from agent_tunix.environments.tables import Row
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.types import Prompts

LONGEST_QUESTION = 1_000_000  # characters: it is no prompt that fits, and tokenizing it would take gigabytes


@dataclasses.dataclass(frozen=True)
class Example:
    """A question, its true answer, its prompt as tokens, a worked answer to learn from, where there is one, and its row.

    `messages` are those of a prompt that has several.
    """

    question: str
    answer: str
    prompt_ids: tuple[int, ...]
    worked: str = ""
    row: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    messages: tuple[Mapping[str, str], ...] = ()


def arithmetic_rows(split: str, count: int, seed: int, level: int | None = None) -> list[Row]:
    problems = arithmetic.generate(count, seed, split, level)
    rows = [Row(p.question, str(p.answer), f"{p.a}{p.operation}{p.b}={p.answer}") for p in problems]
    return [dataclasses.replace(row, fields={"question": row.question, "answer": row.answer}) for row in rows]


def tokenize(
    rows: Sequence[Row], tokenizer: Tokenizer, system_prompt: str, thinking: bool | None, longest: int
) -> tuple[list[Example], int]:
    """Examples whose prompts have at most `longest` tokens, and the number of those that were dropped.

    `thinking` is the chat template's switch; None leaves it to the template.
    """
    rows_read = [row for row in rows if len(row.question) <= LONGEST_QUESTION]
    chat = tokenizer.chat
    prompts = tokenizer.encode_all(
        [
            chat.asked(row.messages, system_prompt, thinking)
            if row.messages
            else chat.prompt(row.question, system_prompt, thinking)
            for row in rows_read
        ]
    )
    pairs = zip(rows_read, prompts, strict=True)
    examples = [Example(row.question, row.answer, tuple(ids), row.worked, row.fields, row.messages) for row, ids in pairs]
    kept = [example for example in examples if len(example.prompt_ids) <= longest]
    return kept, len(rows) - len(kept)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches of examples, each epoch in its own order; no example comes twice in an epoch."""

    examples: Sequence[Example]
    batch_size: int
    batches_per_epoch: int
    seed: int

    def batch(self, position: int) -> list[Example]:
        """The batch at a position, counted over all epochs."""
        return [self.examples[i] for i in self._indices(position)]

    def further(self, position: int, round: int) -> list[Example]:
        """As many others, for a batch that needs more prompts than its own; another set in every round from 1 on.

        They come from the whole data, and may be in batches of other positions; where there are too few, they come again.
        """
        own = self._indices(position)
        others = np.setdiff1d(np.arange(len(self.examples)), own)
        order = np.random.default_rng((self.seed, position, len(self.examples))).permutation(others if len(others) else own)
        return [self.examples[order[i % len(order)]] for i in range((round - 1) * self.batch_size, round * self.batch_size)]

    def _indices(self, position: int) -> np.ndarray:
        epoch, index = divmod(position, self.batches_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        return order[index * self.batch_size : (index + 1) * self.batch_size]


def batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """All examples in order; the last batch may be short."""
    for start in range(0, len(examples), size):
        yield list(examples[start : start + size])


def left_pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> Prompts:
    """Prompts of one width, on one device."""
    tokens, positions = left_padded(sequences, width, pad_id)
    return Prompts(jnp.asarray(tokens), jnp.asarray(positions))


def left_padded(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and positions of prompts of one width; padding has position -1."""
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    positions = np.full((len(sequences), width), -1, np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, width - len(ids) :] = ids
        positions[row, width - len(ids) :] = np.arange(len(ids))
    return tokens, positions


def right_pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Completions of one width and the mask of their tokens."""
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    mask = np.zeros((len(sequences), width), bool)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return tokens, mask
