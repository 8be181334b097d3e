"""Records of runs that never were."""

from __future__ import annotations

import json

from agent_tunix.config.commands import own_overrides
from agent_tunix.lab.doctor.records import RunRecords

HEALTHY = {
    "loss": 1e-4,
    "lr": 1e-5,
    "grad_norm": 10.0,
    "update_norm": 1e-3,
    "update_survival": 1.0,
    "kl": 0.05,
    "entropy": 0.1,
    "clip_fraction": 0.0,
    "reward/std": 0.5,
    "reward/format_exact": 0.9,
    "reward/answer": 0.5,
    "groups/zero_variance": 0.2,
    "completion/truncated": 0.0,
    "mismatch/kl": 1e-13,
}


def changed(config: dict, **values) -> dict:
    """A copy with some `section__key` set."""
    copy = json.loads(json.dumps(config))
    for name, value in values.items():
        section, key = name.split("__")
        copy[section][key] = value
    return copy


def run_of(config: dict, steps: int = 24, accuracies=(0.4, 0.8), n: int = 200, summary=None, **metrics) -> RunRecords:
    """A run that learns, except for the metrics given: a constant, or a function of the step from 1."""

    def at(step: int) -> dict:
        own = {"reward/mean": 0.4 + 0.4 * step / steps + 0.02 * (-1) ** step, **HEALTHY}
        own |= {name.replace("__", "/"): value for name, value in metrics.items()}
        return {"step": step, **{name: value(step) if callable(value) else value for name, value in own.items()}}

    spaced = [round(i * steps / max(1, len(accuracies) - 1)) for i in range(len(accuracies))]
    evals = [
        {"step": step, "split": "validation", "n": n, "accuracy": share, "format_accuracy": 1.0}
        for step, share in zip(spaced, accuracies, strict=True)
    ]
    return RunRecords(
        config, [at(step) for step in range(1, steps + 1)], evals, summary or {"status": "completed"}, own_overrides(config)
    )


FLAT_REWARD = {"reward__mean": lambda step: 0.5 + 0.02 * (-1) ** step}
