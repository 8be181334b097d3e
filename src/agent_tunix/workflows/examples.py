"""The examples that a configuration names, read and cut into tokens."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

from agent_tunix.config.schema import Config, DataSection
from agent_tunix.engine import processes
from agent_tunix.errors import UserError
from agent_tunix.models.tokenizer import Tokenizer
from agent_tunix.tasks.datasets import Example, arithmetic_rows, tokenize
from agent_tunix.tasks.tables import Row, RowFormat, read_rows

Notice = Callable[[str], None]
ROWS_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples to train on and to validate with; `prompt_width` fits every prompt: nothing is ever recompiled for one."""

    train: list[Example]
    validation: list[Example]
    prompt_width: int


def load_task(cfg: Config, tokenizer: Tokenizer, notice: Notice) -> Task:
    said: list[str] = []

    def once(text: str) -> None:
        """Both splits may be cut from the same rows, and say the same of them."""
        if text not in said:
            said.append(text)
            notice(text)

    train = load_examples(cfg, "train", cfg.data.num_examples, tokenizer, once)
    validation = load_examples(cfg, "validation", cfg.evaluation.num_examples, tokenizer, once)
    return Task(train, validation, prompt_width([*train, *validation]))


def prompt_width(examples: Sequence[Example]) -> int:
    """The longest prompt, rounded up to a multiple of 4."""
    return -(-max(len(example.prompt_ids) for example in examples) // 4) * 4


def load_examples(cfg: Config, split: str, limit: int | None, tokenizer: Tokenizer, notice: Notice) -> list[Example]:
    """The examples of a split whose prompts are short enough; says what was left out."""
    rows = load_rows(cfg, split, limit, notice)[:limit]
    _check_vocabulary(rows, cfg.data, tokenizer)
    longest = cfg.generation.max_prompt_length
    examples, dropped = tokenize(rows, tokenizer.encode_all, tokenizer.begin_id, cfg.data.system_prompt, longest)
    if dropped:
        notice(f"{dropped} of {len(rows)} {split} prompts exceed generation.max_prompt_length={longest} and are left out.")
    if not examples:
        place = f"data.source={cfg.data.source}" if cfg.data.path is None else f"data.path={cfg.data.path}"
        long = f"all {dropped} prompts exceed generation.max_prompt_length={longest}; raise it"
        raise UserError(f"The {split} split of {place} has no example: {long if dropped else 'give more data'}.")
    processes.refuse_differences(lambda: {f"the rows of their {split} split": zlib.crc32(repr(examples).encode())})
    return examples


def load_rows(cfg: Config, split: str, limit: int | None, notice: Notice) -> list[Row]:
    data, fraction = cfg.data, cfg.training.train_fraction
    if data.source == "arithmetic":
        if limit is None:
            raise UserError("data.num_examples=null: generated data needs a number of examples.")
        count = round(limit * fraction) if split == "train" else limit
        return arithmetic_rows(split, count, cfg.seed)
    if data.path is None:
        raise UserError("data.path=null: give the file, folder or hub repository that holds the data.")
    fmt = RowFormat(data.question_field, data.answer_field, data.answer_pattern, data.on_bad_row == "skip")
    rows, bad = read_rows(data.path, data.subset, split, fraction, fmt)
    if bad:
        named = "; ".join(bad[:ROWS_NAMED]) + (" ..." if len(bad) > ROWS_NAMED else "")
        notice(f"{len(bad)} malformed rows of {data.path} are left out ({named}).")
    if not rows and split != "train":
        raise UserError(
            f"training.train_fraction={fraction:g} leaves no example of {data.path} to validate with; "
            "give more rows, or lower it."
        )
    return rows


def _check_vocabulary(rows: Sequence[Row], data: DataSection, tokenizer: Tokenizer) -> None:
    for row in rows[:20]:
        if tokenizer.unknown_id in tokenizer.encode(row.question):
            raise UserError(
                f"The model's tokenizer does not know all words of the data, for example of {row.question!r}.\n"
                "gemma3_tiny reads generated arithmetic only (data=arithmetic); for other data choose a real model."
            )
    if tokenizer.unknown_id in tokenizer.encode(data.system_prompt):
        raise UserError(
            f"The model's tokenizer does not know all words of data.system_prompt={data.system_prompt!r}.\n"
            "gemma3_tiny knows those of generated arithmetic only; for other prompts choose a real model."
        )
