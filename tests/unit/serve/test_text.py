"""Tokens as text: piece by piece it is what all together are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.serve.text import Cut, Decoder, Vocabulary

sys.path.append(str(Path(__file__).parents[1] / "models"))
from families_of_tokenizers import QWEN, bpe, by, write

TEXTS = ["naïve 日本語 🎉 x", " 12 pears\n\n", "🎉🎉", "def f(x):\n    return x + 1"]


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    """A tokenizer whose tokens are bytes and few words, as those of Qwen."""
    folder = write(tmp_path_factory.mktemp("q"), bpe(by(QWEN), ["<|pad|>", "<|im_end|>"]), {"eos_token": "<|im_end|>"})
    return load_tokenizer(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_text_and_hold_no_half_characters(bytewise, text):
    decoder = Decoder(bytewise)
    pieces = [decoder.push(token) for token in bytewise.encode(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_in_the_end(bytewise):
    ids = bytewise.encode("🎉")[:-1]
    decoder = Decoder(bytewise)
    shown = "".join(map(decoder.push, ids)) + decoder.flush()
    assert shown == bytewise.decode(ids)
    assert "\ufffd" in shown


def test_tokens_within_a_text_keep_their_blanks(bytewise):
    text, vocabulary = "Ann has 12 pears", Vocabulary(bytewise)
    texts = [vocabulary.text(token) for token in bytewise.encode(text)]
    assert "".join(texts) == text
    assert any(one.startswith(" ") for one in texts)
    assert vocabulary.text(bytewise.end_ids[0]) == "<|im_end|>"


def test_pieces_of_the_shipped_tokenizer_add_up_too(tokenizer):
    ids, decoder = tokenizer.encode("Ben has 18 coins. How many"), Decoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_parts_of_characters_have_bytes_or_none(bytewise):
    vocabulary = Vocabulary(bytewise)
    whole = bytewise.encode("x")[0]
    assert vocabulary.bytes(whole) == [ord("x")]
    assert vocabulary.bytes(bytewise.encode("🎉")[0]) is None


def test_a_stop_string_is_found_across_pieces_and_what_only_begins_one_is_shown():
    cut = Cut(["END", "</a>"])
    assert [cut.push(part) for part in ("one E", "N", "x <", "/b", "> E", "ND more")] == [
        "one ",
        "",
        "ENx ",
        "</b",
        "> ",
        "",
    ]
    assert cut.stopped


def test_what_is_held_back_comes_at_the_end():
    cut = Cut(["stop"])
    assert cut.push("a sto") + cut.flush() == "a sto"
    assert not cut.stopped


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_text_is_cut_before_the_first_stop_string_however_it_comes(text, stops, data):
    cut, shown, left = Cut(stops), "", text
    while left and not cut.stopped:
        size = data.draw(st.integers(1, 5))
        shown, left = shown + cut.push(left[:size]), left[size:]
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert cut.stopped == bool(found)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not found:
        assert shown + cut.flush() == text
    else:
        assert text.startswith(shown)
        assert len(shown) < min(ends)
