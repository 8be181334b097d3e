"""Tokenizers of Qwen, Llama and SmolLM: special tokens, ends, padding and templates, in folders and in GGUF files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from families_of_tokenizers import CHATML, LINES, llama, qwen, smollm, write
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import Tokenizer as Library

from agent_tunix.engine.sampler import Sampling
from agent_tunix.environments.stream import Example
from agent_tunix.errors import UserError
from agent_tunix.kernels.draw import draw_tokens
from agent_tunix.models.tokenizer import Tokenizer, load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files
from agent_tunix.training.data import demonstration_ids

MADE = {"qwen": qwen, "llama": llama, "smollm": smollm}
PRE = {"qwen": "qwen2", "llama": "llama-bpe", "smollm": "smollm"}
TEXTS = [*LINES, "", " ", "  a\n\n\nb\t12345.6 'LL don't", "<|im_start|>a<|im_end|><|eot_id|>", "e\u0301 \u200b½", "x" * 300]


def text_of(tokenizer: Tokenizer, number: int) -> str:
    return tokenizer._backend.text_of(number)


@pytest.fixture(scope="module", params=list(MADE))
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory) -> Path:
    return MADE[family](tmp_path_factory.mktemp("made") / family)


def test_texts_become_what_the_library_makes_of_them_and_come_back(folder):
    tokenizer, library = load_tokenizer(folder), Library.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.begun(text) == library.encode(text).ids
    assert tokenizer.encode_all(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert [tokenizer.decode(tokenizer.begun(text)) for text in LINES] == LINES


@pytest.mark.parametrize(
    ("family", "begin", "begins", "pad", "ends"),
    [
        ("qwen", None, False, "<|vision_pad|>", ["<|im_end|>", "<|endoftext|>"]),
        ("llama", "<|begin_of_text|>", True, "<|finetune_right_pad_id|>", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
        ("smollm", "<|im_start|>", False, "<empty_output>", ["<|im_end|>"]),
    ],
)
def test_the_special_tokens_of_each_family(tmp_path, family, begin, begins, pad, ends):
    tokenizer = load_tokenizer(MADE[family](tmp_path))
    assert (None if tokenizer.begin_id is None else text_of(tokenizer, tokenizer.begin_id), tokenizer.begins) == (
        begin,
        begins,
    )
    assert text_of(tokenizer, tokenizer.pad_id) == pad
    assert [text_of(tokenizer, i) for i in tokenizer.end_ids] == ends
    assert tokenizer.ending == ends[0]


def test_no_text_begins_twice(tmp_path):
    tokenizer = load_tokenizer(llama(tmp_path))
    asked = tokenizer.chat.prompt("Why?")
    assert tokenizer.begun(asked) == tokenizer.encode(asked)
    assert tokenizer.begun("Why?") == [tokenizer.begin_id, *tokenizer.encode("Why?")]


def test_every_end_can_be_drawn_and_padding_never(folder):
    """Qwen's padding is one of its ends: were it the sampler's padding, no model could end by it."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer.pad_id not in tokenizer.end_ids
    size = tokenizer._backend.size
    for wanted in (*tokenizer.end_ids, tokenizer.pad_id):
        logits = np.zeros((1, size), np.float32)
        logits[0, wanted] = 9.0
        token, _ = draw_tokens(logits, np.ones((1, 1)), np.full((1, 1), 0.5), k=1, top_p=1.0, pad_id=tokenizer.pad_id)
        assert (int(token[0]) == wanted) == (wanted != tokenizer.pad_id)
    Sampling(1, 1.0, 4, 1, tokenizer.end_ids, tokenizer.pad_id)


@pytest.mark.parametrize(
    ("special", "config", "pad"),
    [
        (["<|endoftext|>", "<|pad|>"], {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}, "<|pad|>"),
        (["<s>", "</s>", "<unk>"], {"eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}, "<unk>"),
        (["<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}, "<s>"),
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|endoftext|>"}, "<|im_start|>"),
    ],
)
def test_padding_is_a_token_that_no_model_has_to_say(tmp_path, special, config, pad):
    library = Library.from_file(str(smollm(tmp_path) / "tokenizer.json"))
    content = json.loads(library.to_str())
    first = len(content["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": first + i, "content": token, **flags} for i, token in enumerate(special)]
    tokenizer = load_tokenizer(write(tmp_path / "other", Library.from_str(json.dumps(content)), config))
    assert text_of(tokenizer, tokenizer.pad_id) == pad


def test_a_vocabulary_with_no_token_to_spare_gives_its_last(tmp_path):
    """As GPT-2's, whose only special token begins and ends texts."""
    library = Library.from_file(str(smollm(tmp_path) / "tokenizer.json"))
    content = json.loads(library.to_str()) | {"added_tokens": []}
    end = max(content["model"]["vocab"], key=content["model"]["vocab"].get)
    tokenizer = load_tokenizer(write(tmp_path / "other", Library.from_str(json.dumps(content)), {"eos_token": "!"}))
    assert text_of(tokenizer, tokenizer.pad_id) == end
    assert tokenizer.decode([tokenizer.pad_id]) != ""


def test_a_tokenizer_that_names_no_end_is_refused(tmp_path):
    library = Library.from_file(str(smollm(tmp_path) / "tokenizer.json"))
    content = json.loads(library.to_str()) | {"added_tokens": []}
    with pytest.raises(UserError, match=r"other names no token that ends a text"):
        load_tokenizer(write(tmp_path / "other", Library.from_str(json.dumps(content)), {"eos_token": None}))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"chat_template.jinja": "of jinja"}, "of jinja"),
        ({"chat_template.json": json.dumps({"chat_template": "of json"})}, "of json"),
        ({}, "of config"),
    ],
)
def test_a_template_is_found_wherever_transformers_finds_it(tmp_path, files, found):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    for told in ("of config", [{"name": "tools", "template": "no"}, {"name": "default", "template": "of config"}]):
        assert load_tokenizer(qwen(tmp_path, chat_template=told)).chat.prompt("Why?") == found
    assert tokenizer_files(tmp_path).keys() >= files.keys(), "it is exported as it is"


def test_templates_without_a_default_are_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer_config\.json has several chat templates, .* default: tools"):
        load_tokenizer(qwen(tmp_path, chat_template=[{"name": "tools", "template": "no"}]))


def test_a_template_that_fails_is_named_when_it_is_asked(tmp_path):
    tokenizer = load_tokenizer(qwen(tmp_path, chat_template="{% if %}"))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: the chat template fails: "):
        tokenizer.chat.prompt("Why?")


@pytest.mark.parametrize("family", ["qwen", "llama", "smollm"])
def test_a_model_without_a_template_has_the_turns_of_its_kind(tmp_path, family):
    with_template = load_tokenizer(MADE[family](tmp_path / "with"))
    without = load_tokenizer(MADE[family](tmp_path / "without", chat_template=None))
    for system in ("", "Be brief."):
        assert without.chat.prompt("Why?", system) == with_template.chat.prompt("Why?", system)
    assert without.end_ids == with_template.end_ids


def test_ends_come_from_all_files_that_name_some(tmp_path):
    folder = qwen(tmp_path, eos_token={"content": "<|object_ref_start|>"})
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 3, "text_config": {"eos_token_id": [4, 10**9, None]}}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    tokenizer = load_tokenizer(folder)
    named = [tokenizer.special[token] for token in ("<|object_ref_start|>", "<|im_end|>")]
    assert tokenizer.end_ids == (named[0], 5, 3, 4, named[1])


def test_a_demonstration_ends_with_the_families_own_token(folder):
    tokenizer = load_tokenizer(folder)
    ((*ids, last),) = demonstration_ids([Example("?", "7", (), "3+4=7")], tokenizer)
    assert last == tokenizer.end_ids[0]
    assert tokenizer.decode(ids) == "<reasoning>3+4=7</reasoning><answer>7</answer>"


def write_gguf(path: Path, folder: Path, family: str, pre: str | None = None) -> Path:
    """As llama.cpp's converter writes it."""
    library, tokenizer = Library.from_file(str(folder / "tokenizer.json")), load_tokenizer(folder)
    content, vocabulary = json.loads(library.to_str()), library.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or PRE[family])
    writer.add_token_list([*tokens, "[PAD999]"])
    writer.add_token_types([*(3 if token in tokenizer.special else 1 for token in tokens), 5])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.end_ids[0])
    if tokenizer.begin_id is not None:
        writer.add_bos_token_id(tokenizer.begin_id)
    if "pad_token" in tokenizer.names:
        writer.add_pad_token_id(tokenizer.special[tokenizer.names["pad_token"]])
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_holds_the_same_tokenizer(family, folder, tmp_path):
    of_folder, of_file = load_tokenizer(folder), load_tokenizer(write_gguf(tmp_path / "model.gguf", folder, family))
    for text in TEXTS:
        assert of_file.begun(text) == of_folder.begun(text)
    for system in ("", "Be brief."):
        assert of_file.chat.prompt("Why?", system) == of_folder.chat.prompt("Why?", system)
    assert set(of_folder.end_ids) <= set(of_file.end_ids)
    assert of_file.ending == of_folder.ending
    assert (of_file.pad_id, of_file.begin_id) == (of_folder.pad_id, of_folder.begin_id)


def test_a_gguf_of_another_way_to_cut_texts_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"model\.gguf: tokenizer\.ggml\.pre.* is viking; known are gpt-2, "):
        load_tokenizer(write_gguf(tmp_path / "model.gguf", folder, "", pre="viking"))


def test_what_is_exported_is_the_same_tokenizer(family, folder, tmp_path):
    for source in (folder, write_gguf(tmp_path / "model.gguf", folder, family)):
        before = load_tokenizer(source)
        (tmp_path / source.stem).mkdir()
        for name, content in tokenizer_files(source).items():
            (tmp_path / source.stem / name).write_bytes(content)
        after = load_tokenizer(tmp_path / source.stem)
        assert [after.begun(text) for text in TEXTS] == [before.begun(text) for text in TEXTS]
        assert after.chat.prompt("Why?", "Be brief.") == before.chat.prompt("Why?", "Be brief.")
        assert (after.end_ids, after.pad_id, after.begin_id) == (before.end_ids, before.pad_id, before.begin_id)


def test_a_folder_without_a_template_is_exported_with_the_turns_it_was_trained_in(tmp_path):
    folder = write(tmp_path, Library.from_file(str(qwen(tmp_path) / "tokenizer.json")), {})
    exported = json.loads(tokenizer_files(folder)["tokenizer_config.json"])
    assert "<|im_start|>" in exported["chat_template"]
    assert exported["chat_template"] != CHATML, "but ours, which says the same"


def test_a_gguf_of_sentencepieces_kind_cuts_texts_as_that_does(tmp_path):
    """As TinyLlama's: every text begins with a space, unknown characters are bytes, special tokens cut texts in parts."""
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*LINES, "  two  spaces    four"] * 20),
        model_writer=written,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue()).pieces
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece for piece in pieces])
    writer.add_token_scores([piece.score for piece in pieces])
    writer.add_token_types([piece.type for piece in pieces])
    for add, i in ((writer.add_unk_token_id, 0), (writer.add_bos_token_id, 1), (writer.add_eos_token_id, 2)):
        add(i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer, library = load_tokenizer(tmp_path / "model.gguf"), SentencePieceProcessor(model_proto=written.getvalue())
    for text in [*TEXTS, "  two   spaces     five", "☃ unknown", "\n\n"]:
        assert tokenizer.encode(text) == library.encode(text)
        assert tokenizer.begun(text) == [1, *library.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("Ann</s> has") == [*library.encode("Ann"), 2, *library.encode(" has")]
    assert (tokenizer.begin_id, tokenizer.end_ids, tokenizer.pad_id, tokenizer.chat.is_plain) == (1, (2,), 0, True)
    assert tokenizer.chat.prompt("Why?", "Be brief.") == "<s>Be brief.\n\nWhy?\n"
    assert {"tokenizer.model", "tokenizer.json"} <= tokenizer_files(tmp_path / "model.gguf").keys()
