"""Rows of questions and answers from JSON lines, CSV, parquet, or a data set of the hub, Kaggle or TensorFlow Datasets.

A place is a file, a folder with train.* and test.* files, the name of a hub repository, or what `downloads` has. Validation
is a share of the training rows, drawn once and for all; where there is no test split, validation stands in for it.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, AnyStr

import numpy as np

from agent_tunix.environments import downloads
from agent_tunix.errors import UserError, calling, named, reading, unparsed
from agent_tunix.files import LINE, lines, open_regular

Placed = Iterator[tuple[str, Any]]  # rows, each with where it is, as messages call it
Numbered = Iterator[tuple[int, Any]]
VALIDATION = ("validation", "valid", "val", "dev")  # what others call a split that is held out while training
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}\Z")  # of a split in several files, as the hub names them
NAMED = 6  # fields that a message lists
ROW = 256  # bytes that a row takes beside its texts
UNPACKED, MOST_UNPACKING = 2**26, 100  # bytes that the rows of any file may come to, and times its size that they may
EXTRA = "pip install 'agent-tunix[datasets]'"
SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}  # by Arrow's names


@dataclasses.dataclass(frozen=True)
class Row:
    """A question, its true answer, the worked answer that leads to it, where there is one, and all fields of the row.

    A prompt of several messages is in `messages`, and the last of the user's is the question.
    """

    question: str
    answer: str
    worked: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    messages: tuple[Mapping[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """How a row is read; `answer_pattern`'s first group cuts the final answer out of a worked one.

    Where an environment says what is solved a row needs no answer. Of all rows, those stay in whose answer field
    `keep_pattern` is found.
    """

    question_field: str
    answer_field: str
    answer_pattern: str | None
    skip_bad_rows: bool
    needs_answer: bool = True
    keep_pattern: str | None = None


def read_rows(
    place: str, subset: str | None, split: str, train_fraction: float, fmt: RowFormat
) -> tuple[list[Row], list[str]]:
    """The rows of a split, in an order that does not change, and what was wrong with those that were skipped.

    A row that is left out by `keep_pattern` leaves the others in their splits.
    """
    if split == "test":
        found = _open(place, subset, "test", fmt)
        if found is not None:
            rows, bad = _parse(*found, fmt)
            if not rows:
                raise UserError(f"{found[0]} has no row to test with; add some, or remove it: validation then stands in.")
            return _kept(rows, found[0], fmt), bad
    found = _open(place, subset, "train", fmt)
    if found is None:
        raise UserError(f"data.path={place}: no train split; in a folder it is train.jsonl, train.csv or train.parquet.")
    rows, bad = _parse(*found, fmt)
    random.Random(0).shuffle(rows)
    cut = round(len(rows) * train_fraction)
    return _kept(rows[:cut] if split == "train" else rows[cut:], found[0], fmt), bad


def _kept(rows: list[Row], place: str, fmt: RowFormat) -> list[Row]:
    if fmt.keep_pattern is None or not rows:
        return rows
    wanted = re.compile(fmt.keep_pattern)
    kept = [row for row in rows if wanted.search(str(row.fields.get(fmt.answer_field, "")))]
    if not kept:
        raise UserError(f"{place}: of {len(rows)} rows none has what data.keep_pattern={fmt.keep_pattern} looks for.")
    return kept


def _parse(place: str, placed: Placed, fmt: RowFormat) -> tuple[list[Row], list[str]]:
    rows, bad = [], []
    for where, raw in placed:
        try:
            rows.append(_row(raw, fmt))
        except ValueError as fault:
            if not fmt.skip_bad_rows:
                remedy = "Mend the row, or skip such rows with data.on_bad_row=skip."
                raise UserError(f"{where}: {fault}.\n{remedy}") from fault
            bad.append(f"{where}: {fault}")
    if bad and not rows:
        raise UserError(f"{place}: all {len(bad)} rows are malformed; {bad[0]}.")
    return rows, bad


def _row(raw: Any, fmt: RowFormat) -> Row:
    if isinstance(raw, bytes):
        try:
            raw = json.loads(raw.decode("utf-8-sig"))
        except UnicodeDecodeError as fault:
            raise ValueError(f"not UTF-8, in which the file is to be saved ({fault})") from fault
        except (ValueError, RecursionError) as fault:
            raise ValueError(f"not JSON ({unparsed(fault)})") from fault
    if not isinstance(raw, dict):
        raise ValueError("not a JSON object")
    whole = raw
    if None in raw:  # what the csv module calls a field beyond those of the first line
        beyond = str(raw[None][:NAMED])
        raise ValueError(f"more fields than the first line names; quote a text that has a comma ({beyond})")
    messages = _messages(raw, fmt.question_field)
    if messages:
        raw = {**raw, fmt.question_field: next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")}
    if not fmt.needs_answer and raw.get(fmt.answer_field) is None:
        return Row(str(raw.get(fmt.question_field, "")).strip(), "", fields=whole, messages=messages)
    for key, field in {"data.question_field": fmt.question_field, "data.answer_field": fmt.answer_field}.items():
        if field not in raw:
            named = ", ".join(map(str, raw)).encode(errors="backslashreplace").decode()
            raise ValueError(f"no field '{field}', which {key} names; the row has {named or 'no fields'}")
        if isinstance(raw[field], list | dict | bytes):
            raise ValueError(f"the field '{field}' holds a {type(raw[field]).__name__}, not a text or a number")
        if raw[field] is None or not str(raw[field]).strip():
            raise ValueError(f"the field '{field}' is empty")
        if isinstance(raw[field], float) and not math.isfinite(raw[field]):
            raise ValueError(f"the field '{field}' holds {raw[field]}, which is not a finite number")
    question, text = str(raw[fmt.question_field]).strip(), str(raw[fmt.answer_field]).strip()
    try:
        (question + text).encode()
    except UnicodeEncodeError as fault:
        raise ValueError(f"not text ({fault.reason})") from fault
    if fmt.answer_pattern is None:
        return Row(question, text, fields=whole, messages=messages)
    match = re.search(fmt.answer_pattern, text)
    if match is None or not (match.group(1) or "").strip():
        raise ValueError(f"the answer does not fit data.answer_pattern={fmt.answer_pattern}")
    return Row(question, match.group(1), _without_annotations(text[: match.start()]), whole, messages)


def _messages(raw: Mapping[str, Any], field: str) -> tuple[Mapping[str, str], ...]:
    """The messages that a field holds; none where it holds something else."""
    found = raw.get(field)
    if not isinstance(found, list) or not found or not all(isinstance(one, dict) for one in found):
        return ()
    if any(not isinstance(one.get("role"), str) or not isinstance(one.get("content"), str) for one in found):
        raise ValueError(f"a message of the field '{field}' has no role or no content")
    return tuple({"role": one["role"], "content": one["content"]} for one in found)


def _without_annotations(worked: str) -> str:
    """GSM8K's worked answers carry calculator marks such as <<3+4=7>>."""
    return re.sub(r"<<[^<>]*>>", "", worked).strip()


def _open(place: str, subset: str | None, name: str, fmt: RowFormat) -> tuple[str, Placed] | None:
    """What to call a split in messages, and its rows; None where the place has no such split."""
    if place.startswith(downloads.TFDS):
        return downloads.tfds_split(place, name)
    downloaded = place.startswith(downloads.KAGGLE)
    # as it is, where there is no such user
    path = downloads.kaggle_folder(place) if downloaded else Path(os.path.expanduser(place))
    if path.is_file():
        return (str(path), _read(path, fmt)) if name == "train" else None
    if path.is_dir():
        stems = {file: file.name.split(".")[0] for file in sorted(path.iterdir()) if _reader(file, fmt)}
        if subset and name not in stems.values() and f"{subset}_{name}" in stems.values():  # as Kaggle's GSM8K has them
            name = f"{subset}_{name}"
        files = [file for file, stem in stems.items() if SHARD.sub("", stem) == name]
        if files and not _all_parts([file.name[len(name) :] for file in files]):
            named = ", ".join(file.name for file in files)
            raise UserError(
                f"data.path={place}: its {name} split could be any of {named}; leave one of them, or all its parts."
            )
        rows = itertools.chain.from_iterable(_read(file, fmt) for file in files)
        return (", ".join(map(str, files)), rows) if files else None
    if not REPOSITORY.fullmatch(place) or _reader(path, fmt):
        raise UserError(f"data.path={place}: there is no such file or folder ({path.absolute()}).")
    return _from_hub(place, subset, name)


def held_out_apart(place: str, fmt: RowFormat) -> list[str]:
    """The files of a folder that are called a validation split, which is not read."""
    path = Path(os.path.expanduser(place))
    files = [file for file in sorted(path.iterdir()) if _reader(file, fmt)] if path.is_dir() else []
    return [file.name for file in files if SHARD.sub("", file.name.split(".")[0]) in VALIDATION]


def _all_parts(endings: list[str]) -> bool:
    """Whether files that are called a split, with these endings, are all its parts and nothing else; or the only one."""
    count, suffix = len(endings), endings[0].partition(".")[2]
    wanted = [f"-{part:05d}-of-{count:05d}.{suffix}" for part in range(count)]
    return endings == wanted or (count == 1 and SHARD.search(endings[0].partition(".")[0]) is None)


def _read(file: Path, fmt: RowFormat) -> Placed:
    reader = _reader(file, fmt)
    if reader is None:
        raise UserError(f"data.path={file}: the format is not known; give a .jsonl, .csv (both also .gz) or .parquet file.")
    with reading(f"data.path={file}"):
        try:
            yield from ((f"{file}, line {number}", raw) for number, raw in reader(file))
        except UnicodeDecodeError as fault:
            raise UserError(f"data.path={file} cannot be read: {fault}.\nSave it in UTF-8.") from fault


def _reader(file: Path, fmt: RowFormat) -> Callable[[Path], Numbered] | None:
    name = Path(file.name.lower())
    suffix = Path(name.stem).suffix if name.suffix == ".gz" else name.suffix
    parquet = partial(_parquet, wanted={fmt.question_field, fmt.answer_field})
    readers: dict[str, Callable[[Path], Numbered]] = {".jsonl": _jsonl, ".csv": _csv, ".parquet": parquet}
    return readers.get(suffix)


class Unpacked:
    """Counts what a file comes to: a small one can hold far more rows than the machine has room for."""

    def __init__(self, file: Path):
        self._most, self._sofar = max(UNPACKED, MOST_UNPACKING * file.stat().st_size), 0

    def add(self, size: int) -> None:
        self._sofar += size
        if self._sofar > self._most:
            raise ValueError(
                f"its rows come to more than {self._most:,} bytes, which is {MOST_UNPACKING} times its own size"
            )


def _lines(file: Path, opened: IO[AnyStr]) -> Iterator[AnyStr]:
    unpacked = Unpacked(file)
    for line in lines(opened):
        unpacked.add(ROW + len(line))
        yield line


def _bytes(file: Path) -> Any:
    opened = open_regular(file)
    return gzip.open(opened, "rb") if file.suffix.lower() == ".gz" else opened


def _jsonl(file: Path) -> Numbered:
    with _bytes(file) as raw:
        yield from ((number, line) for number, line in enumerate(_lines(file, raw), 1) if line.strip())


def _csv(file: Path) -> Numbered:
    with _bytes(file) as raw:
        csv.field_size_limit(LINE)  # a text may be long
        # Strict, as a quotation mark that is never closed would take all rows after it for one text.
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        reader = csv.DictReader(_lines(file, text), strict=True)
        try:
            _refuse_twins([name for name in reader.fieldnames or () if name])
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as fault:
            raise ValueError(f"after line {reader.line_num}: {fault}. Write quotation marks in a text twice.") from fault


def _refuse_twins(names: list[str]) -> None:
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"it has more than one field named '{twice[0]}'. Give each a name of its own.")


def _parquet(file: Path, wanted: set[str]) -> Numbered:
    """Rows with the wanted fields and the others of texts and numbers; what else there is may hold what Python cannot."""
    try:
        import pyarrow.parquet
    except ImportError as fault:
        raise UserError(f"data.path={file}: parquet files need pyarrow; {EXTRA}") from fault
    with open_regular(file) as raw:
        schema = pyarrow.parquet.read_schema(raw)
        _refuse_twins(schema.names)
        if not wanted <= set(schema.names):
            yield 1, dict.fromkeys(schema.names)
            return
        kinds = {field.name: field.type for field in schema if field.name in wanted or _is_plain(field.type)}
        for name in sorted(wanted):
            _refuse_others(name, kinds[name])
        short = {name: SHORT_FLOATS[str(kind)] for name, kind in kinds.items() if str(kind) in SHORT_FLOATS}

        def as_written(row: dict[str, Any]) -> dict[str, Any]:
            """Floats of 32 bits as they were written: Python would show 99.99 as 99.98999786376953."""
            return row | {name: float(str(of(row[name]))) for name, of in short.items() if row.get(name) is not None}

        # As dictionaries, texts that stand there many times are held once until they have been counted.
        table, unpacked = pyarrow.parquet.ParquetFile(raw, read_dictionary=[*kinds]), Unpacked(file)
        batches = table.iter_batches(columns=[*kinds])
        rows = (as_written(row) for batch in batches for row in _counted(batch, unpacked).to_pylist())
        yield from enumerate(rows, 1)


def _refuse_others(name: str, kind: Any) -> None:
    """Refuses a field of parquet that holds neither texts nor numbers, before any is read."""
    from pyarrow import types

    of = kind.value_type if types.is_dictionary(kind) else kind
    if not (_is_plain(kind) or types.is_temporal(of) or types.is_null(of)):
        raise ValueError(f"the field '{name}' holds {kind}, not a text or a number")


def _is_plain(kind: Any) -> bool:
    """Whether a field of parquet holds texts or numbers."""
    from pyarrow import types

    of = kind.value_type if types.is_dictionary(kind) else kind
    texts = types.is_string(of) or types.is_large_string(of)
    return texts or types.is_integer(of) or types.is_floating(of) or types.is_decimal(of) or types.is_boolean(of)


def _counted(batch: Any, unpacked: Unpacked) -> Any:
    from pyarrow import compute, types

    unpacked.add(ROW * len(batch))
    for column in batch.columns:
        if types.is_dictionary(column.type) and types.is_string(column.type.value_type):
            unpacked.add(compute.sum(compute.binary_length(column.dictionary).take(column.indices)).as_py() or 0)
    return batch


def _from_hub(repository: str, subset: str | None, name: str) -> tuple[str, Placed] | None:
    try:
        import datasets
    except ImportError as fault:
        raise UserError(
            f"data.path={repository}: there is no {Path(repository).absolute()}, and data sets of the hub need another "
            f"package; {EXTRA}\n"
            "Or give a file or folder that holds the data: data.path=<folder with train.jsonl and test.jsonl>"
        ) from fault
    with calling(lambda fault: UserError(_not_sent(repository, fault))):
        splits = datasets.load_dataset(repository, subset)
    if name not in splits:
        return None
    called = f"{repository} ({name})"
    return called, _rows_of(splits[name], called)


def _rows_of(split: Any, called: str) -> Placed:
    with reading(called):
        yield from ((f"{called}, line {number}", row) for number, row in enumerate(split, 1))


def _not_sent(repository: str, fault: BaseException) -> str:
    return (
        f"data.path={repository}: there is no {Path(repository).absolute()}, and the Hugging Face hub has not sent it "
        f"({named(fault)}).\n"
        "Or give a file or folder that holds the data: data.path=<folder with train.jsonl and test.jsonl>"
    )
