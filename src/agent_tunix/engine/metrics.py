"""A run's folder: configuration, metrics, evaluations, samples, summary and TensorBoard curves, as the design lays down."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

Record = dict[str, Any]


class RunFolder:
    """Writes the artefacts of a run; every line is flushed, so a killed run leaves whole lines."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._tensorboard = SummaryWriter(str(path / "tensorboard"))

    def metrics(self, record: Record) -> None:
        self._append("metrics.jsonl", [record])
        self._curves(record, prefix="train/")

    def evaluation(self, record: Record) -> None:
        self._append("evals.jsonl", [record])
        self._curves(record, prefix=f"{record['split']}/")

    def samples(self, records: Iterable[Record]) -> None:
        self._append("samples.jsonl", records)

    def summary(self, record: Record) -> None:
        """Replaces summary.json in one stroke."""
        temporary = self.path / "summary.json.tmp"
        temporary.write_text(json.dumps(record, indent=2) + "\n")
        os.replace(temporary, self.path / "summary.json")

    def rewind(self, step: int) -> None:
        """Drops what was written after `step`, and a line cut short by a kill: a resumed run will write it again."""
        for name in ("metrics.jsonl", "evals.jsonl", "samples.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [record for record in read_records(path) if record["step"] <= step]
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(_line(record) for record in kept))
                os.replace(temporary, path)

    def close(self) -> None:
        self._tensorboard.close()

    def _append(self, name: str, records: Iterable[Record]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write("".join(_line(record) for record in records))

    def _curves(self, record: Mapping[str, Any], prefix: str) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                self._tensorboard.add_scalar(prefix + key, value, record["step"])


def read_records(path: Path) -> list[Record]:
    """The whole lines of a .jsonl file; a last line without its end is a write that a kill cut short."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def peak_memory_gb() -> float:
    """Peak memory of the device, where it says; else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
