"""The stages of a search, which are steps 1 to 4 of the optimizer reference, and the runs that their candidates are.

A candidate is the user's own run with a few values changed, shortened to what the budget allows: lengths that are given in
updates shrink with it, so its schedule is the whole run's in small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from agent_tunix.algorithm.schedules import warmup_steps_from_ratio
from agent_tunix.config.guidance import half_decades, middle_rate
from agent_tunix.config.load import validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.doctor.remedies import with_lr_min
from agent_tunix.lab.tune.config import TuneConfig
from agent_tunix.lab.tune.halving import Bracket
from agent_tunix.training.horizon import Plan

RATE, WARMUP, DECAY, LR_MIN = (
    "optimizer.learning_rate",
    "optimizer.warmup_ratio",
    "optimizer.weight_decay",
    "scheduler.lr_min",
)
SHORT = 100  # updates; the reference's short runs do without warm-up
Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Candidate values of one key; the incumbent, one of them, is kept unless another is better beyond noise."""

    name: str
    title: str
    key: str
    values: tuple[float, ...]
    incumbent: float


def start(cfg: TuneConfig) -> dict[str, Any]:
    """The settings before the first stage: the middle of the model's guidance, and the run's own values."""
    return {RATE: middle_rate(cfg), WARMUP: cfg.optimizer.warmup_ratio, DECAY: cfg.optimizer.weight_decay}


def coarse_rate(cfg: TuneConfig, settings: Settings) -> Stage:
    """Ten times apart, one more below the middle than above where the number is even, as in the reference."""
    middle, count = settings[RATE], cfg.tune.rates
    values = [half_decades(middle, 2 * decade) for decade in range(-(count // 2), count - count // 2)]
    return Stage("1-coarse-rate", "Coarse learning rate", RATE, _distinct(values), middle)


def fine_rate(settings: Settings) -> Stage:
    best = settings[RATE]
    values = [half_decades(best, up) for up in (-1, 0, 1)]
    return Stage("2-fine-rate", "Fine learning rate", RATE, _distinct(values), best)


def warm_up(cfg: TuneConfig, settings: Settings, updates: int) -> Stage:
    """Values that differ in whole updates of warm-up; a short run is also tried without any."""
    own = settings[WARMUP]
    wanted = [own, *cfg.tune.warmup_ratios, *([0.0] if updates < SHORT else [])]
    distinct = {warmup_steps_from_ratio(value, updates): value for value in reversed(wanted)}
    return Stage("3-warm-up", "Warm-up ratio", WARMUP, _distinct(distinct.values()), own)


def weight_decay(cfg: TuneConfig, settings: Settings) -> Stage:
    own = settings[DECAY]
    return Stage("4-weight-decay", "Weight decay", DECAY, _distinct([own, *cfg.tune.weight_decays]), own)


def stages(cfg: TuneConfig, settings: Settings, updates: int) -> list[Stage]:
    """All stages as they stand with these settings; warm-up has none where its updates are given."""
    rates = [coarse_rate(cfg, settings), fine_rate(settings)]
    warm_ups = [warm_up(cfg, settings, updates)] if cfg.scheduler.warmup_steps is None else []
    return [*rates, *warm_ups, weight_decay(cfg, settings)]


def brackets(cfg: TuneConfig, updates: int) -> list[Bracket]:
    """How large the stages are; the incumbent of every stage but the first has been trained by then."""
    sizes = [len(stage.values) for stage in stages(cfg, start(cfg), updates)]
    return [Bracket(size, trained=min(i, 1)) for i, size in enumerate(sizes)]


def training_config(cfg: TuneConfig) -> Config:
    """The user's run, evaluated at rungs only; the guard must not lower its rate, which is what is being judged."""
    tree = {name: value for name, value in cfg.model_dump(mode="json").items() if name != "tune"}
    tree["training"] |= {"eval_every_n_steps": None, "early_stopping": None}
    if cfg.training.on_divergence == "rollback":
        tree["training"]["on_divergence"] = "stop"
    return validate(tree, Config)


def shortened(whole: Config, plan: Plan, batches: int) -> Config:
    """The user's run with so many batches."""
    tree = whole.model_dump(mode="json")
    epochs = max(1, batches // plan.batches_per_epoch)
    tree["training"] |= {"num_batches": batches // epochs, "num_epochs": epochs}
    for key in ("warmup_steps", "total_steps"):
        if given := tree["scheduler"][key]:
            tree["scheduler"][key] = max(1, given * batches // plan.total_batches)
    return validate(tree, Config)


def candidate(base: Config, settings: Settings) -> Config:
    """A run with these settings."""
    tree = base.model_dump(mode="json")
    for key, value in possible(base, settings).items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch[section]
        branch[name] = value
    return validate(tree, Config)


def possible(base: Config, settings: Settings) -> dict[str, Any]:
    """Settings with the lr_min that they need."""
    return with_lr_min(settings, base.scheduler.lr_min)


def _distinct(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted(set(values)))
