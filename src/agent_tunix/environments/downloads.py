"""Data sets of Kaggle and of TensorFlow Datasets, as `data.path` names them.

kaggle:<owner>/<data set>   its files are downloaded once, and read as those of a folder
tfds:<name>                 read without TensorFlow, from its ArrayRecord files
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_tunix.errors import UserError, calling, named, reading

KAGGLE, TFDS = "kaggle:", "tfds:"
OR_A_FILE = "Or give a file or folder that holds the data: data.path=<folder with train.jsonl and test.jsonl>"
Placed = Iterator[tuple[str, Any]]


def kaggle_folder(place: str) -> Path:
    """Where the files of a data set of Kaggle lie; they are downloaded if they are not there."""
    handle = place.removeprefix(KAGGLE)
    try:
        import kagglehub
    except ImportError as fault:
        raise UserError(f"data.path={place} needs kagglehub: pip install 'agent-tunix[kaggle]'\n{OR_A_FILE}") from fault
    with calling(
        lambda fault: UserError(
            f"data.path={place}: Kaggle did not provide it ({named(fault)}).\n"
            f"Look at https://www.kaggle.com/datasets/{handle}, and put your API token where kagglehub looks.\n{OR_A_FILE}"
        )
    ):
        return Path(kagglehub.dataset_download(handle))


def tfds_split(place: str, name: str) -> tuple[str, Placed] | None:
    """What to call a split of TensorFlow Datasets in messages, and its rows; None where there is no such split."""
    data_set = place.removeprefix(TFDS)
    try:
        import tensorflow_datasets as tfds
    except ImportError as fault:
        raise UserError(f"data.path={place} needs another package: pip install 'agent-tunix[tfds]'\n{OR_A_FILE}") from fault
    with calling(lambda fault: UserError(f"data.path={place}: it could not be loaded ({named(fault)}).\n{OR_A_FILE}")):
        with contextlib.suppress(ImportError):  # of some that are kept apart, as GSM8K is, nothing is known until then
            importlib.import_module(f"tensorflow_datasets.text.{data_set}")
        builder = tfds.builder(data_set, file_format="array_record")  # the format that can be read without TensorFlow
        builder.download_and_prepare()
        if name not in builder.info.splits:
            return None
        source = builder.as_data_source(split=name)
    called = f"{place} ({name})"
    return called, _plain_rows(source, called)


def _plain_rows(source: Any, called: str) -> Placed:
    with reading(called):
        for number in range(len(source)):
            yield f"{called}, line {number + 1}", {key: _plain(value) for key, value in source[number].items()}


def _plain(value: Any) -> Any:
    """Texts come as bytes, and numbers as those of numpy."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode("utf-8") if isinstance(value, bytes) else value
