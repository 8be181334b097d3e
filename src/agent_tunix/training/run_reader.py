"""A run's folder as plain Python, for notebooks and scripts."""

from __future__ import annotations

import importlib
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agent_tunix.config.load import read_saved
from agent_tunix.config.resumed import no_run
from agent_tunix.errors import UserError
from agent_tunix.training.run_folder import read_object, read_records
from agent_tunix.types import Record

if TYPE_CHECKING:
    import pandas

RECORDS = ("metrics", "evals", "samples")


class Run:
    """What a run has written down. Nothing that its configuration names is imported.

    Every attribute is read when it is asked for, so a run that is under way can be followed. A `Run` can be given wherever
    the folder of a run can.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.path = Path(folder)
        if not (self.path / "config.yaml").exists():
            raise no_run(str(folder), "run")

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration; keys that came after the run have the values by which it was made."""
        return read_saved(self.path / "config.yaml")

    @property
    def metrics(self) -> list[Record]:
        """One record for each optimizer update."""
        return read_records(self.path / "metrics.jsonl")

    @property
    def evals(self) -> list[Record]:
        """One record for each evaluation, during training and after it."""
        return read_records(self.path / "evals.jsonl")

    @property
    def samples(self) -> list[Record]:
        """Completions with their rewards, the best and the worst of one prompt of each batch."""
        return read_records(self.path / "samples.jsonl")

    @property
    def summary(self) -> Record:
        """How the run ended; empty as long as it has not."""
        return read_object(self.path / "summary.json")

    def frame(self, name: Literal["metrics", "evals", "samples"]) -> pandas.DataFrame:
        """Those records as a pandas data frame, a row for each; the parts of a nested value are columns of their own."""
        if name not in RECORDS:
            raise UserError(f"frame({name!r}): must be one of {', '.join(RECORDS)}")
        try:
            pd = importlib.import_module("pandas")
        except ImportError as fault:
            raise UserError("Data frames need pandas: pip install pandas") from fault
        return pd.json_normalize(getattr(self, name), sep="/")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"
