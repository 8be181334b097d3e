from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from agent_tunix.environments import tables
from agent_tunix.environments.tables import Row, RowFormat, read_rows
from agent_tunix.errors import UserError

PLAIN = RowFormat("question", "answer", None, skip_bad_rows=False)
LENIENT = RowFormat("question", "answer", None, skip_bad_rows=True)
GSM8K = RowFormat("question", "answer", r"####\s*(.+?)\s*$", skip_bad_rows=False)
SPLITS = ("train", "validation", "test")


def lines(*rows) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def questions(place, split, fraction=0.7) -> list[str]:
    return [row.question for row in read_rows(str(place), None, split, fraction, PLAIN)[0]]


@pytest.fixture
def ten(tmp_path):
    """A file of ten rows."""
    path = tmp_path / "data.jsonl"
    path.write_text(lines(*({"question": f"q{i}", "answer": i} for i in range(10))))
    return path


def test_a_file_is_cut_into_training_and_validation_and_nothing_is_in_both(ten):
    train, validation, test = (questions(ten, split) for split in SPLITS)
    assert len(train) == 7
    assert sorted(train + validation) == [f"q{i}" for i in range(10)]
    assert test == validation
    assert train == questions(ten, "train")


def test_the_cut_does_not_follow_the_order_of_the_file(ten):
    assert questions(ten, "train") != [f"q{i}" for i in range(7)]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".CSV", ".JSONL.GZ"])
def test_a_folder_has_a_file_for_training_and_one_for_the_test(tmp_path, suffix):
    opener = gzip.open if suffix.lower().endswith(".gz") else open
    for name in ("train", "test"):
        with opener(tmp_path / f"{name}{suffix}", "wt", encoding="utf-8", newline="") as out:
            rows = [{"question": f"{name}, {i}", "answer": "ü"} for i in range(4)]
            if "csv" in suffix.lower():
                writer = csv.DictWriter(out, ["question", "answer"])
                writer.writeheader()
                writer.writerows(rows)
            else:
                out.write(lines(*rows))
    train, validation, test = (questions(tmp_path, split, 0.5) for split in SPLITS)
    assert sorted(train + validation) == [f"train, {i}" for i in range(4)]
    assert len(train) == len(validation) == 2
    assert test == [f"test, {i}" for i in range(4)]
    assert read_rows(str(tmp_path), None, "test", 0.5, PLAIN)[0][0].answer == "ü"


def test_a_split_may_lie_in_parts_as_the_hub_names_them(tmp_path):
    for split, parts in {"train": 3, "test": 1}.items():
        for part in range(parts):
            name = f"{split}-{part:05d}-of-{parts:05d}.jsonl"
            (tmp_path / name).write_text(lines({"question": f"{split}, {part}", "answer": "7"}))
    assert sorted(questions(tmp_path, "train", 1.0)) == ["train, 0", "train, 1", "train, 2"]
    assert questions(tmp_path, "test", 1.0) == ["test, 0"]
    with (tmp_path / "train-00001-of-00003.jsonl").open("a") as part:
        part.write("{}\n")
    with pytest.raises(UserError, match=r"^[^,]*train-00001-of-00003\.jsonl, line 2: no field"):
        questions(tmp_path, "train", 1.0)
    (tmp_path / "train-00001-of-00003.jsonl").unlink()
    for other in (None, "train-00007-of-00003.jsonl", "train-00000-of-00003.csv"):
        if other:
            (tmp_path / other).write_text(lines({"question": "other", "answer": "7"}))
        with pytest.raises(UserError, match="leave one of them, or all its parts"):
            questions(tmp_path, "train", 1.0)
        if other:
            (tmp_path / other).unlink()


def test_a_folder_with_two_files_for_one_split_is_refused(tmp_path):
    """One of them would be read, and the other not, without a word."""
    for name in ("train.csv", "train.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"its train split could be any of train\.csv, train\.jsonl"):
        read_rows(str(tmp_path), None, "train", 0.9, PLAIN)


def test_an_empty_file_for_the_test_is_named(tmp_path):
    """The share of rows that are trained on has nothing to do with it."""
    (tmp_path / "train.jsonl").write_text(lines({"question": "q", "answer": "1"}))
    (tmp_path / "test.csv").write_text("question,answer\n")
    with pytest.raises(UserError, match=r"test\.csv has no row to test with"):
        read_rows(str(tmp_path), None, "test", 0.5, PLAIN)


def test_a_row_keeps_all_its_fields(tmp_path):
    whole = {"question": "q1", "answer": "1", "level": 3, "tags": ["a", {"b": None}]}
    (tmp_path / "data.jsonl").write_text(json.dumps(whole))
    ((row,), _) = read_rows(str(tmp_path / "data.jsonl"), None, "train", 1.0, PLAIN)
    assert row.fields == whole


def test_a_row_of_parquet_keeps_its_texts_and_numbers(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"question": ["q1"], "answer": [1], "level": [2.5], "easy": [True], "nested": [{"a": 1}], "raw": [b"\xff"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "data.parquet")
    ((row,), _) = read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, PLAIN)
    assert row.fields == {"question": "q1", "answer": 1, "level": 2.5, "easy": True}


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    parquet.write_table(pyarrow.table({"question": ["q1", "q2"], "answer": [1, None]}), tmp_path / "data.parquet")
    rows, bad = read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, LENIENT)
    assert rows == [Row("q1", "1")]
    assert bad == [f"{tmp_path / 'data.parquet'}, line 2: the field 'answer' is empty"]


@pytest.mark.parametrize("unit", ["us", "ns"])
def test_a_field_that_is_not_asked_for_may_hold_what_python_cannot(tmp_path, unit):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    late = pyarrow.array([2**62], pyarrow.timestamp(unit))
    table = pyarrow.table(
        {"question": ["q1"], "answer": ["1"], "when": late, "score": pyarrow.array([0.1], pyarrow.float32())}
    )
    parquet.write_table(table, tmp_path / "data.parquet")
    rows, _ = read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, LENIENT)
    assert rows == [Row("q1", "1")]
    with pytest.raises(UserError, match=r"data\.parquet cannot be read"):
        read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, dataclasses.replace(PLAIN, answer_field="when"))


def test_a_small_file_that_comes_to_a_great_many_rows_is_refused(tmp_path, monkeypatch):
    """As gzip and parquet can hold them."""
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    same = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), pyarrow.array(["x" * 1000]))
    parquet.write_table(pyarrow.table({"question": same, "answer": same}), tmp_path / "data.parquet")
    row = lines({"question": "x" * 1000, "answer": "1"})
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(row.encode() * 2000))
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(b"question,answer\n" + b"x,1\n" * 10_000))
    for name in ("data.parquet", "data.jsonl.gz", "data.csv.gz"):
        assert read_rows(str(tmp_path / name), None, "train", 1.0, PLAIN)[0]
    monkeypatch.setattr(tables, "UNPACKED", 100_000)
    for name in ("data.parquet", "data.jsonl.gz", "data.csv.gz"):
        with pytest.raises(UserError, match=rf"{name} cannot be read: its rows come to more than .* 100 times its own size"):
            read_rows(str(tmp_path / name), None, "train", 1.0, PLAIN)


def test_a_field_of_lists_is_refused_before_it_is_read(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    for values in ([["1"]], [b"1"]):
        parquet.write_table(pyarrow.table({"question": ["q1"], "answer": values}), tmp_path / "data.parquet")
        with pytest.raises(UserError, match=r"the field 'answer' holds (list|binary).*, not a text or a number"):
            read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, PLAIN)


@pytest.mark.parametrize("of", [np.float16, np.float32, np.float64])
def test_a_number_of_few_bits_is_read_as_it_was_written(tmp_path, of):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    table = pyarrow.table({"question": ["q1", "q2"], "answer": pyarrow.array(np.array([99.9, 0.1], of))})
    parquet.write_table(table, tmp_path / "data.parquet")
    rows, _ = read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, LENIENT)
    assert [row.answer for row in rows] == ["99.9", "0.1"]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"agent-tunix\[datasets\]"):
        read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, PLAIN)


def test_a_hub_data_set_is_asked_for_by_name_and_subset(monkeypatch):
    asked = []

    def load_dataset(repository, subset):
        asked.append((repository, subset))
        return {"train": [{"question": "q", "answer": "a"}], "test": [{"question": "t", "answer": "b"}]}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert read_rows("owner/name", "main", "test", 0.9, PLAIN)[0] == [Row("t", "b")]
    assert read_rows("owner/name", "main", "train", 1.0, PLAIN)[0] == [Row("q", "a")]
    assert asked == [("owner/name", "main")] * 2


def test_a_hub_data_set_without_a_train_split_is_not_called_a_folder(monkeypatch):
    datasets = types.SimpleNamespace(load_dataset=lambda repository, subset: {"test": []})
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    with pytest.raises(UserError, match=r"data\.path=owner/name: no train split"):
        read_rows("owner/name", None, "train", 1.0, PLAIN)


def test_a_hub_that_does_not_answer_is_said_with_a_way_out(monkeypatch):
    def load_dataset(repository, subset):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    sought = re.escape(str(Path("owner/name").absolute()))  # which a folder may have been, from where a run was started
    with pytest.raises(UserError, match=rf"{sought}(.|\n)*ConnectionError: no route(.|\n)*data\.path=<folder"):
        read_rows("owner/name", None, "train", 1.0, PLAIN)


def test_without_the_datasets_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    sought = re.escape(str(Path("owner/name").absolute()))
    with pytest.raises(UserError, match=rf"{sought}(.|\n)*agent-tunix\[datasets\]"):
        read_rows("owner/name", None, "train", 1.0, PLAIN)


@pytest.mark.parametrize("place", ["nowhere.jsonl", "some/file.csv", "/nowhere/at/all", "./rows", "../rows"])
def test_a_missing_file_is_named(place):
    sought = re.escape(f"({Path(place).absolute()})")
    with pytest.raises(UserError, match=rf"data\.path={place}: there is no such file or folder {sought}"):
        read_rows(place, None, "train", 0.9, PLAIN)


def test_a_folder_without_data_and_a_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no train split; in a folder it is train\.jsonl"):
        read_rows(str(tmp_path), None, "train", 0.9, PLAIN)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match="format is not known"):
        read_rows(str(tmp_path / "notes.txt"), None, "train", 0.9, PLAIN)


BAD_ROWS = [
    ('{"question": "q"', "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ('{"question": "q"}', "no field 'answer', which data.answer_field names; the row has question"),
    ('{"question": "q", "answer": null}', "the field 'answer' is empty"),
    ('{"question": "  ", "answer": "a"}', "the field 'question' is empty"),
    ("{}", "no fields"),
    (r'{"\ud800": "q", "answer": "a"}', r"the row has \ud800, answer"),
    (b'{"question": "\xff", "answer": "a"}', "utf-8"),
    (r'{"question": "half of \ud83d", "answer": "a"}', "not text"),
    ('{"question": "q", "answer": NaN}', "'answer' holds nan, which is not a finite number"),
    ('{"question": "q", "answer": -1e999}', "'answer' holds -inf, which is not a finite number"),
    ('{"question": "q", "answer": {"value": 5}}', "'answer' holds a dict, not a text or a number"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("row", "fault"), BAD_ROWS, ids=lambda part: str(part)[:80])
def test_a_malformed_row_stops_with_its_line_and_fault_or_is_counted(tmp_path, row, fault):
    path = tmp_path / "data.jsonl"
    good = b'{"question": "q", "answer": "a"}\n'
    path.write_bytes(good + b"\n" + (row if isinstance(row, bytes) else row.encode()) + b"\n" + good)
    with pytest.raises(UserError) as stop:
        read_rows(str(path), None, "train", 1.0, PLAIN)
    for part in (f"{path}, line 3:", fault, "data.on_bad_row=skip"):
        assert part in str(stop.value)
    rows, bad = read_rows(str(path), None, "train", 1.0, LENIENT)
    assert rows == [Row("q", "a"), Row("q", "a")]
    assert len(bad) == 1
    assert bad[0].startswith(f"{path}, line 3: ")


def test_a_file_that_is_not_utf8_says_what_to_save_it_in(tmp_path):
    """As some editors and shells of Windows write it."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "q", "answer": "1"}\n', encoding="utf-16")
    with pytest.raises(UserError, match=r"rows.jsonl, line 1: not UTF-8, in which the file is to be saved \("):
        read_rows(str(file), None, "train", 1.0, PLAIN)


def test_a_short_row_of_a_csv_file_is_named_by_its_line(tmp_path):
    (tmp_path / "data.csv").write_text("question,answer\nq,a\nq2\n")
    with pytest.raises(UserError, match=r"data\.csv, line 3: the field 'answer' is empty"):
        read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, PLAIN)


def test_a_row_with_more_fields_than_names_is_malformed(tmp_path):
    """A comma that is not quoted would make a false answer."""
    (tmp_path / "data.csv").write_text("question,answer\na, b,1\n")
    with pytest.raises(UserError, match=r"data\.csv, line 2: more fields .*quote"):
        read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, PLAIN)


@pytest.mark.parametrize("cell", ['"2', '"2" inches'])
def test_a_stray_quotation_mark_does_not_swallow_the_rows_after_it(tmp_path, cell):
    (tmp_path / "data.csv").write_text(f"question,answer\na,1\nb,{cell}\nc,3\n")
    with pytest.raises(UserError, match=r"data\.csv cannot be read: after line 2: .*twice"):
        read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, LENIENT)


def test_a_csv_file_with_two_fields_of_one_name_is_refused(tmp_path):
    """The csv module would take the last; columns without a name, as a comma too many makes them, do no harm."""
    (tmp_path / "data.csv").write_text("question,answer,answer\na,1,2\n")
    with pytest.raises(UserError, match=r"data\.csv cannot be read: it has more than one field named 'answer'"):
        read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, LENIENT)
    (tmp_path / "data.csv").write_text("question,answer,,\na,1,,\n")
    assert len(read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, PLAIN)[0]) == 1


def test_a_parquet_file_of_two_fields_with_one_name_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extra `datasets`")
    import pyarrow

    table = pyarrow.table([["q"], ["1"], ["2"]], names=["question", "answer", "answer"])
    parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(UserError, match=r"data\.parquet cannot be read: it has more than one field named 'answer'"):
        read_rows(str(tmp_path / "data.parquet"), None, "train", 1.0, PLAIN)


def test_a_long_text_of_a_csv_file_is_read(tmp_path):
    (tmp_path / "data.csv").write_text(f"question,answer\n{'q' * 200_000},1\n")
    assert len(read_rows(str(tmp_path / "data.csv"), None, "train", 1.0, PLAIN)[0][0].question) == 200_000


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", '{"question": "q", "answer": "ü"}'), ("a.csv", "question,answer\nq,ü")]
)
def test_a_mark_of_the_byte_order_is_no_part_of_the_text(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_rows(str(tmp_path / name), None, "train", 1.0, PLAIN)[0] == [Row("q", "ü")]


@pytest.mark.parametrize(
    ("name", "content", "remedy"), [("a.csv", b"question,answer\nq,\xfc", "UTF-8"), ("a.parquet", b"no", "")]
)
def test_a_file_that_is_not_what_it_is_called_is_named(tmp_path, name, content, remedy):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name} cannot be read: .*(\n.*)*{remedy}"):
        read_rows(str(tmp_path / name), None, "train", 1.0, PLAIN)


def test_the_pattern_cuts_the_final_answer_out_of_a_worked_one(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(lines({"question": " q ", "answer": "3 + 4 = <<3+4=7>>7 eggs\n#### 1,007 \n"}))
    assert read_rows(str(path), None, "train", 1.0, GSM8K) == ([Row("q", "1,007", "3 + 4 = 7 eggs")], [])


def test_rows_are_kept_by_their_answers_and_no_row_changes_its_split(tmp_path):
    path, few = tmp_path / "data.jsonl", dataclasses.replace(GSM8K, keep_pattern=r"\A(?:[^<]*<<[^>]*>>){1,2}[^<]*\Z")
    path.write_text(
        lines(*({"question": f"q{n}", "answer": "1 + 1 = <<1+1=2>>2\n" * (n % 5) + "#### 2"} for n in range(50)))
    )
    for split in ("train", "validation", "test"):
        whole, kept = (read_rows(str(path), None, split, 0.8, fmt)[0] for fmt in (GSM8K, few))
        assert kept == [row for row in whole if row.worked.count("=") in (1, 2)]
        assert 0 < len(kept) < len(whole)
    with pytest.raises(UserError, match=r"of 40 rows none has what data\.keep_pattern=seven looks for"):
        read_rows(str(path), None, "train", 0.8, dataclasses.replace(GSM8K, keep_pattern="seven"))


@pytest.mark.parametrize("pattern", [r"####\s*(.+?)\s*$", "(x)?7", "#+(y)|7", "7(.*)"])
def test_an_answer_the_pattern_does_not_cut_is_a_malformed_row(tmp_path, pattern):
    path = tmp_path / "data.jsonl"
    path.write_text(lines({"question": "q", "answer": "7"}))
    with pytest.raises(UserError, match=r"line 1: the answer does not fit data\.answer_pattern"):
        read_rows(str(path), None, "train", 1.0, RowFormat("question", "answer", pattern, skip_bad_rows=False))


def test_a_prompt_of_messages_is_kept_and_its_last_question_is_the_rows(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": messages, "word": "so"}))
    fmt = RowFormat("prompt", "answer", None, skip_bad_rows=False, needs_answer=False)
    ((row,), _) = read_rows(str(tmp_path / "data.jsonl"), None, "train", 1.0, fmt)
    assert (row.question, row.answer, row.messages) == ("Why?", "", tuple(messages))
    assert row.fields == {"prompt": messages, "word": "so"}
    with pytest.raises(UserError, match="no field 'answer'"):
        read_rows(str(tmp_path / "data.jsonl"), None, "train", 1.0, dataclasses.replace(fmt, needs_answer=True))


def test_a_message_without_content_is_a_malformed_row(tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": [{"role": "user"}], "answer": "1"}))
    with pytest.raises(UserError, match="has no role or no content"):
        read_rows(str(tmp_path / "data.jsonl"), None, "train", 1.0, PLAIN)
