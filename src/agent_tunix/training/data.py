"""The examples that a configuration names, read and tokenized."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import GENERATED, Config, DataSection, data_of_set
from agent_tunix.engine import distributed
from agent_tunix.environments import reasoning_gym
from agent_tunix.environments.arithmetic import how_many
from agent_tunix.environments.stream import Example, arithmetic_rows, tokenize
from agent_tunix.environments.tables import Row, RowFormat, held_out_apart, read_rows
from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.chat import demonstration
from agent_tunix.models.tokenizer import Tokenizer

Notice = Callable[[str], None]
ROWS_NAMED = 3  # of those that are malformed
LONGEST_NAMED = 200  # characters of a text in a message
LONGEST_SPELT = 20_000  # characters of a text that is looked at for words that a tokenizer does not know
ROWS_SPELT = 20  # to see whether a tokenizer knows the data's words; it is meant for them or it is not


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples to train on and to validate with; `prompt_width` fits every prompt: nothing is ever recompiled for one."""

    train: list[Example]
    validation: list[Example]
    prompt_width: int
    sets: dict[str, list[Example]] = dataclasses.field(default_factory=dict)  # to test with besides, of any width

    def all(self) -> list[Example]:
        return [*self.train, *self.validation, *itertools.chain.from_iterable(self.sets.values())]

    def width_of(self, name: str) -> int:
        """That of the prompts of a further test set: the task's own where it is enough, so that its program serves."""
        return max(self.prompt_width, prompt_width(self.sets[name], self.prompt_width))


def load_task(cfg: Config, tokenizer: Tokenizer, notice: Notice) -> Task:
    rows = load_splits(cfg, notice, lambda rows: _check_vocabulary(rows, cfg.data, tokenizer))
    _say_if_plain(tokenizer, notice)
    train, validation = (_examples(cfg, split, rows[split], tokenizer, notice) for split in ("train", "validation"))
    sets = load_sets(cfg, rows["train"], tokenizer, notice)
    return Task(train, validation, prompt_width([*train, *validation], cfg.generation.max_prompt_length), sets)


def load_sets(cfg: Config, train: Sequence[Row], tokenizer: Tokenizer, notice: Notice) -> dict[str, list[Example]]:
    """The further test sets of a run, by name; warns of questions that it is trained on."""
    found: dict[str, list[Example]] = {}
    trained_on = {row.question for row in train} | (_trained_on_before(cfg) if cfg.evaluation.sets else set())
    for name in cfg.evaluation.sets:
        found[name] = load_set(cfg, name, tokenizer, partial(of_set, notice, name))
        if again := sum(example.question in trained_on for example in found[name]):
            notice(f"warning: {again} of {len(found[name])} questions of evaluation.sets.{name} are trained on.")
    return found


def load_set(cfg: Config, name: str, tokenizer: Tokenizer, notice: Notice) -> list[Example]:
    """One of the further test sets."""
    read = reading_other(cfg, DataSection(**data_of_set(cfg.data.model_dump(), cfg.evaluation.sets[name])))
    try:
        rows = load_rows(read, "test", cfg.evaluation.num_examples, notice)
        _check_vocabulary(rows, read.data, tokenizer)
        return _examples(read, "test", rows, tokenizer, notice)
    except UserError as fault:
        raise UserError(f"evaluation.sets.{name}: {fault}") from fault


def of_set(notice: Notice, name: str, text: str) -> None:
    """Says something of a further test set."""
    notice(f"evaluation.sets.{name}: {text}")


def reading_other(cfg: Config, data: DataSection) -> Config:
    """A run's configuration that reads another set of problems. None of them was trained on as a split of the run's own
    data, so where there is no test split, all of it is one.
    """
    read = cfg.model_copy(update={"data": data})
    if same_set(data, cfg.data):
        return read
    return read.model_copy(update={"training": read.training.model_copy(update={"train_fraction": 0.0})})


def load_splits(cfg: Config, notice: Notice, check: Callable[[list[Row]], None] = lambda rows: None) -> dict[str, list[Row]]:
    """The rows to train on and to validate with; warns of questions that are in both, and so are not held out."""
    said: list[str] = []

    def once(text: str) -> None:
        """Both splits may be cut from the same rows, and say the same of them."""
        if text not in said:
            said.append(text)
            notice(text)

    limits = {"train": cfg.data.num_examples, "validation": cfg.evaluation.num_examples}
    rows: dict[str, list[Row]] = {}
    for split, limit in limits.items():
        rows[split] = load_rows(cfg, split, limit, once)
        check(rows[split])
    if cfg.training.method == "supervised" and not any(row.worked for row in rows["train"]):
        raise UserError(
            f"training.method=supervised: no example has a worked answer in {_place(cfg.data)}. It is what stands before "
            f"data.answer_pattern={cfg.data.answer_pattern or 'null'} in data.answer_field={cfg.data.answer_field}."
        )
    trained_on, before = {row.question for row in rows["train"]}, _trained_on_before(cfg)
    if again := sum(row.question in trained_on for row in rows["validation"]):
        notice(
            f"warning: {again} of {len(rows['validation'])} validation questions are trained on too, and held-out accuracy "
            f"counts them; keep each question only once in {cfg.data.path}."
        )
    if again := sum(row.question in before for row in rows["validation"]):
        notice(
            f"warning: {again} of {len(rows['validation'])} validation questions are among those that "
            f"training.init_from={cfg.training.init_from} was trained on, and held-out accuracy counts them; give the data "
            "and the training.train_fraction that it had."
        )
    return rows


def prompt_width(examples: Sequence[Example], longest: int) -> int:
    """The longest prompt, or what it may have where episodes make their own, rounded up to a multiple of 4."""
    return -(-(max(len(example.prompt_ids) for example in examples) or longest) // 4) * 4


def load_examples(cfg: Config, split: str, limit: int | None, tokenizer: Tokenizer, notice: Notice) -> list[Example]:
    """The examples of a split whose prompts are short enough; says what was left out."""
    rows = load_rows(cfg, split, limit, notice)
    _check_vocabulary(rows, cfg.data, tokenizer)
    _say_if_plain(tokenizer, notice)
    return _examples(cfg, split, rows, tokenizer, notice)


def same_set(one: DataSection, other: DataSection) -> bool:
    """Whether two sections name the same problems."""

    def problems(data: DataSection) -> dict[str, object]:
        place = data.path and os.path.realpath(os.path.expanduser(data.path))
        not_of_set = {"num_examples", "on_bad_row", "system_prompt", "enable_thinking", "solve_rate", "solve_attempts"}
        return data.model_dump(exclude=not_of_set) | {"path": place}

    return problems(one) == problems(other)


def set_name(data: DataSection) -> str:
    """What a set of problems is called in records and messages."""
    if data.path is None:
        level = "" if data.level is None else f" (level {data.level})"
        return data.source if data.task is None else f"{data.source} {data.task}{level}"
    of_hub = data.subset and not os.path.exists(os.path.expanduser(data.path))
    return f"{data.path} ({data.subset})" if of_hub else data.path


def warn_of_trained_on(cfg: Config, examples: Sequence[Example], notice: Notice) -> None:
    """Warns of problems that a run, or one that it started from, was trained on; or that this cannot be found out."""
    try:
        trained_on = _trained_on(cfg)
    except UserError as fault:
        why = str(fault).splitlines()[0]
        notice(f"warning: what the run was trained on cannot be read here, so some of this may be among it ({why})")
        return
    trained_on |= _trained_on_before(cfg)
    if again := sum(example.question in trained_on for example in examples):
        notice(f"warning: {again} of {len(examples)} questions are among those that the run was trained on.")


def _trained_on(cfg: Config) -> set[str]:
    return {row.question for row in load_rows(cfg, "train", cfg.data.num_examples, lambda text: None)}


def _trained_on_before(cfg: Config) -> set[str]:
    """What the runs were trained on from which this one started, as far as it is still there."""
    found = set[str]()
    with contextlib.suppress(UserError):
        while folder := cfg.training.init_from:
            cfg = validate(read_saved(Path(folder) / "config.yaml"), Config)
            with contextlib.suppress(UserError):
                found |= _trained_on(cfg)
    return found


def _examples(cfg: Config, split: str, rows: Sequence[Row], tokenizer: Tokenizer, notice: Notice) -> list[Example]:
    if cfg.environment.is_played:  # an episode makes its own prompt
        return [Example(row.question, row.answer, (), row.worked, asked_of(row)) for row in rows]
    longest = cfg.generation.max_prompt_length
    examples, dropped = tokenize(rows, tokenizer, cfg.data.system_prompt, cfg.data.enable_thinking, longest)
    if dropped:
        notice(f"{dropped} of {len(rows)} {split} prompts exceed generation.max_prompt_length={longest} and are left out.")
    if not examples:
        raise UserError(
            f"The {split} split of {_place(cfg.data)} has no example: all {dropped} prompts exceed "
            f"generation.max_prompt_length={longest}; raise it."
        )
    distributed.refuse_differences(lambda: {f"the rows of their {split} split": zlib.crc32(repr(examples).encode())})
    return examples


def asked_of(row: Row) -> Mapping[str, Any]:
    """What an environment is given of a row: all its fields, with the question and the answer as they are read."""
    begun = {"prompt": row.messages} if row.messages else {}
    return {**row.fields, "question": row.question, "answer": row.answer, **begun}


def load_rows(cfg: Config, split: str, limit: int | None, notice: Notice) -> list[Row]:
    """At least one row of a split, and at most `limit`."""
    fraction = cfg.training.train_fraction
    rows = (_generated(cfg, split, limit) if cfg.data.source in GENERATED else _read(cfg, split, notice))[:limit]
    if not rows and split == "train":
        raise UserError(
            f"The train split of {_place(cfg.data)} has no example: give more data, or raise "
            f"training.train_fraction={fraction:g}."
        )
    if not rows and not fraction:
        raise UserError(f"{_place(cfg.data)} has no row to test with.")
    if not rows:
        raise UserError(
            f"training.train_fraction={fraction:g} leaves no example of {cfg.data.path} to validate with; "
            "give more rows, of which it takes at least two, or lower it."
        )
    return rows


def _generated(cfg: Config, split: str, limit: int | None) -> list[Row]:
    if limit is None:
        raise UserError("data.num_examples=null: generated data needs a number of examples.")
    count = round(limit * cfg.training.train_fraction) if split == "train" else limit
    if cfg.data.source == "arithmetic":
        level = cfg.data.level
        return arithmetic_rows(split, count if split == "train" else min(count, how_many(split, level)), cfg.seed, level)
    held_out = _generated(cfg, "validation", cfg.evaluation.num_examples) if split == "train" else []
    return reasoning_gym.rows(cfg.data, split, count, cfg.seed, {row.question for row in held_out})


def _read(cfg: Config, split: str, notice: Notice) -> list[Row]:
    data = cfg.data
    if data.path is None:
        raise UserError("data.path=null: give the file, folder or hub repository that holds the data.")
    skips, needed = data.on_bad_row == "skip", not cfg.environment.is_played
    fmt = RowFormat(data.question_field, data.answer_field, data.answer_pattern, skips, needed, data.keep_pattern)
    if split == "validation" and (unread := held_out_apart(data.path, fmt)):
        notice(
            f"{', '.join(unread)} of {data.path} is not read: held-out problems are cut from the train split "
            f"(training.train_fraction={cfg.training.train_fraction:g})."
        )
    rows, bad = read_rows(data.path, data.subset, split, cfg.training.train_fraction, fmt)
    if bad:
        named = "; ".join(bad[:ROWS_NAMED]) + (" ..." if len(bad) > ROWS_NAMED else "")
        notice(f"{len(bad)} malformed rows of {data.path} are left out ({named}).")
    return rows


def _place(data: DataSection) -> str:
    if data.path is not None:
        return f"data.path={data.path}"
    return f"data.source={data.source}" if data.task is None else f"data.task={data.task}"


def _say_if_plain(tokenizer: Tokenizer, notice: Notice) -> None:
    if tokenizer.chat.is_plain:
        notice(
            "The model comes without a chat template, and its vocabulary has no tokens for turns: it is asked in plain "
            "text, the system prompt, a blank line, the question. A chat_template.jinja beside its tokenizer says otherwise."
        )


def _check_vocabulary(rows: Sequence[Row], data: DataSection, tokenizer: Tokenizer) -> None:
    if tokenizer.unknown_id is None:  # as in byte-level vocabularies, which know every text
        return
    for row in rows[:ROWS_SPELT]:
        if tokenizer.unknown_id in tokenizer.encode(_beginning(row.question)):
            raise UserError(
                f"The model's tokenizer does not know all words of the data, for example of {_named(row.question)}.\n"
                "gemma3_tiny reads generated arithmetic only (data=arithmetic); for other data choose a real model."
            )
    if tokenizer.unknown_id in tokenizer.encode(_beginning(data.system_prompt)):
        raise UserError(
            f"The model's tokenizer does not know all words of data.system_prompt={_named(data.system_prompt)}.\n"
            "gemma3_tiny knows those of generated arithmetic only; for other prompts choose a real model."
        )


def _beginning(text: str) -> str:
    """The first words of a long text, as all of one that is not long."""
    return text if len(text) <= LONGEST_SPELT else text[:LONGEST_SPELT].rpartition(" ")[0]


def _named(text: str) -> str:
    return repr(text if len(text) <= LONGEST_NAMED else f"{text[:LONGEST_NAMED]} ...")


def demonstration_ids(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[int]]:
    """Worked answers in the format that the rewards look for, with the end of a turn."""
    return tokenizer.encode_all([demonstration(e.worked, e.answer) + tokenizer.ending for e in examples])


def with_demonstrations(
    examples: list[Example], tokenizer: Tokenizer, arch: Architecture, longest: int, notice: Notice
) -> list[Example]:
    """The examples that have a worked answer of at most `longest` tokens; says how many have not."""
    worked = [e for e in examples if e.worked]
    ids = demonstration_ids(worked, tokenizer)
    kept = [example for example, own in zip(worked, ids, strict=True) if len(own) <= longest]
    if not kept:
        raise UserError(
            "training.method=supervised: no example has a worked answer that fits generation.max_generation_steps="
            f"{longest}. A worked answer is what stands before data.answer_pattern in data.answer_field."
        )
    refuse_unknown_tokens(ids, arch)
    if len(kept) < len(examples):
        notice(f"{len(examples) - len(kept)} of {len(examples)} examples have no worked answer of at most {longest} tokens.")
    return kept


def refuse_unknown_tokens(sequences: Sequence[Sequence[int]], arch: Architecture) -> None:
    """Refuses tokens that the embedding has no row for, which the device would not notice."""
    if (largest := max((max(ids) for ids in sequences if ids), default=0)) >= arch.vocab_size:
        raise UserError(
            f"The tokenizer gives token {largest}, but the model knows {arch.vocab_size} tokens: it is another model's. "
            "Put the model's own tokenizer into the folder that model.weights names."
        )
