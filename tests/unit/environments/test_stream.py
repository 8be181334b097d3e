from __future__ import annotations

from unittest.mock import Mock

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from agent_tunix.environments.stream import (
    LONGEST_QUESTION,
    Example,
    Stream,
    arithmetic_rows,
    batches,
    left_pad,
    right_pad,
    tokenize,
)
from agent_tunix.environments.tables import Row
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.tokenizer import load_tokenizer


def examples(count: int) -> list[Example]:
    return [Example(str(i), str(i), (i,)) for i in range(count)]


def test_prompts_over_the_limit_are_dropped_and_counted():
    rows = [Row("ab", "1"), Row("abcdef", "2")]
    prompt = "<bos><start_of_turn>user\nab<end_of_turn>\n<start_of_turn>model\n"
    shortest = len(prompt)
    by_letters = Mock(chat=load_tokenizer(find_checkpoint("package:tiny")).chat)
    by_letters.encode_all = lambda texts: [[ord(c) for c in text] for text in texts]
    kept, dropped = tokenize(rows, by_letters, "", None, shortest)
    assert [(e.question, e.answer) for e in kept] == [("ab", "1")]
    assert kept[0].prompt_ids == tuple(map(ord, prompt))
    assert len(kept[0].prompt_ids) == shortest
    assert dropped == 1


def test_a_question_of_megabytes_is_dropped_unread():
    read = []
    tokenizer = Mock(encode_all=lambda texts: read.extend(texts) or [[1] for _ in texts])
    tokenizer.chat.prompt = lambda question, system, thinking: question
    kept, dropped = tokenize([Row("short", "1"), Row("x" * (LONGEST_QUESTION + 1), "2")], tokenizer, "", None, 8)
    assert ([example.question for example in kept], dropped, read) == (["short"], 1, ["short"])


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


def test_further_batches_are_others_and_follow_from_seed_and_position():
    stream = Stream(list(range(20)), 4, 5, seed=0)
    own, rounds = stream.batch(3), [stream.further(3, round) for round in (1, 2, 3, 4)]
    drawn = [example for batch in rounds for example in batch]
    assert len(set(drawn)) == 16
    assert not set(drawn) & set(own)
    assert rounds[1] == Stream(list(range(20)), 4, 5, seed=0).further(3, 2)
    assert stream.further(2, 1) != rounds[0] != Stream(list(range(20)), 4, 5, seed=1).further(3, 1)


def test_a_data_set_of_one_batch_gives_it_again():
    stream = Stream(list(range(4)), 4, 1, seed=0)
    assert sorted(stream.further(0, 1)) == sorted(stream.further(0, 2)) == [0, 1, 2, 3]
