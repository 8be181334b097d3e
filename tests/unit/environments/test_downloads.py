"""Data sets of Kaggle and of TensorFlow Datasets, from stand-ins of what their libraries return."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from agent_tunix.environments.tables import RowFormat, read_rows
from agent_tunix.errors import UserError

GSM8K = RowFormat("question", "answer", r"####\s*(.+?)\s*$", skip_bad_rows=False)


def rows(place, split, subset="main"):
    return read_rows(place, subset, split, 0.5, GSM8K)[0]


@pytest.fixture
def kaggle(monkeypatch, tmp_path):
    """The files that GSM8K has there."""
    for name in ("main_train", "main_test", "socratic_train", "socratic_test"):
        lines = [f'"{name}, {i}?","so\n#### {i}"' for i in range(4)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["question,answer", *lines, ""]))
    asked = []

    def dataset_download(handle):
        asked.append(handle)
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "kagglehub", types.SimpleNamespace(dataset_download=dataset_download))
    return asked


def test_kaggles_files_are_read_as_those_of_a_folder(kaggle):
    place = "kaggle:thedevastator/grade-school-math-8k-q-a"
    train, test = rows(place, "train"), rows(place, "test")
    assert len(train) == 2
    assert {row.question.partition(",")[0] for row in train} == {"main_train"}
    assert [(row.question, row.answer, row.worked) for row in test][3] == ("main_test, 3?", "3", "so")
    assert {row.question.partition(",")[0] for row in rows(place, "test", "socratic")} == {"socratic_test"}
    assert set(kaggle) == {"thedevastator/grade-school-math-8k-q-a"}


@pytest.fixture
def tfds(monkeypatch):
    """GSM8K as it comes from there: texts are bytes."""
    made = {
        split: [{"question": f"{split}, {i}?".encode(), "answer": b"so\n#### 7", "number": np.int64(i)} for i in range(4)]
        for split in ("train", "test")
    }

    class Builder:
        info = types.SimpleNamespace(splits=made)

        def __init__(self, name, file_format):
            assert (name, file_format) == ("gsm8k", "array_record")
            self.prepared = False

        def download_and_prepare(self):
            self.prepared = True

        def as_data_source(self, split):
            assert self.prepared
            return made[split]

    monkeypatch.setitem(sys.modules, "tensorflow_datasets", types.SimpleNamespace(builder=Builder))
    return made


def test_tensorflows_texts_and_numbers_are_pythons(tfds):
    first, *_ = rows("tfds:gsm8k", "test")
    assert (first.question, first.answer, first.worked) == ("test, 0?", "7", "so")
    assert type(first.fields["number"]) is int
    assert len(rows("tfds:gsm8k", "train")) == 2


def test_without_a_test_split_validation_stands_in(tfds):
    del tfds["test"]
    assert rows("tfds:gsm8k", "test") == rows("tfds:gsm8k", "validation")


@pytest.mark.parametrize(("place", "package"), [("kaggle:a/b", "kagglehub"), ("tfds:gsm8k", "tensorflow_datasets")])
def test_a_package_that_is_missing_is_named_by_its_extra(monkeypatch, place, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"data\.path={place} needs(.|\n)*agent-tunix\[(kaggle|tfds)\]"):
        rows(place, "train")


def test_what_the_library_says_of_a_failure_is_told(monkeypatch):
    def fails(handle):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "kagglehub", types.SimpleNamespace(dataset_download=fails))
    with pytest.raises(UserError, match=r"Kaggle did not provide it \(ConnectionError: no route\)"):
        rows("kaggle:a/b", "train")
