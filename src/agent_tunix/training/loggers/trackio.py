"""Curves, tables and configuration in Trackio: a database here (TRACKIO_DIR), a Space or a server of one's own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.training.loggers.base import PROJECT, Labels, Logger, Row, keep, kept
from agent_tunix.types import Record

SERVICE = "trackio"


class Trackio(Logger):
    """A run of Trackio, which knows runs by their names; steps that a run makes again are shown again."""

    in_background = True

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import trackio

        labels, known = Labels.of(folder, config), kept(folder, SERVICE)
        project = known.get("project") or labels.project or os.environ.get("TRACKIO_PROJECT") or PROJECT
        name = known.get("name") or f"{labels.name}-{secrets.token_hex(2)}"  # another run may have the folder's name
        described = {"description": labels.description, "tags": list(labels.tags)}
        self._run = trackio.init(
            project,
            name=name,
            group=labels.group,
            config=config | {key: value for key, value in described.items() if value},
            resume="must" if known else "never",
            embed=False,
        )
        keep(folder, SERVICE, project=project, name=name)
        self.place = self._run.url or f"`trackio show --project {project}` shows {name}"

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        import trackio

        self._run.log({name: trackio.Table(data=[dict(row) for row in rows])}, step=step)

    def summary(self, record: Record) -> None:
        self._run.config.update(status=record["status"])

    def close(self) -> None:
        self._run.finish()
