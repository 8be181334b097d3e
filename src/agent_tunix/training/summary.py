"""The close of a run: its summary."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agent_tunix.config.commands import own_overrides
from agent_tunix.config.guidance import warnings
from agent_tunix.config.schema import Config
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.training.best import best_of, metric_of
from agent_tunix.training.run_folder import RunFolder, last_step, read_records, validations
from agent_tunix.training.setup import Setup
from agent_tunix.types import Record


def summarise(
    r: Setup, folder: RunFolder, rollbacks: Sequence[Record], status: str, fault: str = "", stopped: Record | None = None
) -> Record:
    """Writes summary.json, and returns it; `fault` is what made a run diverge or fail, `stopped` where it ended early."""
    evals, given = validations(folder.path), overrides_of(r)
    summary: Record = {
        "status": status,
        **metadata_of(r.cfg),
        "overrides": given,
        "steps": max(last_step(folder.path), *(int(record["step"]) for record in evals), 0),
        "first_eval": evals[0] if evals else None,
        "best_eval": best_of(evals, metric_of(r.cfg)),
        "final_eval": evals[-1] if evals else None,
        "stopped_early": stopped,
        "tokens": tokens_of(read_records(folder.path / "metrics.jsonl"), r.plan.iterations),
        "seconds": round(time.monotonic() - r.started, 1),
        "optimizer": r.cfg.optimizer.model_dump(),
        "scheduler": {
            **r.cfg.scheduler.model_dump(),
            "warmup_steps": r.plan.warmup_steps,
            "total_steps": r.cfg.scheduler.total_steps or r.plan.total_steps,
        },
        "fault": fault or None,
        "rollbacks": list(rollbacks),
        "warnings": warnings(r.cfg, len(r.task.train)),
        "advice": r.advisor.at_close(r.cfg, given, folder.path, status, fault),
    }
    folder.summary(summary)
    return summary


def metadata_of(cfg: Config) -> Record:
    """What a user has said of a run, as far as something was said."""
    said: Record = {"experiment_name": cfg.experiment_name, "project_name": cfg.project_name}
    said |= {"description": cfg.description, "tags": cfg.tags or None}
    return {key: value for key, value in said.items() if value is not None}


def tokens_of(metrics: Sequence[Record], iterations: int) -> int:
    """Tokens of all completions that were learnt from, each counted once, in whatever many updates a batch was used."""
    counted = [record for record in metrics if isinstance(record.get("step"), int) and record["step"] % iterations == 0]
    return sum(tokens for record in counted if isinstance(tokens := record.get("completion/tokens"), int))


def ended_by(error: Exception) -> tuple[str, str]:
    """The status of a run that an error has ended, and what the error was."""
    if isinstance(error, DivergenceError):
        return "diverged", error.fault
    return "failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def overrides_of(r: Setup) -> list[str]:
    """The run's overrides as they were given; for a run that was continued, the fewest that lead to it."""
    continued = any(override.startswith("training.resume=") for override in r.overrides)
    return own_overrides(r.cfg.model_dump(mode="json")) if continued else list(r.overrides)
