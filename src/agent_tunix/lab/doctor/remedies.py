"""The command to try next: the run's own, with the remedy's values."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from agent_tunix.config.commands import join, key_of, less, own_overrides, value_text
from agent_tunix.lab.doctor.records import RunRecords

GUARD = "training.on_divergence"
LEAST_RATE, GREATEST_RATE = 1e-7, 1e-4  # the reference's typical range of learning rates


def rerun(run: RunRecords, changes: Mapping[str, Any], without: Sequence[str] = ()) -> str:
    """The run's command with some values changed, and without its overrides of keys that begin as one of `without`."""
    changed = {key: value_text(value) for key, value in possible(run, changes).items()}
    kept = [o for o in less(run.overrides, *without) if key_of(o) not in changed]
    return join([*kept, *(f"{key}={value}" for key, value in changed.items())])


def scaled_rate(run: RunRecords, factor: float) -> dict[str, Any]:
    """The run's own learning rate times a factor; nothing where the configuration has no rate."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return {"optimizer.learning_rate": min(1.0, rounded(rate * factor))} if rate > 0 else {}


def lower_rate(run: RunRecords) -> dict[str, Any]:
    """A tenth of the rate, as the reference says, and never more than it calls typical."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return scaled_rate(run, min(0.1, GREATEST_RATE / rate)) if rate > 0 else {}


def raised_rate(run: RunRecords) -> dict[str, Any]:
    """Ten times the rate, and never less than the reference calls typical."""
    rate = run.number("optimizer.learning_rate", 0.0)
    return scaled_rate(run, max(10.0, LEAST_RATE / rate)) if rate > 0 else {}


def past_bad_rewards(mode: Any) -> str:
    """What the guard should do about rewards that are not finite: drop their batches, or, where that left none, stop."""
    return "stop" if mode == "ignore" else "ignore"


def rounded(value: float) -> float:
    """Two digits are enough for a value to try."""
    return float(f"{value:.2g}")


def with_lr_min(changes: Mapping[str, Any], lr_min: float | None) -> dict[str, Any]:
    """A peak below lr_min is refused, so lr_min goes down with it."""
    rate = changes.get("optimizer.learning_rate")
    if not isinstance(rate, float) or lr_min is None or rate >= lr_min:
        return dict(changes)
    return {**changes, "scheduler.lr_min": rounded(rate / 10)}


def possible(run: RunRecords, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changes with those that must follow: of lr_min, and of warmup_steps, which would overrule a ratio of warm-up."""
    followed = with_lr_min(changes, run.number("scheduler.lr_min", 0.0))
    if (warmup := changes.get("optimizer.warmup_ratio")) is not None:
        if run.setting("scheduler.warmup_steps") is not None:
            followed["scheduler.warmup_steps"] = None
        if run.number("scheduler.decay_ratio", 0.0) > 1 - warmup:
            followed["scheduler.decay_ratio"] = rounded(1 - warmup)
    return followed


class OwnOverrides(Sequence[str]):
    """As `own_overrides`, computed only when asked for: a run with no findings need not wait for it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    @functools.cached_property
    def _found(self) -> list[str]:
        return own_overrides(self._config)

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)
