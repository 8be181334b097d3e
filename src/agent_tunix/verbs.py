"""What `train` and `evaluate` do with a composed configuration: the command line and the Python interface both call this."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from agent_tunix.config.compose import compose_config
from agent_tunix.config.imports import Origin
from agent_tunix.config.load import C, as_given, hydra_arguments, leaves, search_path, validate
from agent_tunix.config.output_folders import relative
from agent_tunix.config.resumed import anchored, begun_or_resumed, refuse_other_folder
from agent_tunix.config.schema import Config, EvaluateConfig
from agent_tunix.console import Screen
from agent_tunix.engine import distributed, heartbeat
from agent_tunix.environments.rewards import RewardFunction
from agent_tunix.errors import UserError
from agent_tunix.lab.advice import LabAdvisor
from agent_tunix.lab.plan import plan
from agent_tunix.training import evaluation, loading, loop
from agent_tunix.types import Record


@dataclasses.dataclass(frozen=True)
class Request:
    """What Hydra has made of some overrides. `folder` is new, for what is written; `chosen` says that they have named it."""

    composed: DictConfig
    overrides: tuple[str, ...]
    folder: Path
    chosen: bool

    @classmethod
    def of_job(cls, composed: DictConfig) -> Request:
        """That of the job that Hydra's command line runs."""
        return cls._of(composed, HydraConfig.get(), HydraConfig.get().runtime.output_dir)

    @classmethod
    def of(cls, name: str, overrides: list[str]) -> Request:
        """That of the configuration `name` with overrides, without a command line."""
        composed = compose_config(name, hydra_arguments(overrides), search_path([]), hydra=True)
        request = cls._of(composed, composed.hydra, composed.hydra.run.dir)
        with open_dict(composed):
            del composed["hydra"]
        return request

    @classmethod
    def _of(cls, composed: DictConfig, hydra: Any, folder: str) -> Request:
        chosen = any(override.startswith("hydra.run.dir=") for override in hydra.overrides.hydra)
        return cls(composed, tuple(hydra.overrides.task), Path(folder), chosen)


def training_of(request: Request) -> tuple[Config, Origin]:
    """The configuration of the run that begins or goes on, and who has named the code in it."""
    cfg, origin = begun_or_resumed(request.composed, request.overrides)
    return _agreed(loading.described(cfg)), origin


def show_plan(request: Request, cfg: Config, origin: Origin, console: Screen) -> None:
    """Shows what a run would do."""
    folder = _shared(request.folder)
    if distributed.first():
        plan.run(cfg, relative(folder), console, origin)


def train(
    request: Request,
    cfg: Config,
    origin: Origin,
    console: Screen,
    reward_functions: Mapping[str, RewardFunction] | None = None,
) -> tuple[Path, Record]:
    """Trains a run, or goes on with one; returns its folder and its summary.

    `reward_functions` are Python's own, under the names that they have in the configuration.
    """
    folder = _shared(request.folder)
    if origin.run is not None:
        if request.chosen:
            refuse_other_folder(origin.run, folder)
        folder = origin.run
    elif distributed.first() and (folder / "config.yaml").exists():
        loading.refuse_others(folder, "config.yaml")  # a ramp has one too, but cannot be resumed
        raise UserError(
            f"{folder} already holds a run; continue it with training.resume={folder}, or choose another folder."
        )
    folder = relative(folder)
    if heartbeat.current:
        resume = f"training.resume={folder}"
        heartbeat.current.advice = f"Start all of them again with {resume}: the run goes on from its last checkpoint."
    given = as_given(request.overrides)
    return folder, loop.run(cfg, folder, console, given, origin, LabAdvisor(), reward_functions)


def evaluate(request: Request, console: Screen) -> list[Record]:
    """Evaluates a run or a base model; returns the records that it also writes: of its own test set, and of further ones."""
    cfg = anchored(validate(request.composed, EvaluateConfig))
    cfg = _agreed(cfg if cfg.run else loading.described(cfg))
    return evaluation.run(cfg, _shared(request.folder), console, request.overrides)


def _agreed(cfg: C) -> C:
    """The configuration, if all processes have the same one."""
    distributed.refuse_differences(lambda: leaves(cfg.model_dump(mode="json")))
    return cfg


def _shared(folder: Path) -> Path:
    """A folder that is named by the time: several processes take that of the first."""
    return Path(distributed.everyones(str(folder))[0])
