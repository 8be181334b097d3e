"""Examples, and the stream of batches made from them.

The stream has no state: the batch at a position follows from the seed and the position alone, so a resumed run needs
nothing but its position to see what the uninterrupted run would have seen.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from agent_tunix.errors import UserError
from agent_tunix.tasks import arithmetic
from agent_tunix.tasks.prompts import chat_prompt
from agent_tunix.types import Prompts

SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True)
class Row:
    """A question and its true answer."""

    question: str
    answer: str


@dataclasses.dataclass(frozen=True)
class Example:
    """A question, its true answer, and its prompt as tokens."""

    question: str
    answer: str
    prompt_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a row of a file is read; `answer_pattern`'s first group cuts the final answer out of a worked one."""

    question_field: str
    answer_field: str
    answer_pattern: str | None
    skip_bad_rows: bool


def arithmetic_rows(split: str, count: int, seed: int) -> list[Row]:
    return [Row(p.question, str(p.answer)) for p in arithmetic.generate(count, seed, split)]


def file_rows(path: str, split: str, train_fraction: float, fmt: RowFormat) -> tuple[list[Row], int]:
    """The rows of one split of a file or folder, and the number of malformed rows that were skipped.

    Validation is the end of the training file, by `train_fraction`. A single file serves training and validation,
    and its validation rows stand in for a test split.
    """
    file, whole = _split_file(Path(path).expanduser(), split)
    rows, bad = _read_jsonl(file, fmt)
    cut = round(len(rows) * train_fraction)
    if split == "train":
        return rows[:cut], bad
    return (rows if whole else rows[cut:]), bad


def _split_file(path: Path, split: str) -> tuple[Path, bool]:
    """The file that holds a split, and whether all of it belongs to the split."""
    if path.is_file():
        return path, False
    name = "test" if split == "test" else "train"
    for candidate in (path / f"{name}.jsonl", path / f"{name}.jsonl.gz"):
        if candidate.is_file():
            return candidate, split == "test"
    raise UserError(f"data.path={path}: neither a file nor a folder with {name}.jsonl or {name}.jsonl.gz in it.")


def _read_jsonl(file: Path, fmt: RowFormat) -> tuple[list[Row], int]:
    rows, bad = [], 0
    opener: Callable[..., Any] = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                rows.append(_parse_row(line.decode("utf-8"), fmt))
            except ValueError as fault:
                if not fmt.skip_bad_rows:
                    raise UserError(
                        f"{file}, line {number}: {fault}.\nMend the row, or skip such rows with data.on_bad_row=skip."
                    ) from fault
                bad += 1
    return rows, bad


def _parse_row(line: str, fmt: RowFormat) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as fault:
        raise ValueError(f"not JSON ({fault})") from fault
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for field in (fmt.question_field, fmt.answer_field):
        if row.get(field) is None or not str(row[field]).strip():
            raise ValueError(f"no field '{field}'; the row has {', '.join(row) or 'no fields'}")
    answer = str(row[fmt.answer_field]).strip()
    if fmt.answer_pattern is not None:
        match = re.search(fmt.answer_pattern, answer)
        if match is None or match.group(1) is None:
            raise ValueError(f"the answer does not fit data.answer_pattern={fmt.answer_pattern}")
        answer = match.group(1)
    return Row(str(row[fmt.question_field]).strip(), answer)


def tokenize(
    rows: Sequence[Row], encode: Callable[[str], list[int]], begin_id: int, system_prompt: str, longest: int
) -> tuple[list[Example], int]:
    """Examples whose prompts have at most `longest` tokens, and the number of those that were dropped."""
    examples = [
        Example(row.question, row.answer, (begin_id, *encode(chat_prompt(row.question, system_prompt)))) for row in rows
    ]
    kept = [example for example in examples if len(example.prompt_ids) <= longest]
    return kept, len(examples) - len(kept)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Batches of examples, each epoch in its own order; no example comes twice in an epoch."""

    examples: Sequence[Example]
    batch_size: int
    batches_per_epoch: int
    seed: int

    def batch(self, position: int) -> list[Example]:
        """The batch at a position, counted over all epochs."""
        epoch, index = divmod(position, self.batches_per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        return [self.examples[i] for i in order[index * self.batch_size : (index + 1) * self.batch_size]]


def batches(examples: Sequence[Example], size: int) -> Iterator[list[Example]]:
    """All examples in order; the last batch may be short."""
    for start in range(0, len(examples), size):
        yield list(examples[start : start + size])


def left_pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> Prompts:
    """Prompts of one width; padding has position -1."""
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    positions = np.full((len(sequences), width), -1, np.int32)
    for row, ids in enumerate(sequences):
        tokens[row, width - len(ids) :] = ids
        positions[row, width - len(ids) :] = np.arange(len(ids))
    return Prompts(jnp.asarray(tokens), jnp.asarray(positions))


def right_pad(sequences: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Completions of one width and the mask of their tokens."""
    tokens = np.full((len(sequences), width), pad_id, np.int32)
    mask = np.zeros((len(sequences), width), bool)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = True
    return tokens, mask
