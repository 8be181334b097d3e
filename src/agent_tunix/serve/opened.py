"""The model that a command serves: a run's, or what a configuration's training would begin with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from agent_tunix.config.resumed import made_of
from agent_tunix.config.schema import ServedConfig
from agent_tunix.engine.engine import Inference
from agent_tunix.errors import UserError
from agent_tunix.models.lora import Policy, Trainable
from agent_tunix.training import loading
from agent_tunix.training.progress import say


@dataclasses.dataclass(frozen=True)
class Opened:
    """`system_prompt` is the system's where a chat has no message of it, `thinking` the switch of its chat template, and
    `tool_format` how it writes calls of tools: for a run, what it was trained with.
    """

    name: str
    inference: Inference
    policy: Policy
    system_prompt: str
    thinking: bool | None
    tool_format: str | None


def open_model(cfg: ServedConfig, overrides: Sequence[str], asked: Sequence[str], console: Console) -> Opened:
    """Opens what `run` or the configuration names. With a run, only the keys and sections `asked` can be given."""
    if cfg.run is None and cfg.step is not None:
        raise UserError(f"step={cfg.step}: the base model has no steps; give the folder of a run, as in run=runs/<time>.")
    for override in overrides if cfg.run else ():
        if override.lstrip("+~").partition("=")[0].split(".")[0] not in asked:
            given = ", ".join(asked)
            raise UserError(f"{override.removeprefix('++')}: a run is asked as it was trained; only {given} can be given.")
    loading.start_device(partial(say, console))
    trained = loading.described(cfg) if cfg.run is None else loading.saved_config(cfg.run, "run")
    with made_of(cfg.run):
        model = loading.load_model(trained) if cfg.run is None else loading.load_trained_model(trained, console.print)
    trainable: Trainable | None
    if cfg.run is None:
        trainable, name = loading.earlier_adapters(trained, model), trained.model.weights
    else:
        trainable, _ = loading.learnt_by(cfg.run, trained, model, cfg.step)
        name = Path(cfg.run).resolve().name
    inference, data = Inference(model), trained.data
    how = data.system_prompt, data.enable_thinking, trained.environment.tool_format
    return Opened(name, inference, inference.policy(trainable), *how)
