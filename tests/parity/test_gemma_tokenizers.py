"""SentencePiece and the tokenizer.json that transformers makes of it agree, on all of GSM8K's questions and on oddities."""

import gzip
import json
import shutil

import pytest
from transformers import GemmaTokenizer

from agent_tunix.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.parity
ODD = [
    "",
    " ",
    " \n",
    "\t\ttab\n\n\n\nx",
    "naïve 日本語 🎉 \r\n x\u200bz ﬁ ½",
    "<bos>a<pad>b<eos>",
    "<b>x</b></table>",
    "▁",
    "1,234.50",
]


@pytest.fixture(scope="module")
def both(data, tmp_path_factory):
    piece, converted = tmp_path_factory.mktemp("piece"), tmp_path_factory.mktemp("json")
    shutil.copy(data / "gemma3_tokenizer" / "tokenizer.model", piece)
    (piece / "tokenizer_config.json").write_text('{"tokenizer_class": "GemmaTokenizer"}')
    GemmaTokenizer.from_pretrained(piece).save_pretrained(converted)
    assert not (converted / "tokenizer.model").exists()
    return load_tokenizer(piece), load_tokenizer(converted)


def test_all_questions_agree(both, data):
    piece, converted = both
    lines = [
        line
        for name in ("train", "test")
        for line in gzip.decompress((data / "gsm8k" / f"{name}.jsonl.gz").read_bytes()).splitlines()
    ]
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 8792
    for row in rows:
        text = piece.chat.prompt(row["question"], "Think.\n\n\n Then  answer.")
        ids = piece.encode(text)
        assert ids == converted.encode(text)
        assert piece.decode(ids) == converted.decode(ids)


@pytest.mark.parametrize("text", ODD)
def test_odd_texts_agree(both, text):
    piece, converted = both
    assert piece.encode(text) == converted.encode(text)
    assert piece.decode(piece.encode(text)) == converted.decode(converted.encode(text))


def test_control_tokens(both):
    for tokenizer in both:
        assert tokenizer.encode("<start_of_turn>user\n\n") == [105, 2364, 108]
        assert (tokenizer.pad_id, tokenizer.begin_id, tokenizer.unknown_id, tokenizer.end_ids) == (0, 2, 3, (1, 106))
