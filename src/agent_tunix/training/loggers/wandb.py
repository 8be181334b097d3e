"""Curves, tables and configuration in Weights & Biases; with WANDB_MODE=offline, in the run's folder until `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.training.loggers.base import PATIENCE, PROJECT, Labels, Logger, Row, keep, kept
from agent_tunix.types import Record

STEP = "step"  # of the run. W&B counts calls by itself, and would drop what a run says of a step again
SERVICE = "wandb"


class WandB(Logger):
    """A run of W&B, which goes on as the same one; steps that a run makes again are shown again."""

    in_background = True

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        labels, known, session = Labels.of(folder, config), kept(folder, SERVICE), wandb.setup().settings
        online = session.mode not in ("offline", "dryrun", "disabled")
        if online and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("there is no API key. Give one by `wandb login`, or WANDB_API_KEY, or set WANDB_MODE=offline")
        limits = {"init_timeout": "WANDB_INIT_TIMEOUT", "finish_timeout": "WANDB_FINISH_TIMEOUT"}
        seconds: dict[str, Any] = {key: 0.75 * PATIENCE for key, name in limits.items() if name not in os.environ}
        self._run = wandb.init(
            project=known.get("project") or labels.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            id=known.get("id"),
            resume="allow",
            name=labels.name,
            group=labels.group,
            tags=labels.tags or None,
            notes=labels.description,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            reinit="create_new",  # jobs of a sweep may be trained together
            settings=wandb.Settings(console="off", silent=True, **seconds),
        )
        keep(folder, SERVICE, id=self._run.id, project=self._run.project)
        self._run.config.update(config, allow_val_change=True)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        offline = f"`wandb sync {Path(self._run.dir).parent}` uploads it" if session.mode != "disabled" else ""
        self.place = (self._run.url or "") if online else offline

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        import wandb

        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = wandb.Table(columns, [[row.get(column) for column in columns] for row in rows], allow_mixed_types=True)
        self._run.log({STEP: step, name: table})

    def summary(self, record: Record) -> None:
        self._run.summary.update({"status": record["status"], "seconds": record["seconds"]})

    def close(self) -> None:
        self._run.finish()
