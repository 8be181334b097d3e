"""A run's folder: configuration, metrics, evaluations, samples and summary (see docs/api/train.rst)."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_tunix.config import output_folders
from agent_tunix.engine import distributed
from agent_tunix.errors import UserError, reading
from agent_tunix.files import JSON, read_bytes, short_lines
from agent_tunix.training.loggers.base import Guarded, Row
from agent_tunix.types import Record

NUMBERS = (int, float)
OpenLoggers = Callable[[], Sequence[Guarded]]


class RunFolder:
    """Writes the artefacts of a run, and tells its loggers. One that goes on from a checkpoint drops what came after it."""

    def __init__(self, path: Path, resumed_at: int | None = None, open_loggers: OpenLoggers = tuple):
        self.path = path
        self._loggers: Sequence[Guarded] = ()
        self._samples: list[Row] = []  # since the last evaluation, with which loggers are told of them
        self._step = 0  # the last that was told
        path.mkdir(parents=True, exist_ok=True)
        with self.rewinding(resumed_at) if resumed_at is not None else contextlib.nullcontext():
            self._loggers = open_loggers()

    def metrics(self, record: Record) -> None:
        self._append("metrics.jsonl", [record])
        self._log(record, prefix="train/")

    def evaluation(self, record: Record) -> None:
        self._append("evals.jsonl", [record])
        of_set = f"{record['set']}/" if "set" in record else ""  # not the run's own: it has curves of its own
        self._log(record, prefix=f"{record['split']}/{of_set}")

    def answers(self, record: Record) -> None:
        """Which problems an evaluation has found solved; written before the evaluation itself, which is not made twice."""
        self._append("answers.jsonl", [record])

    def completions(self, record: Record, rows: Sequence[Row]) -> None:
        """What was answered in an evaluation, of which this is the record; the run's own files have no such table."""
        of_set = f"{record['set']}/" if "set" in record else ""
        self._table(f"{record['split']}/{of_set}completions", record["step"], rows)
        self._tell_samples()

    def samples(self, records: Sequence[Record]) -> None:
        self._append("samples.jsonl", records)
        if self._loggers:
            self._samples += [_cells(record) for record in records]

    def summary(self, record: Record) -> None:
        """Replaces summary.json atomically."""
        self._refuse_removed()
        replace_text(self.path / "summary.json", json.dumps(record, indent=2) + "\n")
        for logger in self._loggers:
            logger.summary(record)

    @contextlib.contextmanager
    def rewinding(self, step: int) -> Iterator[None]:
        """Drops the records of later steps, lines cut short and the summary: the run will write them again.

        It does so at the end of this context. Before it begins, all was read, and what stays lies beside what it replaces: a
        fault until then leaves the folder as it was.
        """
        files = [self.path / name for name in ("metrics.jsonl", "evals.jsonl", "answers.jsonl", "samples.jsonl")]
        with _replacing({path: _lines_until(path, step) for path in files if os.path.lexists(path)}):
            yield
        (self.path / "summary.json").unlink(missing_ok=True)
        self._tell_samples()
        for logger in self._loggers:
            logger.rewind(step)

    def close(self) -> None:
        self._tell_samples()
        for logger in self._loggers:
            logger.close()

    def _refuse_removed(self) -> None:
        if not self.path.is_dir():
            raise UserError(f"{self.path} was removed while its run went on, and what it held is lost. Start the run again.")

    def _append(self, name: str, records: Iterable[Record]) -> None:
        self._refuse_removed()
        with open(self.path / name, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")  # after a line that was cut short
            file.write("".join(_line(record) for record in records).encode())

    def _log(self, record: Mapping[str, Any], prefix: str) -> None:
        numbers = {prefix + key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        self._step = record["step"]
        for logger in self._loggers:
            logger.scalars(record["step"], numbers)

    def _table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        for logger in self._loggers:
            logger.table(name, step, rows)

    def _tell_samples(self) -> None:
        if self._samples:
            self._table("train/samples", self._step, self._samples)
            self._samples = []


class NoFolder(RunFolder):
    """The folder of a run that another process writes."""

    def __init__(self, path: Path):
        self.path = path

    def metrics(self, record: Record) -> None: ...
    def evaluation(self, record: Record) -> None: ...
    def answers(self, record: Record) -> None: ...
    def completions(self, record: Record, rows: Sequence[Row]) -> None: ...
    def samples(self, records: Sequence[Record]) -> None: ...
    def summary(self, record: Record) -> None: ...
    @contextlib.contextmanager
    def rewinding(self, step: int) -> Iterator[None]:
        yield

    def close(self) -> None: ...


def run_folder(path: Path, resumed_at: int | None = None, open_loggers: OpenLoggers = tuple) -> RunFolder:
    """The folder of a run, written by the first of its processes alone."""
    return RunFolder(path, resumed_at, open_loggers) if distributed.first() else NoFolder(path)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Keeps a folder to this process; refuses one that another is writing to. A kill releases it."""
    descriptor = distributed.agreed(lambda: _claim(path) if distributed.first() else None)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _claim(path: Path) -> int:
    try:
        return output_folders.claim(path)
    except BlockingIOError as fault:
        raise UserError(f"{path} is being written by another process; let it end, or choose another folder.") from fault


def replace_text(path: Path, text: str) -> None:
    """Writes a file atomically: a kill leaves the old one or the new one; a fault leaves the old one and names it."""
    with _replacing({path: text.encode()}):
        pass


@contextlib.contextmanager
def _replacing(contents: Mapping[Path, bytes]) -> Iterator[None]:
    """Writes new contents of files beside them, and puts them in their place at the end; a fault leaves the old ones."""
    beside = {path: path.with_name(path.name + ".tmp") for path in contents}
    path = Path()
    try:
        try:
            for path, temporary in beside.items():
                temporary.write_bytes(contents[path])
        except OSError as fault:
            raise OSError(fault.errno, fault.strerror, str(path)) from fault
        yield
        try:
            for path, temporary in beside.items():
                os.replace(temporary, path)
        except OSError as fault:
            raise OSError(fault.errno, fault.strerror, str(path)) from fault
    except BaseException:
        for temporary in beside.values():
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def _lines_until(path: Path, step: int) -> bytes:
    """The lines of a .jsonl file that tell of a step or of those before it, as they are."""
    if not path.is_file():
        raise UserError(f"{path} is not a file, and a run's records go there. Move it away.")

    def stays(line: bytes) -> bool:
        return any(isinstance(of := record.get("step"), int) and of <= step for record in objects([_decoded(line)]))

    with reading(path):
        return b"".join(line + b"\n" for line in short_lines(path) if stays(line))


def read_records(path: Path) -> list[Record]:
    """The objects of a .jsonl file, as far as they can be read: a kill or a full disk cuts a line short."""
    with reading(path):
        return objects(map(_decoded, short_lines(path))) if path.is_file() else []


def validations(path: Path) -> list[Record]:
    """The evaluations made in training, by step. A record that was damaged is left out, so its evaluation is made again."""
    return _by_step(record for record in read_records(path / "evals.jsonl") if record.get("split") == "validation")


def evaluations_on(path: Path, name: str) -> list[Record]:
    """Those made in training on a further test set, by step; `evaluate.py` says how many passes it made."""
    evals = read_records(path / "evals.jsonl")
    return _by_step(record for record in evals if record.get("set") == name and "num_passes" not in record)


def _by_step(records: Iterable[Record]) -> list[Record]:
    whole = [record for record in records if finite(record.get("step")) and finite(record.get("accuracy"))]
    return sorted(whole, key=lambda record: record["step"])


def last_step(path: Path) -> int:
    """The last step that a run's folder has recorded."""
    steps = [record.get("step") for record in read_records(path / "metrics.jsonl")]
    return max((step for step in steps if isinstance(step, int)), default=0)


def read_text(path: Path) -> str:
    """A file of a run's folder; an empty text where there is none. Refuses one that is too large to be of a run."""
    with reading(path):
        return _decoded(read_bytes(path, JSON)) if path.is_file() else ""


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", errors="replace")


def objects(texts: Iterable[str]) -> list[Record]:
    """The JSON objects among some texts; others are left out."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(text), dict):
                found.append(record)
    return found


def read_object(path: Path) -> Record:
    """The object of a .json file; an empty one where there is none that can be read."""
    found = objects([read_text(path)])
    return found[0] if found else {}


def finite(value: Any) -> bool:
    """Whether this is a number whose square is finite too. Asked a million times for a long run, so it must be quick."""
    return isinstance(value, NUMBERS) and not isinstance(value, bool) and abs(value) < 1e100


def _cells(record: Record) -> Row:
    """A record as the row of a table: what is in an object has a column of its own, and lists are JSON."""
    flat = {k: v for k, v in record.items() if not isinstance(v, dict)}
    flat |= {f"{key}/{name}": v for key, of in record.items() if isinstance(of, dict) for name, v in of.items()}
    return {k: json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for k, v in flat.items()}


def _line(record: Record) -> str:
    """Strict JSON has no NaN: what is not finite is written as null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"
