"""What training and evaluation both start from: the device, the model and the examples that a configuration names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from agent_tunix.config.schema import Config, DataSection, ModelSection
from agent_tunix.engine.rollout import Sampling
from agent_tunix.errors import UserError
from agent_tunix.models.gemma3 import Architecture, Weights
from agent_tunix.models.lora import Adapters, init_adapters, select_modules
from agent_tunix.models.sources import find_checkpoint
from agent_tunix.models.tokenizer import Tokenizer, load_tokenizer
from agent_tunix.models.weights import load_weights, read_architecture
from agent_tunix.tasks.datasets import Example, Row, RowFormat, arithmetic_rows, file_rows, left_pad, tokenize
from agent_tunix.types import Prompts

Notice = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A base model, ready to be sampled from."""

    weights: Weights
    arch: Architecture
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Task:
    """Examples to train on and to validate with; `prompt_width` fits every prompt, so nothing is ever recompiled for one."""

    train: list[Example]
    validation: list[Example]
    prompt_width: int


def start_device() -> None:
    """Keeps compiled programs in the user's cache folder, so that only the first run of a kind compiles."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "agent-tunix" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def load_model(section: ModelSection) -> Model:
    checkpoint = find_checkpoint(section.weights)
    arch = read_architecture(checkpoint, architecture(section))
    _check_architecture(section, arch)
    tokenizer = load_tokenizer(checkpoint)
    return Model(load_weights(checkpoint, arch, jnp.dtype(section.dtype)), arch, tokenizer)


def architecture(section: ModelSection) -> Architecture:
    """The architecture that the configuration describes."""
    numbers = section.architecture.model_dump()
    scalar = numbers.pop("query_pre_attn_scalar")
    return Architecture(**numbers, query_scale=scalar**-0.5)


def _check_architecture(section: ModelSection, found: Architecture) -> None:
    described = architecture(section)
    differing = [
        f"{name}: {value} in the checkpoint, {getattr(described, name)} in the configuration"
        for name, value in dataclasses.asdict(found).items()
        if value != getattr(described, name)
    ]
    if differing:
        raise UserError(
            f"model.weights={section.weights} is not the model that model.architecture describes:\n  "
            + "\n  ".join(differing)
            + "\nChoose the model group that fits the checkpoint, as in model=gemma3_1b, or set these keys."
        )


def new_adapters(section: ModelSection, arch: Architecture, key: jax.Array) -> Adapters:
    try:
        modules = select_modules(section.lora_module_path, arch.num_layers)
    except ValueError as fault:
        raise UserError(f"model.lora_module_path={section.lora_module_path}: {fault}.") from fault
    return init_adapters(key, arch, modules, section.lora_rank, section.lora_alpha)


def load_examples(cfg: Config, split: str, limit: int | None, tokenizer: Tokenizer, notice: Notice) -> list[Example]:
    """The examples of a split whose prompts are short enough; says what was left out."""
    rows = _rows(cfg, split, limit, notice)[:limit]
    _check_vocabulary(rows, cfg.data, tokenizer)
    longest = cfg.generation.max_prompt_length
    examples, dropped = tokenize(rows, tokenizer.encode, tokenizer.begin_id, cfg.data.system_prompt, longest)
    if dropped:
        notice(f"{dropped} of {len(rows)} {split} prompts exceed generation.max_prompt_length={longest} and are left out.")
    if not examples:
        raise UserError(
            f"The {split} split has no example left; data.path={cfg.data.path}, {dropped} prompts were too long."
        )
    return examples


def _rows(cfg: Config, split: str, limit: int | None, notice: Notice) -> list[Row]:
    data, fraction = cfg.data, cfg.training.train_fraction
    if data.source == "arithmetic":
        if limit is None:
            raise UserError("data.num_examples=null: generated data needs a number of examples.")
        count = round(limit * fraction) if split == "train" else limit
        return arithmetic_rows(split, count, cfg.seed)
    if data.path is None:
        raise UserError("data.path=null: give the file or folder that holds the data.")
    fmt = RowFormat(data.question_field, data.answer_field, data.answer_pattern, data.on_bad_row == "skip")
    rows, bad = file_rows(data.path, split, fraction, fmt)
    if bad:
        notice(f"{bad} malformed rows of {data.path} are left out of the {split} split (data.on_bad_row=skip).")
    return rows


def _check_vocabulary(rows: Sequence[Row], data: DataSection, tokenizer: Tokenizer) -> None:
    for row in rows[:20]:
        if tokenizer.unknown_id in tokenizer.encode(row.question + data.system_prompt):
            raise UserError(
                f"The model's tokenizer does not know all words of the data, for example of {row.question!r}.\n"
                "gemma3_tiny reads generated arithmetic only (data=arithmetic); for other data choose a real model."
            )


def load_task(cfg: Config, tokenizer: Tokenizer, notice: Notice) -> Task:
    train = load_examples(cfg, "train", cfg.data.num_examples, tokenizer, notice)
    validation = load_examples(cfg, "validation", cfg.evaluation.num_examples, tokenizer, notice)
    return Task(train, validation, prompt_width([*train, *validation]))


def prompt_width(examples: Sequence[Example]) -> int:
    """The longest prompt, rounded up to a multiple of 4."""
    return -(-max(len(example.prompt_ids) for example in examples) // 4) * 4


def pad_prompts(examples: Sequence[Example], width: int, tokenizer: Tokenizer) -> Prompts:
    return left_pad([example.prompt_ids for example in examples], width, tokenizer.pad_id)


def training_sampling(cfg: Config, tokenizer: Tokenizer) -> Sampling:
    g = cfg.generation
    return Sampling(
        g.temperature,
        g.top_k,
        g.top_p,
        g.max_generation_steps,
        cfg.grpo.num_generations,
        tokenizer.end_ids,
        tokenizer.pad_id,
    )
