"""Keys of the public Agent-Tunix that have another name here: each is answered by that name, with its value translated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Answer = Callable[[Any, Mapping[str, Any]], str]  # of the value, and of the configuration that it was given in
OPTIONS = {("model", "gemma3_test"): "gemma3_tiny", ("grpo", "default"): "grpo"}  # of groups
WHERE = "a run has one folder, which holds its checkpoints/ and tensorboard/"
OF_MODEL = "the model's own end tokens are used"


def answer(key: str, value: Any, container: Mapping[str, Any]) -> str | None:
    """What to say of an unknown key, by the last part of its name; None where it never was one."""
    found = ANSWERS.get(key.rpartition(".")[2])
    return f"{key}: {found(value, container)}" if found else None


def _set(*given: str, why: str = "") -> str:
    return f"is {' '.join(given)} here" + (f"; {why}" if why else "")


def _folder(value: Any, container: Mapping[str, Any]) -> str:
    """Of evaluate.py it was where checkpoints are, of training where they go."""
    folder = str(value).rstrip("/")
    if "run" in container:  # a key of what asks a run that is there
        return _set(f"run={folder.removesuffix('/checkpoints')}", why="the folder of the run that holds the checkpoints")
    return _set(f"hydra.run.dir={folder}", why=WHERE)


def _log_folder(value: Any, _: Mapping[str, Any]) -> str:
    return _set(f"hydra.run.dir={value}", why=WHERE)


def _number(container: Mapping[str, Any], section: str, key: str) -> int:
    """A number of the configuration that is at hand; 1 where it is itself at fault."""
    found = container.get(section)
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def _test_batches(value: Any, container: Mapping[str, Any]) -> str:
    size = _number(container, "evaluation", "batch_size")
    problems = value * size if isinstance(value, int) else f"<problems, of which there were {value} batches>"
    return _set(f"evaluation.num_examples={problems}", why=f"it counts problems, and evaluation.batch_size={size}")


def _accumulation(value: Any, container: Mapping[str, Any]) -> str:
    micro = _number(container, "training", "micro_batch_size")
    batch = value * micro if isinstance(value, int) else f"<{value} times {micro}>"
    return _set(f"training.batch_size={batch}", why=f"prompts an update, in parts of training.micro_batch_size={micro}")


def _reward(value: Any, _: Mapping[str, Any]) -> str:
    name = re.sub(r"\W", "_", str(value).rpartition(".")[2]) or "mine"
    if "." in str(value):
        return _set(f"+reward.functions.{name}={value}", why=f"reward.weights.{name} weighs it")
    return _set(f"+reward.functions.{name}=<module>.{value}", why="functions are named by their import paths")


def _betas(value: Any, container: Mapping[str, Any]) -> str:
    """With the other of the two, as it is given or as it was."""
    own = container.get("optimizer")
    given = own if isinstance(own, Mapping) else {}
    before = given.get("betas")
    betas = list(before) if isinstance(before, list) and len(before) == 2 else [0.9, 0.999]
    both = [given.get(name, container.get(name, beta)) for name, beta in zip(("beta1", "beta2"), betas, strict=True)]
    return _set(f"'optimizer.betas=[{both[0]},{both[1]}]'")


def _data(value: Any, _: Mapping[str, Any]) -> str:
    return gsm8k_of(value) if value in DATA else _set(f"data={value}", why="a file of conf/data")


def gsm8k_of(service: str) -> str:
    return _set("data=gsm8k", f"data.path={DATA[service]}")


def _data_folder(value: Any, _: Mapping[str, Any]) -> str:
    folder = Path(str(value)).parent if Path(str(value)).name in ("train", "test") else value
    return _set("data=jsonl", f"data.path={folder}", why="one folder holds train.* and test.* files")


def _as(key: str) -> Answer:
    return lambda value, _: _set(f"{key}={value}")


def _nothing(why: str) -> Answer:
    return lambda value, _: f"has no counterpart, so leave it out: {why}"


# Where GSM8K is; the key of the public Agent-Tunix named the service alone.
DATA = {
    "tfds": "tfds:gsm8k",
    "kaggle": "kaggle:thedevastator/grade-school-math-8k-q-a",
    "huggingface": "openai/gsm8k",
    "hub": "openai/gsm8k",
}
ANSWERS: dict[str, Answer] = {
    "checkpoint_dir": _folder,
    "ckpt_dir": _folder,
    "intermediate_checkpoint_dir": _log_folder,
    "log_dir": _log_folder,
    "num_test_batches": _test_batches,
    "eval_interval_steps": _as("training.eval_every_n_steps"),
    "gradient_accumulation_steps": _accumulation,
    "reward_function": _reward,
    "wandb_project": lambda value, _: _set(f"project_name={value}", "'training.loggers=[tensorboard,wandb]'"),
    "flush_every_n_steps": _nothing("every record is written at once"),
    "beta1": _betas,
    "beta2": _betas,
    "eos_tokens": _nothing(OF_MODEL),
    "data_source": _data,
    "train_data_dir": _data_folder,
    "test_data_dir": _data_folder,
}
