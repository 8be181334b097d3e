"""What a run's folder says, as typed records, and the few statistics by which it is judged.

Records are read as they are found: a run may have been killed in the middle of a line, be of an older version, or have been
edited by hand. What cannot be read is left out; what is left decides how much can be said.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from agent_tunix.config.load import read_saved
from agent_tunix.errors import UserError
from agent_tunix.training.intervals import wilson
from agent_tunix.training.run_folder import finite, read_object, read_records
from agent_tunix.types import Record

Point = tuple[int, float]  # a step and what was measured there
TOLD_APART = 2.0  # standard errors at which one accuracy is told from another
FINISHED = ("completed", "diverged")  # statuses of a run that cannot go on
PER_BATCH = (
    "reward/",
    "groups/",
    "completion/",
    "mismatch/",
    "episode/",
    "calls/",
)  # repeated in the record of each update from a batch


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """A run as far as it has come: its resolved configuration, its records, and the overrides that lead to it again."""

    config: Mapping[str, Any]
    metrics: Sequence[Record] = ()
    evals: Sequence[Record] = ()
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    overrides: Sequence[str] = ()
    given: Sequence[str] = ()  # of a sweep's job: the overrides as they were written

    def setting(self, key: str) -> Any:
        """The value of a dotted key, or None where the configuration has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def metadata(self) -> dict[str, str]:
        """What its user has said of the run, as far as something was said."""
        tags = self.setting("tags")
        found = {key: self.setting(key) for key in ("experiment_name", "project_name", "description")}
        found["tags"] = ", ".join(map(str, tags)) if isinstance(tags, list) else None
        return {key: str(value) for key, value in found.items() if value}

    def number(self, key: str, otherwise: float) -> float:
        """A setting that must be a number."""
        value = self.setting(key)
        return float(value) if finite(value) else otherwise

    def series(self, key: str) -> list[Point]:
        """The finite values of a metric by step: one an update, or one a batch for what is measured once a batch."""
        if key not in self._series:
            self._series[key] = self._read_series(key)
        return self._series[key]

    @cached_property
    def _series(self) -> dict[str, list[Point]]:
        """A cache of the series that were asked for; most are asked for many times."""
        return {}

    def _read_series(self, key: str) -> list[Point]:
        every = self.iterations if key.startswith(PER_BATCH) else 1
        measured = [r for r in self.metrics if finite(r.get("step")) and finite(r.get(key))]
        return [(int(r["step"]), float(r[key])) for r in measured[::every]]

    def values(self, key: str) -> list[float]:
        return [value for _, value in self.series(key)]

    def accuracies(self, key: str = "accuracy") -> list[Accuracy]:
        """Evaluations on the validation split, in order."""
        return [
            Accuracy(int(r["step"]), min(1.0, max(0.0, float(r[key]))), max(1, int(r["n"])))
            for r in self.evals
            if r.get("split", "validation") == "validation" and all(finite(r.get(k)) for k in ("step", "n", key))
        ]

    def on_sets(self) -> dict[str, list[Accuracy]]:
        """Evaluations in training on each further test set, in order."""
        found: dict[str, list[Accuracy]] = {}
        for r in self.evals:
            name = r.get("set")
            if isinstance(name, str) and "num_passes" not in r and all(finite(r.get(k)) for k in ("step", "n", "accuracy")):
                share = min(1.0, max(0.0, float(r["accuracy"])))
                found.setdefault(name, []).append(Accuracy(int(r["step"]), share, max(1, int(r["n"]))))
        return {name: sorted(seen, key=lambda one: one.step) for name, seen in found.items()}

    @property
    def supervised(self) -> bool:
        return self.setting("training.method") == "supervised"

    @property
    def iterations(self) -> int:
        """Updates from a batch; a worked answer is learnt once."""
        return 1 if self.supervised else max(1, int(self.number("grpo.num_iterations", 1)))

    @property
    def measures_kl(self) -> bool:
        """Without a reference the metrics say 0, which is not how far the policy has moved."""
        return not self.supervised and self.number("grpo.beta", 1.0) > 0

    @property
    def completed(self) -> bool:
        """Whether the run came to its planned end; one that is still going may yet do what it has not done."""
        return self.summary.get("status") == "completed"

    @property
    def status(self) -> str:
        """What the summary says, unless the run was resumed since it was written."""
        status, steps = self.summary.get("status"), self.summary.get("steps")
        last = max((step for step, _ in self.series("lr")), default=0)
        outrun = isinstance(steps, int | float) and finite(steps) and last > steps
        return status if isinstance(status, str) and not outrun else "unfinished"

    @property
    def error(self) -> str | None:
        """What ended a run that failed, in one line; runs of older versions did not write it down."""
        fault = self.summary.get("fault")
        return " ".join(fault.split()) if self.status == "failed" and isinstance(fault, str) else None

    @property
    def stopped_early(self) -> dict[str, Any] | None:
        """Where a run has stopped before its planned end, as it was not getting better."""
        stopped = self.summary.get("stopped_early")
        return stopped if isinstance(stopped, dict) and self.status == "completed" else None

    @property
    def rolled_back(self) -> bool:
        """Whether the guard took the run back to a checkpoint, to go on at a tenth of its rate."""
        return bool(self.summary.get("rollbacks"))

    @property
    def steps(self) -> int:
        """How many are recorded."""
        return len(self.metrics)

    @property
    def reached(self) -> int:
        """The last step, recorded or evaluated."""
        return max((int(step) for step in (*self.values("step"), *(seen.step for seen in self.accuracies()))), default=0)

    @property
    def dropped(self) -> int:
        """How many steps taught nothing: the guard left their batch out, or did not apply the update that came of it."""
        guard = self.setting("training.on_divergence")
        if guard not in ("ignore", "rollback"):
            return 0
        recorded = {step for step, _ in self.series("step")}
        return max(0, self.reached - len(recorded)) + (len(self.unapplied) if guard == "ignore" else 0)

    @property
    def unapplied(self) -> set[int]:
        """Steps that changed no weight, though their rate was not 0."""
        rates = dict(self.series("lr"))
        return {step for step, survival in self.series("update_survival") if survival == 0 and rates.get(step)}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    step: int
    share: float
    n: int

    def __str__(self) -> str:
        return f"{self.share:.1%}"

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval."""
        return wilson(self.share, self.n)


@dataclasses.dataclass(frozen=True)
class Change:
    """From the early to the late value of something, with the standard error of the difference."""

    early: float
    late: float
    error: float

    @property
    def gain(self) -> float:
        return self.late - self.early

    @property
    def z(self) -> float:
        """The difference in standard errors."""
        return self.gain / self.error if self.error > 0 else math.copysign(math.inf, self.gain) if self.gain else 0.0


def trend(values: Sequence[float]) -> Change | None:
    """From the mean of a metric's first third to that of its last, where there are enough values to know their scatter."""
    third = len(values) // 3
    if third < 2:
        return None
    error = scatter(values) * math.sqrt(2 / third)
    return Change(statistics.fmean(values[:third]), statistics.fmean(values[-third:]), error)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation about a straight line, so that a steady rise does not count as noise."""
    n = len(values)
    if n < 3:
        return 0.0
    slope, middle, mean = _slope(values), (n - 1) / 2, statistics.fmean(values)
    squares = [(value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values)]
    return math.sqrt(sum(squares) / (n - 2))


def _slope(values: Sequence[float]) -> float:
    n, mean = len(values), statistics.fmean(values)
    middle = (n - 1) / 2
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / sum((i - middle) ** 2 for i in range(n))


def difference(first: Accuracy, last: Accuracy) -> Change:
    """Between two evaluations, with binomial noise; one success and one failure are added so that 0 of n is not certain."""
    variances = []
    for measured in (first, last):
        share = (measured.share * measured.n + 1) / (measured.n + 2)
        variances.append(share * (1 - share) / measured.n)
    return Change(first.share, last.share, math.sqrt(sum(variances)))


def late(values: Sequence[float]) -> float | None:
    """The median of the last third: where a metric ended, whatever a single step did."""
    return statistics.median(values[-max(1, len(values) // 3) :]) if values else None


def read_run(folder: Path) -> RunRecords:
    """The records of a run's folder; raises UserError where it is none."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it has no config.yaml. "
            "Give runs/<time> as training printed it, or multirun/<time> for a sweep."
        )
    return RunRecords(
        config=_config(file, file.stat().st_mtime_ns),
        metrics=read_records(folder / "metrics.jsonl"),
        evals=read_records(folder / "evals.jsonl"),
        summary=read_object(folder / "summary.json"),
    )


@lru_cache(maxsize=256)
def _config(file: Path, written: int) -> dict[str, Any]:
    """As it was written then. YAML is slow to read, and the pages of a sweep and of its jobs all ask for it."""
    return read_saved(file)
