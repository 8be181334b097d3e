"""Tokenizers of all three sources: control tokens in the text, text given back, what is broken named."""

import base64
import io
import json
from unittest.mock import Mock

import gguf
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb
from tokenizers import Tokenizer as Backend

from agent_tunix.errors import UserError
from agent_tunix.models.chat import Turns
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.models.tokenizer_files import tokenizer_files

TEXTS = [
    "ann has 12 pears and bob has 30",
    "  two  spaces and a\nnew line\n\n",
    "<bos><start_of_turn>user\nthink first\n\nhow many pears has ann<end_of_turn>\n<start_of_turn>model\n",
    "a byte apart: ½ ☃",
]


@pytest.fixture(scope="module")
def model() -> bytes:
    """A small SentencePiece model with Gemma's settings."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ann has 12 pears and bob has 30", "how many pears has ann in all", "think first"] * 20),
        model_writer=written,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        split_digits=True,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        user_defined_symbols=["<start_of_turn>", "<end_of_turn>", "\n", "\n\n", "▁▁"],
        minloglevel=2,
    )
    return written.getvalue()


@pytest.fixture(scope="module")
def tokenizer(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.model").write_bytes(model)
    return load_tokenizer(folder)


def write_gguf(path, model: bytes):
    """As llama.cpp's converter writes it: special tokens are control, runs of spaces are spaces, some ids are left out."""
    pieces = pb.ModelProto.FromString(model).pieces
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_token_list([p.piece.replace("▁", " ") if p.piece == "▁▁" else p.piece for p in pieces])
    writer.add_token_scores([-1000.0 if p.type != 1 else p.score for p in pieces])
    writer.add_token_types([3 if "<" in p.piece and p.type != 6 else p.type for p in pieces])
    writer.add_eos_token_id(next(i for i, p in enumerate(pieces) if p.piece == "<end_of_turn>"))  # as chat models do
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "damage",
    [
        {"add_token_scores": lambda scores: scores[:-1]},
        {"add_token_types": lambda types: [*types[:-1], 99]},
        {"add_token_scores": lambda scores: ["?"] * len(scores)},
        {"add_token_list": lambda tokens: [[token] for token in tokens]},
        {"add_token_list": lambda tokens: range(len(tokens))},
    ],
)
def test_a_gguf_whose_tokens_are_damaged_is_named(tmp_path, model, monkeypatch, damage):
    for name, change in damage.items():
        whole = getattr(gguf.GGUFWriter, name)
        monkeypatch.setattr(
            gguf.GGUFWriter, name, lambda self, values, whole=whole, change=change: whole(self, change(values))
        )
    path = write_gguf(tmp_path / "bad.gguf", model)
    with pytest.raises(UserError, match=r"bad\.gguf (is damaged or half downloaded|holds no)"):
        load_tokenizer(path)


def test_text_comes_back(tokenizer):
    for text in TEXTS:
        shown = text.replace("<end_of_turn>", "").replace("<bos>", "")
        assert tokenizer.decode(tokenizer.encode(text)) == shown


def test_control_tokens_in_the_text_are_those_tokens(tokenizer):
    ids = tokenizer.encode("<bos>ann<end_of_turn>\n<eos><pad><unk>")
    assert ids[0] == tokenizer.begin_id
    assert ids[-3:] == [1, 0, 3]
    assert tokenizer.end_ids[1] in ids
    assert tokenizer.decode(ids) == "ann\n" + tokenizer.decode([3])


def test_many_texts_at_once_are_each_by_itself(tokenizer):
    texts = [*TEXTS, "<bos>ann<end_of_turn>\n<eos><pad><unk>", "", TEXTS[0]]
    for one in (tokenizer, load_tokenizer(find_checkpoint("package:tiny"))):
        assert one.encode_all(texts) == [one.encode(text) for text in texts]
        assert one.encode_all([]) == []


def test_a_file_that_asks_for_padding_and_cutting_gives_whole_texts(tmp_path):
    """As the trainers of other libraries save it."""
    backend = Backend.from_file(str(find_checkpoint("package:tiny") / "tokenizer.json"))
    backend.enable_padding()
    backend.enable_truncation(4)
    backend.save(str(tmp_path / "tokenizer.json"))
    texts = ["Ann has 12 pears.", "Ann"]
    assert load_tokenizer(tmp_path).encode_all(texts) == load_tokenizer(find_checkpoint("package:tiny")).encode_all(texts)


def write_json(folder, **changes):
    """The tokenizer of the demo with some of its parts exchanged."""
    content = json.loads((find_checkpoint("package:tiny") / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | changes))
    return folder


def test_a_vocabulary_without_its_word_for_the_unknown_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(write_json(tmp_path, model={"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}))


def test_what_only_a_text_finds_wrong_is_named_too(tmp_path):
    """A Unigram model without unk_id, until it meets what it does not know."""
    vocab = [[token, 0.0] for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>", "?")]
    tokenizer = load_tokenizer(write_json(tmp_path, model={"type": "Unigram", "unk_id": None, "vocab": vocab}))
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_all([text])):
        with pytest.raises(UserError, match=r"tokenizer\.json is damaged .*unk_id"):
            encode("Ann")


def replacing(*contents: str, **pattern: str) -> dict:
    replaced = [{"type": "Replace", "pattern": pattern or {"String": "n"}, "content": content} for content in contents]
    return {"type": "Sequence", "normalizers": replaced, "decoders": replaced}


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_a_tokenizer_that_makes_texts_far_longer_is_refused(tmp_path, place):
    """As a chain of replacements does, by which a short text takes all memory."""
    for few in (replacing("▁", "nn"), replacing(" ", Regex=" {2,}")):
        load_tokenizer(write_json(tmp_path, **{place: few}))
    for many in (replacing(*["n" * 10] * 3), replacing("n" * 200, Regex="")):
        with pytest.raises(UserError, match=r"tokenizer\.json .*times longer"):
            load_tokenizer(write_json(tmp_path, **{place: many}))


def test_a_map_of_characters_to_long_texts_is_refused(tmp_path, model):
    """In a tokenizer.json, and in a SentencePiece model, whose library has the same."""
    charsmap = (0).to_bytes(4, "little") + b"a\0" + b"n" * 200 + b"\0"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(write_json(tmp_path, normalizer=normalizer))
    (tmp_path / "tokenizer.json").unlink()
    for change in ({"normalizer_spec": charsmap}, {"denormalizer_spec": charsmap}, {"trainer_spec": "?" * 200}):
        proto = pb.ModelProto.FromString(model)
        for spec, value in change.items():
            setattr(getattr(proto, spec), "unk_surface" if spec == "trainer_spec" else "precompiled_charsmap", value)
        (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
        with pytest.raises(UserError, match=r"tokenizer\.model .*times longer"):
            load_tokenizer(tmp_path)


def test_what_a_file_puts_around_texts_is_left_out(tmp_path):
    """It could repeat a text a thousand times."""
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around = {"type": "TemplateProcessing", "single": [text] * 1000, "pair": [text], "special_tokens": {}}
    assert load_tokenizer(write_json(tmp_path, post_processor=around)).encode("Ann has 12") == load_tokenizer(
        find_checkpoint("package:tiny")
    ).encode("Ann has 12")


@pytest.mark.parametrize("place", ["pre_tokenizer", "decoder"])
def test_a_panic_of_the_library_is_a_message_without_pages_of_its_own(tmp_path, capfd, place):
    """Its search gives up on patterns that can be tried in too many ways."""
    pattern = {"Regex": "(a|aa)+$"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    replace = {"type": "Replace", "pattern": pattern, "content": "a"}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens = json.loads((find_checkpoint("package:tiny") / "tokenizer.json").read_text())["added_tokens"]
    long = {"id": 47, "content": "a" * 60 + "b", **added}
    parts = {"pre_tokenizer": {"pre_tokenizer": split}, "decoder": {"decoder": replace, "added_tokens": [*tokens, long]}}
    tokenizer = load_tokenizer(write_json(tmp_path, **parts[place]))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged .*retry-limit"):
        tokenizer.decode([47]) if place == "decoder" else tokenizer.encode(long["content"])
    assert capfd.readouterr() == ("", "")


def test_a_panic_that_is_no_exception_is_a_message(tmp_path, monkeypatch):
    """It is no `Exception`."""
    tokenizer = load_tokenizer(write_json(tmp_path))._backend

    class PanicError(BaseException):
        pass

    monkeypatch.setattr(tokenizer, "_library", Mock(decode=Mock(side_effect=PanicError("no entry found for key"))))
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged .*no entry found for key"):
        tokenizer.decode([5])


def test_nothing_is_put_in_front(tokenizer):
    assert tokenizer.begin_id not in tokenizer.encode("ann")
    assert tokenizer.encode("ann has") == tokenizer.encode("ann") + tokenizer.encode(" has")


def test_spare_rows_of_the_embedding_decode_to_nothing(tokenizer):
    assert tokenizer.decode([*tokenizer.encode("ann"), 262_200]) == "ann"


def test_gguf_holds_the_same_tokenizer(tokenizer, model, tmp_path):
    inside = load_tokenizer(write_gguf(tmp_path / "model.gguf", model))
    assert inside.end_ids == tokenizer.end_ids
    for text in [*TEXTS, "<bos>ann<unk>"]:
        assert inside.encode(text) == tokenizer.encode(text)
        assert inside.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_a_gguf_without_a_tokenizer_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=r"bare\.gguf holds no tokenizer"):
        load_tokenizer(tmp_path / "bare.gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(UserError, match=name):
        load_tokenizer(tmp_path)


def test_no_tokenizer_is_explained(tmp_path):
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_orbax_finds_it_beside_the_folder(tmp_path, model, tokenizer):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "gemma-3").mkdir()
    (tmp_path / "gemma-3" / "_METADATA").write_text("{}")
    assert load_tokenizer(tmp_path / "gemma-3").encode("ann") == tokenizer.encode("ann")


def test_files_to_export_name_the_tokens_that_are_written_out(tmp_path, model, tokenizer):
    files = tokenizer_files(write_gguf(tmp_path / "model.gguf", model))
    (tmp_path / "tokenizer.model").write_bytes(files["tokenizer.model"])
    for text in TEXTS:
        assert load_tokenizer(tmp_path).encode(text) == tokenizer.encode(text)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == list(tokenizer.end_ids)
    added = json.loads(files["tokenizer_config.json"])["added_tokens_decoder"]
    found = {token["content"]: token["special"] for token in added.values()}
    assert all(found[token] for token in ("<start_of_turn>", "<bos>", "<unk>"))
    assert found["\n\n"] is found["▁▁"] is False
    assert "ann" not in found


def test_files_of_a_folder_are_exported_as_they_are(tmp_path, model):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"mine": 1}')
    (tmp_path / "chat_template.jinja").write_text("mine")
    (tmp_path / "optimizer.pt").write_text("not a tokenizer")
    files = tokenizer_files(tmp_path)
    assert files["tokenizer_config.json"] == b'{"mine": 1}'
    assert set(files) == {"tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"}


def test_the_shipped_checkpoint_lacks_nothing_that_an_export_of_it_has():
    """Without tokenizer_config.json transformers would take it for a tokenizer of Gemma's own kind."""
    folder = find_checkpoint("package:tiny")
    files = tokenizer_files(folder)
    assert json.loads(files["tokenizer_config.json"])["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert files == {name: (folder / name).read_bytes() for name in files if (folder / name).exists()}


def test_the_shipped_checkpoint_is_asked_without_jinja2():
    """Which takes longer to import than a demo's questions take to be written."""
    assert isinstance(load_tokenizer(find_checkpoint("package:tiny")).chat.template, Turns)


def test_a_broken_file_beside_an_orbax_checkpoint_is_named(tmp_path):
    (tmp_path / "gemma-3").mkdir()
    (tmp_path / "gemma-3" / "_METADATA").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(UserError, match=rf"^{tmp_path}/tokenizer\.json is damaged"):
        load_tokenizer(tmp_path / "gemma-3")


def test_a_pretrained_model_is_exported_with_the_turns_that_it_has_learnt(tmp_path, model, tokenizer):
    """Its own files know one end, that of a text, and no template."""
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text('{"mine": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "top_k": 64, "_from_model_config": true}')
    files = {name: json.loads(content) for name, content in tokenizer_files(tmp_path).items() if name.endswith("json")}
    assert files["generation_config.json"]["eos_token_id"] == list(tokenizer.end_ids)
    assert files["generation_config.json"]["top_k"] == 64
    assert "_from_model_config" not in files["generation_config.json"]
    assert files["tokenizer_config.json"]["mine"] == 1
    assert "<start_of_turn>" in files["tokenizer_config.json"]["chat_template"]


def test_a_broken_file_to_export_is_named(tmp_path, model):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        tokenizer_files(tmp_path)


@pytest.mark.parametrize(
    "added",
    [
        {"tokenizer_config.json": {"added_tokens_decoder": {"400": {"content": "", "special": True}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": {"-1": {"content": "<x>", "special": True}}}},
        {"tokenizer_config.json": {"added_tokens_decoder": [1]}},
        {"added_tokens.json": {"<x>": 10**12}},
        {"added_tokens.json": {"<x>": None}},
        {"added_tokens.json": []},
    ],
)
def test_added_tokens_that_have_no_place_are_refused(tmp_path, model, added):
    (tmp_path / "tokenizer.model").write_bytes(model)
    for name, content in added.items():
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"\.json is damaged"):
        load_tokenizer(tmp_path)


def test_special_tokens_that_a_sentencepiece_model_has_got_later_are_found(tmp_path, model, tokenizer):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 500, "<|im_end|>": 501}')
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    later = load_tokenizer(tmp_path)
    assert later.encode("ann<|im_end|> has") == [*tokenizer.encode("ann"), 501, *tokenizer.encode(" has")]
    assert later.end_ids[0] == 501
    assert later.decode([501, *tokenizer.encode("ann")]) == "ann"
