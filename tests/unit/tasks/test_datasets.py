from __future__ import annotations

import gzip
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from agent_tunix.errors import UserError
from agent_tunix.tasks.datasets import (
    Example,
    Row,
    RowFormat,
    Stream,
    arithmetic_rows,
    batches,
    file_rows,
    left_pad,
    right_pad,
    tokenize,
)

PLAIN = RowFormat("question", "answer", None, skip_bad_rows=False)
LENIENT = RowFormat("question", "answer", None, skip_bad_rows=True)
GSM8K = RowFormat("question", "answer", r"####\s*(.+?)\s*$", skip_bad_rows=False)


def lines(*rows) -> str:
    return "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def examples(count: int) -> list[Example]:
    return [Example(str(i), str(i), (i,)) for i in range(count)]


@pytest.fixture
def file(tmp_path):
    """Ten rows."""
    path = tmp_path / "data.jsonl"
    path.write_text(lines(*({"question": f"q{i}", "answer": i} for i in range(10))))
    return str(path)


def test_a_file_is_cut_into_training_and_validation_and_nothing_is_in_both(file):
    train, validation, test = (file_rows(file, split, 0.7, PLAIN)[0] for split in ("train", "validation", "test"))
    assert [row.question for row in train] == [f"q{i}" for i in range(7)]
    assert [row.question for row in validation] == ["q7", "q8", "q9"]
    assert test == validation
    assert train[3] == Row("q3", "3")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_folder_has_a_file_for_training_and_one_for_the_test(tmp_path, suffix):
    opener = gzip.open if suffix else open
    for name in ("train", "test"):
        with opener(tmp_path / f"{name}.jsonl{suffix}", "wt", encoding="utf-8") as out:
            out.write(lines(*({"question": f"{name} {i}", "answer": "ü"} for i in range(4))))
    train, validation, test = (file_rows(str(tmp_path), split, 0.5, PLAIN)[0] for split in ("train", "validation", "test"))
    assert [row.question for row in train + validation] == ["train 0", "train 1", "train 2", "train 3"]
    assert len(train) == len(validation) == 2
    assert [row.question for row in test] == ["test 0", "test 1", "test 2", "test 3"]
    assert test[0].answer == "ü"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.path=.*nowhere.*train\.jsonl"):
        file_rows(str(tmp_path / "nowhere"), "train", 0.9, PLAIN)


BAD_ROWS = [
    ('{"question": "q"', "not JSON"),
    ("[1, 2]", "not a JSON object"),
    ('{"question": "q"}', "no field 'answer'; the row has question"),
    ('{"question": "q", "answer": null}', "no field 'answer'"),
    ('{"question": "  ", "answer": "a"}', "no field 'question'"),
    ("{}", "no fields"),
    (b'{"question": "\xff", "answer": "a"}', "utf-8"),
]


@pytest.mark.parametrize(("row", "fault"), BAD_ROWS, ids=str)
def test_a_malformed_row_stops_with_its_line_and_fault_or_is_counted(tmp_path, row, fault):
    path = tmp_path / "data.jsonl"
    good = b'{"question": "q", "answer": "a"}\n'
    path.write_bytes(good + b"\n" + (row if isinstance(row, bytes) else row.encode()) + b"\n" + good)
    with pytest.raises(UserError) as stop:
        file_rows(str(path), "train", 1.0, PLAIN)
    for part in (f"{path}, line 3:", fault, "data.on_bad_row=skip"):
        assert part in str(stop.value)
    assert file_rows(str(path), "train", 1.0, LENIENT) == ([Row("q", "a"), Row("q", "a")], 1)


def test_the_pattern_cuts_the_final_answer_out_of_a_worked_one(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(lines({"question": " q ", "answer": "3 + 4 = 7\n#### 1,007 \n"}))
    assert file_rows(str(path), "train", 1.0, GSM8K) == ([Row("q", "1,007")], 0)


@pytest.mark.parametrize("pattern", [r"####\s*(.+?)\s*$", "(x)?7", "#+(y)|7"])
def test_an_answer_the_pattern_does_not_cut_is_a_malformed_row(tmp_path, pattern):
    path = tmp_path / "data.jsonl"
    path.write_text(lines({"question": "q", "answer": "7"}))
    with pytest.raises(UserError, match=r"line 1: the answer does not fit data\.answer_pattern"):
        file_rows(str(path), "train", 1.0, RowFormat("question", "answer", pattern, skip_bad_rows=False))


def test_prompts_over_the_limit_are_dropped_and_counted():
    rows = [Row("ab", "1"), Row("abcdef", "2")]
    shortest = len("<start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n") + 1
    kept, dropped = tokenize(rows, lambda text: [ord(c) for c in text], 2, "", shortest)
    assert [(e.question, e.answer) for e in kept] == [("ab", "1")]
    assert kept[0].prompt_ids[:2] == (2, ord("<"))
    assert len(kept[0].prompt_ids) == shortest
    assert dropped == 1


def test_arithmetic_rows_are_generated_for_the_split():
    rows = arithmetic_rows("validation", 5, seed=3)
    assert len(rows) == 5
    assert rows == arithmetic_rows("validation", 5, seed=3)
    assert all(row.answer.isdigit() for row in rows)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
def test_no_example_comes_twice_in_an_epoch(batch_size, batches_per_epoch, spare, epoch):
    stream = Stream(examples(batch_size * batches_per_epoch + spare), batch_size, batches_per_epoch, seed=0)
    seen = [e for i in range(batches_per_epoch) for e in stream.batch(epoch * batches_per_epoch + i)]
    assert len(seen) == len(set(seen)) == batch_size * batches_per_epoch


def test_each_epoch_and_each_seed_has_its_own_order_and_a_position_its_batch():
    def epoch(seed, number):
        stream = Stream(examples(20), 5, 4, seed)
        return [e.question for i in range(4) for e in stream.batch(4 * number + i)]

    orders = [tuple(epoch(seed, number)) for seed in (0, 1) for number in (0, 1, 2)]
    assert len(set(orders)) == 6
    assert all(sorted(order, key=int) == [str(i) for i in range(20)] for order in orders)
    stream = Stream(examples(20), 5, 4, 0)
    backwards = [stream.batch(i) for i in reversed(range(8))][::-1]
    assert backwards == [stream.batch(i) for i in range(8)]


def test_batches_go_through_all_examples_in_order():
    assert [[e.question for e in batch] for batch in batches(examples(5), 2)] == [["0", "1"], ["2", "3"], ["4"]]


def test_padding_lies_left_of_prompts_and_right_of_completions():
    prompts = left_pad([(5, 6, 7), (8,)], 4, pad_id=0)
    np.testing.assert_array_equal(prompts.tokens_PS, [[0, 5, 6, 7], [0, 0, 0, 8]])
    np.testing.assert_array_equal(prompts.positions_PS, [[-1, 0, 1, 2], [-1, -1, -1, 0]])
    tokens, mask = right_pad([(5, 6, 7), (8,)], 4, pad_id=0)
    np.testing.assert_array_equal(tokens, [[5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("pad", [left_pad, right_pad])
def test_a_sequence_wider_than_the_batch_is_a_fault(pad):
    with pytest.raises(ValueError, match="broadcast"):
        pad([(1, 2, 3)], 2, pad_id=0)
