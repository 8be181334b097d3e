"""The close of a run: its summary, the commands to try next, and the remedy where it diverged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from agent_tunix.config.guidance import warnings
from agent_tunix.config.schema import Config
from agent_tunix.engine.progress import Progress
from agent_tunix.environments.rewards import is_fault_of_reward
from agent_tunix.errors import DivergenceError, UserError
from agent_tunix.lab.doctor.records import finite
from agent_tunix.lab.doctor.remedies import (
    GUARD,
    join,
    less,
    overrides_without_experiment,
    own_overrides,
    past_bad_rewards,
    value_text,
    with_lr_min,
)
from agent_tunix.training import loading
from agent_tunix.training.run_folder import RunFolder, last_step, read_records
from agent_tunix.training.setup import Run
from agent_tunix.types import Record

HOW_TO_LEARN = ("training", "optimizer", "scheduler", "grpo")  # not carried over from a warm start, but for what is
SAME_HERE = ("training.train_fraction", "training.micro_batch_size", "training.batch_size")  # held out, and what fits


def summarise(r: Run, folder: RunFolder, rollbacks: Sequence[Record], status: str, fault: str = "") -> Record:
    """Writes summary.json, and returns it; `fault` is what has made a run diverge or fail."""
    evals = validations(folder.path)
    summary: Record = {
        "status": status,
        "overrides": _overrides(r),
        "steps": max(last_step(folder.path), *(int(record["step"]) for record in evals), 0),
        "first_eval": evals[0] if evals else None,
        "best_eval": max(evals, key=lambda record: record["accuracy"], default=None),
        "final_eval": evals[-1] if evals else None,
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
        "advice": _advice(r, status, fault, folder.path),
    }
    folder.summary(summary)
    return summary


def ended_by(error: Exception) -> tuple[str, str]:
    """The status of a run that an error has ended, and what the error was."""
    if isinstance(error, DivergenceError):
        return "diverged", error.fault
    return "failed", str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def validations(path: Path) -> list[Record]:
    """The evaluations made in training, by step. A record that was damaged is left out, so its evaluation is made again."""
    kept = [record for record in read_records(path / "evals.jsonl") if record.get("split") == "validation"]
    whole = [record for record in kept if finite(record.get("step")) and finite(record.get("accuracy"))]
    return sorted(whole, key=lambda record: record["step"])


def _advice(r: Run, status: str, fault: str, path: Path) -> list[str]:
    """The commands to try next."""
    cfg = r.cfg
    if is_fault_of_reward(fault):
        return [_again(r, GUARD, past_bad_rewards(cfg.training.on_divergence))]
    if status == "diverged":
        return [_again(r, "optimizer.learning_rate", cfg.optimizer.learning_rate / 10)]
    if status != "completed":
        return [join([f"training.resume={value_text(str(path))}"])]
    run = f"run={value_text(str(path))}"
    evaluate, examine = join([run, "inference_config=standard", "num_passes=8"], "evaluate"), join([str(path)], "doctor")
    export = join([run, "format=peft" if _has_adapters_of_its_base(cfg) else "format=merged"], "export")
    if cfg.training.method == "supervised":
        all_own = overrides_without_experiment(cfg.model_dump(mode="json"))
        kept = [o for o in all_own if o.startswith(SAME_HERE) or o in less(all_own, *HOW_TO_LEARN)]
        return [join([*kept, f"training.init_from={value_text(str(path))}"]), evaluate, export, examine]
    if (cfg.model.weights, cfg.data.source) == ("package:tiny", "arithmetic"):
        rates = "optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4"
        return [evaluate, examine, join(["+experiment=control"]), join(["+experiment=quick_test", "--multirun", rates])]
    return [evaluate, export, examine]


def _has_adapters_of_its_base(cfg: Config) -> bool:
    """Whether what was learnt are adapters of the base that model.weights names; not known where an earlier run is gone."""
    with contextlib.suppress(UserError):
        return cfg.model.lora_rank > 0 and loading.changed_base(cfg) is None
    return False


def remedy(r: Run, saved: Path | None, step: int, fault: str, progress: Progress) -> str:
    """What to say of a run that diverged, with the folder of its checkpoints if it has any."""
    tried = f" after {len(progress.rollbacks)} rollbacks" if progress.rollbacks else ""
    kept = f" The last good checkpoint is kept in {saved}." if saved else ""
    happened = f"The run diverged at step {step}{tried}: {fault}.\nThe update did not reach the weights.{kept}\n"
    if is_fault_of_reward(fault):
        other = past_bad_rewards(r.cfg.training.on_divergence)
        to = {"ignore": "To drop such batches instead", "stop": "No batch was left. To stop at the first such"}[other]
        return f"{happened}Mend the function: a reward must be a finite number. {to}:\n  {_again(r, GUARD, other)}"
    tries: dict[str, float | str] = {
        "optimizer.learning_rate": r.cfg.optimizer.learning_rate / 10,
        "optimizer.max_grad_norm": min(0.01, r.cfg.optimizer.max_grad_norm / 10),
        GUARD: "rollback",
    }
    if progress.rollbacks:  # they have been tried
        del tries[GUARD]
    again = "\n".join(f"  {_again(r, key, value)}" for key, value in tries.items())
    return f"{happened}Most often the learning rate is too high. Try, in this order:\n{again}"


def _again(r: Run, key: str, value: float | str) -> str:
    """The command of a run with another value."""
    changes = with_lr_min({key: value}, r.cfg.scheduler.lr_min)
    given = (f"{k}={v if isinstance(v, str) else f'{v:g}'}" for k, v in changes.items())
    return join([*less(_overrides(r), *changes), *given])


def _overrides(r: Run) -> list[str]:
    """The run's overrides as they were given; for a run that was continued, the fewest that lead to it."""
    continued = any(override.startswith("training.resume=") for override in r.overrides)
    return own_overrides(r.cfg.model_dump(mode="json")) if continued else list(r.overrides)
