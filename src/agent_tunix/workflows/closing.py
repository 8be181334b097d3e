"""The close of a run: its summary, the commands to try next, and the remedy where it diverged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from agent_tunix.config.guidance import warnings
from agent_tunix.config.schema import Config
from agent_tunix.engine.guard import Progress
from agent_tunix.engine.metrics import Record, RunFolder, read_records
from agent_tunix.workflows.display import shell_command
from agent_tunix.workflows.gather import Run


def summarise(r: Run, folder: RunFolder, rollbacks: Sequence[Record], status: str) -> Record:
    """Writes summary.json, and returns it."""
    evals = validations(folder)
    steps = max((record["step"] for record in read_records(folder.path / "metrics.jsonl")), default=0)
    summary: Record = {
        "status": status,
        "overrides": list(r.overrides),
        "steps": steps,
        "first_eval": evals[0] if evals else None,
        "best_eval": max(evals, key=lambda record: record["accuracy"], default=None),
        "final_eval": evals[-1] if evals else None,
        "seconds": round(time.monotonic() - r.started, 1),
        "optimizer": r.cfg.optimizer.model_dump(),
        "scheduler": {
            **r.cfg.scheduler.model_dump(),
            "warmup_steps": r.plan.warmup_steps,
            "total_steps": r.plan.total_steps,
        },
        "rollbacks": list(rollbacks),
        "warnings": warnings(r.cfg, len(r.task.train)),
        "advice": _advice(r.cfg, status, folder.path),
    }
    folder.summary(summary)
    return summary


def validations(folder: RunFolder) -> list[Record]:
    """The evaluations made in training."""
    return [record for record in read_records(folder.path / "evals.jsonl") if record["split"] == "validation"]


def _advice(cfg: Config, status: str, path: Path) -> list[str]:
    """The commands to try next."""
    train, evaluate, export = (shell_command(verb) for verb in ("train", "evaluate", "export"))
    if status == "diverged":
        return [f"{train} optimizer.learning_rate={cfg.optimizer.learning_rate / 10:g}"]
    if status != "completed":
        return [f"{train} training.resume={path}"]
    advice = [f"{evaluate} run={path} inference_config=standard num_passes=8", f"{export} run={path} format=peft"]
    advice.append(f"{shell_command('doctor')} {path}")
    if cfg.training.method == "supervised":
        return [f"{train} training.init_from={path}", *advice]
    if cfg.model.model_size == "tiny":
        sweep = "--multirun optimizer.learning_rate=1e-7,1e-6,1e-5,1e-4"
        return [advice[0], advice[2], f"{train} +experiment=control", f"{train} +experiment=quick_test {sweep}"]
    return advice


def remedy(r: Run, saved: Path | None, step: int, fault: str, progress: Progress) -> str:
    """What to say of a run that diverged, with the folder of its checkpoints if it has any."""
    rate, train = r.cfg.optimizer.learning_rate, shell_command("train")
    tried = f" after {len(progress.rollbacks)} rollbacks" if progress.rollbacks else ""
    kept = f" The last good checkpoint is kept in {saved}." if saved else ""
    return (
        f"The run diverged at step {step}{tried}: {fault}.\n"
        f"The update did not reach the weights.{kept}\n"
        "Most often the learning rate is too high. Try, in this order:\n"
        f"  {train} optimizer.learning_rate={rate / 10:g}\n"
        f"  {train} optimizer.max_grad_norm={min(0.01, r.cfg.optimizer.max_grad_norm / 10):g}\n"
        f"  {train} training.on_divergence=rollback"
    )
