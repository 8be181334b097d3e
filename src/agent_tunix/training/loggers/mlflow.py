"""Curves, tables and configuration in MLflow: where MLFLOW_TRACKING_URI says, or in its store in the working directory."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.config.load import leaves
from agent_tunix.training.loggers.base import PROJECT, Labels, Logger, Row, keep, kept
from agent_tunix.types import Record

SERVICE = "mlflow"
AT_ONCE = 100  # parameters that a call takes
LONGEST = 6000  # characters of a parameter
# What MLflow says of a run for a status in summary.json; one that was paused goes on.
STATUSES = {"completed": "FINISHED", "interrupted": "KILLED", "diverged": "FAILED", "failed": "FAILED"}


class MLflow(Logger):
    """A run of MLflow, which goes on as the same one; of a step that a run makes again, it shows what was said last."""

    in_background = True

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # tables are read to be added to
        from mlflow import MlflowClient

        labels, known = Labels.of(folder, config), kept(folder, SERVICE)
        self._client, self._status = MlflowClient(), ""
        if known:
            self._run = self._client.get_run(known["id"])
        else:
            experiment = labels.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            tags = dict.fromkeys(labels.tags, "") | ({"group": labels.group} if labels.group else {})
            tags |= {"mlflow.note.content": labels.description} if labels.description else {}
            self._run = self._client.create_run(self._experiment(experiment), run_name=labels.name, tags=tags)
            keep(folder, SERVICE, id=self._run.info.run_id)
        self._id = self._run.info.run_id
        self._write_config(config)
        self.place = f"run {self._id} of experiment {self._run.info.experiment_id}, in {self._client.tracking_uri}"

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        with contextlib.suppress(MlflowException):  # it is there, perhaps as another job of the sweep has just made it
            return self._client.create_experiment(name)
        return self._client.get_experiment_by_name(name).experiment_id

    def _write_config(self, config: dict[str, Any]) -> None:
        """As parameters, which stay as the run began with them, and whole, as it is now."""
        from mlflow.entities import Param

        told = self._run.data.params
        values = {_name(key): str(value)[:LONGEST] for key, value in leaves(config).items()}
        params = [Param(key, value) for key, value in values.items() if key not in told]
        for first in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._id, params=params[first : first + AT_ONCE])
        self._client.log_dict(self._id, config, "config.yaml")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(_name(key), float(value), now, step) for key, value in values.items()])

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        columns = dict.fromkeys(column for row in rows for column in row)
        data = {column: [row.get(column) for row in rows] for column in columns}
        self._client.log_table(self._id, {"step": [step] * len(rows), **data}, f"{_name(name)}.json")

    def rewind(self, step: int) -> None:
        self._client.update_run(self._id, status="RUNNING")

    def summary(self, record: Record) -> None:
        self._status = STATUSES.get(record["status"], "")
        self._client.set_tag(self._id, "status", record["status"])

    def close(self) -> None:
        if self._status:  # an evaluation of a run that has ended leaves it as it is
            self._client.set_terminated(self._id, self._status)


def _name(name: str) -> str:
    """A name as MLflow takes it, which knows no @, as pass@8 has it."""
    return re.sub(r"[^\w\-. /:]", "_", name.replace("@", "_at_"))
