"""Which step of a run is its best: that follows from its evaluations and its checkpoints, and is written nowhere else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from agent_tunix.config.resumed import saved_steps
from agent_tunix.config.schema import BEST, Config, StepOrBest
from agent_tunix.errors import UserError
from agent_tunix.training.run_folder import finite, validations
from agent_tunix.types import Record


def metric_of(cfg: Config) -> str:
    """The number of its evaluations by which a run is judged."""
    return cfg.training.keep_best or "accuracy"


def best_of(evals: Sequence[Record], metric: str) -> Record | None:
    """The evaluation with the greatest number, the earliest among equals."""
    measured = [record for record in evals if finite(record.get(metric))]
    return max(measured, key=lambda record: record[metric], default=None)


def best_saved(folder: Path, metric: str, saved: Collection[int]) -> Record | None:
    """The best evaluation among those of saved steps. What was there before the first update is no step of a run."""
    return best_of([record for record in validations(folder) if record["step"] in saved and record["step"] > 0], metric)


def best_kept(cfg: Config, folder: Path) -> str:
    """What to say at the close of a run that keeps its best checkpoint."""
    metric = cfg.training.keep_best
    found = best_saved(folder, metric, saved_steps(folder)) if metric else None
    if metric is None or found is None:
        return ""
    best, name = best_of(validations(folder), metric) or found, metric.replace("_", " ")
    before = "" if best["step"] else f"; before training it was {best[metric]:.1%}"
    return f"Best step:  {found['step']}, held-out {name} {found[metric]:.1%}{before}; step=best stands for it"


def stopped_early(cfg: Config, folder: Path, step: int) -> Record | None:
    """Where a run of this configuration stops, and since when it was not better; None where it goes on from this step.

    It stops at a step that was evaluated, when so many evaluations in a row have brought no new best.
    """
    patience, metric = cfg.training.early_stopping, metric_of(cfg)
    evals = [record for record in validations(folder) if finite(record.get(metric))]
    best = best_of(evals, metric)
    if patience is None or best is None or evals[-1]["step"] != step or len(evals) - evals.index(best) <= patience:
        return None
    return {"step": step, "best_step": best["step"], "metric": metric}


def step_of(folder: str, cfg: Config, step: StepOrBest | None, asked: str) -> int | None:
    """A step as it was asked for, by words such as `step=best`, with the number of the best one in place of that word."""
    if step != BEST:
        return step
    metric, saved = metric_of(cfg), sorted(saved_steps(Path(folder)))
    if (found := best_saved(Path(folder), metric, saved)) is None:
        kept = f"the steps kept are {', '.join(map(str, saved))}; give one of them" if saved else "none is kept"
        raise UserError(
            f"{asked}: no checkpoint of {folder} is of a step after the first update that was evaluated by {metric}; {kept}."
        )
    return int(found["step"])
