"""The tokenizer of a .gguf file, as the files in which Hugging Face has it: so it is read and exported like any other.

llama.cpp keeps a list of tokens with their kinds, and either merges or scores. Merges (`gpt2`: byte-level BPE) become a
tokenizer.json. Scores (`llama`: SentencePiece) become a tokenizer.model and, but for Gemma, a tokenizer.json beside it. What
cuts a text into words before they are merged lies in llama.cpp's code, under a name; here it is as the models of that name
have it in their own tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from agent_tunix.errors import UserError, reading
from agent_tunix.models.checkpoints.gguf import header_field

JSON, MODEL, CONFIG, GENERATION = "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of token, numbered alike by SentencePiece and llama.cpp
GEMMA = {"pad": "<pad>", "eos": "<eos>", "bos": "<bos>", "unk": "<unk>"}  # the ids in the file say what llama.cpp stops at
IDS = {"pad": "padding_token_id", "eos": "eos_token_id", "bos": "bos_token_id", "unk": "unknown_token_id"}
# Tokens that end what a model says, wherever they are control tokens: llama.cpp knows them by name too.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>")
GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes it
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA = QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|")

Field = Callable[[str], Any]


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _by_pattern(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(False)]


BY_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(True)]
CUTS = {  # by `tokenizer.ggml.pre`
    "gpt-2": [_byte_level(True)],
    "default": [_byte_level(True)],
    "smollm": BY_DIGITS,
    "starcoder": BY_DIGITS,
    "refact": BY_DIGITS,
    "command-r": BY_DIGITS,
    "qwen2": _by_pattern(QWEN),
    "deepseek-r1-qwen": _by_pattern(QWEN),
    "llama-bpe": _by_pattern(LLAMA),
    "llama3": _by_pattern(LLAMA),
    "llama-v3": _by_pattern(LLAMA),
}
COMPOSED = ("qwen2", "deepseek-r1-qwen")  # those that bring a text into Unicode's form C first
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # those that take a word that is a token, whatever the merges say


def tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer, its names for special tokens, its chat template and its end tokens, each file by its name."""
    with reading(path, "delete it and download it again"):
        return _files(path, lambda key: header_field(path, f"tokenizer.{key}"))


def _files(path: Path, field: Field) -> dict[str, bytes]:
    kind, tokens, kinds = field("ggml.model"), field("ggml.tokens"), field("ggml.token_type")
    if not tokens or not kinds:
        raise UserError(f"{path} holds no tokenizer. Give a folder that has the model as Hugging Face does.")
    if kind not in ("gpt2", "llama", None):
        raise UserError(f"{path} has a tokenizer of kind {kind!s:.80}, which cannot be read; only gpt2 and llama can.")
    if len(set(tokens)) < len(tokens) or len(kinds) != len(tokens):
        raise ValueError("its tokens are not one of each, with a kind each")
    names = _names(field, tokens)
    begins = field("ggml.add_bos_token")
    begins = (kind != "gpt2" or field("ggml.pre") in WHOLE_WORDS) if begins is None else bool(begins)
    special = {token: i for i, token in enumerate(tokens) if kinds[i] == CONTROL or token == names.get("unk")}
    template = field("chat_template")
    config = {f"{name}_token": token for name, token in names.items()} | {"add_bos_token": begins}
    config |= {} if template is None else {"chat_template": template}
    plain = {token: i for i, token in enumerate(tokens) if kinds[i] == USER_DEFINED}
    in_order = sorted({**special, **plain}.items(), key=lambda entry: entry[1])
    added = [{"id": i, **_flags(token, token in special)} for token, i in in_order]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if kind == "gpt2":
        made = {JSON: _bpe(path, field, tokens, added, names.get("bos") if begins else None)}
    else:
        made = {MODEL: _sentencepiece(path, field, tokens, kinds, names)}
        if names == GEMMA:
            decoder = added_tokens(made[MODEL], {*names.values(), *GEMMA_TURNS})
            config |= {"tokenizer_class": "GemmaTokenizer", "added_tokens_decoder": decoder}
        else:
            made[JSON] = _scored_bpe(field, tokens, kinds, added, names, begins)
    made[CONFIG] = _json(config)
    ends: list[Any] = [field(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends += [special[token] for token in ENDS if token in special]
    found = [i for i in dict.fromkeys(ends) if isinstance(i, int) and 0 <= i < len(tokens)]
    return made | {GENERATION: _json({"eos_token_id": found})}


def _names(field: Field, tokens: list[str]) -> dict[str, str]:
    """The special tokens by their parts in a text: begin, end, padding, the unknown."""
    if set(GEMMA.values()) <= set(tokens):
        return GEMMA
    ids = {name: field(f"ggml.{key}") for name, key in IDS.items()}
    return {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def added_tokens(model: bytes, special: Collection[str]) -> dict[str, dict[str, Any]]:
    """Tokens of a SentencePiece model that are found in a text before it is cut into pieces, by their ids.

    llama.cpp's converter learns of them in tokenizer_config.json only.
    """
    from sentencepiece import sentencepiece_model_pb2

    pb: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    return {
        str(i): _flags(piece.piece, piece.piece in special)
        for i, piece in enumerate(pb.ModelProto.FromString(model).pieces)
        if piece.type in (CONTROL, USER_DEFINED) or piece.piece in special
    }


def _flags(token: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": token, **flags, "special": special}


def _bpe(path: Path, field: Field, tokens: list[str], added: list[dict[str, Any]], begin: str | None) -> bytes:
    """A tokenizer.json of byte-level BPE; `begin` is put in front of every text."""
    pre = field("ggml.pre")
    if pre not in CUTS:
        raise UserError(
            f"{path}: tokenizer.ggml.pre, how its tokenizer cuts texts into words, is {pre!s:.80}; known are "
            f"{', '.join(CUTS)}.\nGive a folder that has the model as Hugging Face does, with its tokenizer.json."
        )
    pairs = [merge.split(" ") for merge in field("ggml.merges") or ()]
    flags: dict[str, Any] = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
    }
    flags |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": pre in WHOLE_WORDS}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return _library_file(
        added,
        begin,
        {"type": "BPE", **flags, "vocab": vocabulary, "merges": pairs},
        normalizer={"type": "NFC"} if pre in COMPOSED else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": CUTS[pre]},
        decoder=_byte_level(True),
    )


def _library_file(added: list[dict[str, Any]], begin: str | None, model: dict[str, Any], **steps: Any) -> bytes:
    """A tokenizer.json, with its model and the steps around it; `begin` is put in front of every text."""
    around = None
    if begin is not None:
        one, other = ({"Sequence": {"id": part, "type_id": i}} for i, part in enumerate("AB"))
        first, second = ({"SpecialToken": {"id": begin, "type_id": i}} for i in range(2))
        known = {begin: {"id": begin, "ids": [model["vocab"][begin]], "tokens": [begin]}}
        parts = {"single": [first, one], "pair": [first, one, second, other]}
        around = {"type": "TemplateProcessing", **parts, "special_tokens": known}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": around}
    return _json({**whole, **steps, "model": model})


def _scored_bpe(
    field: Field, tokens: list[str], kinds: list[int], added: list[Any], names: dict[str, str], begins: bool
) -> bytes:
    """A tokenizer.json that does what the SentencePiece model does: of all pairs that make a token, the best first.

    transformers would make one of the model by itself, which merges runs of spaces in another order.
    """
    scores, prefix = field("ggml.scores"), field("ggml.add_space_prefix") is not False
    vocabulary = {token.replace(" ", SPACE): i for i, token in enumerate(tokens)}
    pairs: list[tuple[float, str, str]] = []
    for token, i in vocabulary.items():
        if kinds[i] == NORMAL:
            halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            there = [(a, b) for a, b in halves if a in vocabulary and b in vocabulary]
            pairs += [
                (scores[i], a, b) for a, b in sorted(there, key=lambda half: (vocabulary[half[0]], vocabulary[half[1]]))
            ]
    flags: dict[str, Any] = {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags |= {"unk_token": names["unk"], "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    merges = [[a, b] for _, a, b in sorted(pairs, key=lambda pair: -pair[0])]
    space, mark = {"String": " "}, {"String": SPACE}
    replaced = {"type": "Replace", "pattern": space, "content": SPACE}
    shown = [{"type": "Replace", "pattern": mark, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    return _library_file(
        added,
        names["bos"] if begins else None,
        {"type": "BPE", **flags, "vocab": vocabulary, "merges": merges},
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}] * prefix + [replaced]},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": shown + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix,
        },
    )


def _sentencepiece(path: Path, field: Field, tokens: list[str], kinds: list[int], names: dict[str, str]) -> bytes:
    """A SentencePiece model, rebuilt from the file's tokens, scores and kinds."""
    from sentencepiece import sentencepiece_model_pb2

    pb: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    scores = field("ggml.scores")
    if not scores or not {"bos", "eos", "unk"} <= names.keys():
        raise UserError(f"{path} holds no SentencePiece tokenizer with its tokens for begin, end and the unknown.")
    model = pb.ModelProto()
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if token == names["unk"]:
            kind = UNKNOWN
        elif kind == CONTROL and token not in names.values():
            kind = USER_DEFINED  # llama.cpp marks all special tokens as control, SentencePiece only these
        model.pieces.add(piece=token.replace(" ", SPACE), score=score, type=kind)
    spec = model.trainer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size, spec.pad_id = pb.TrainerSpec.BPE, True, len(tokens), -1
    for name, token in names.items():
        setattr(spec, f"{name}_piece", token)
        setattr(spec, f"{name}_id", tokens.index(token))
    prefix = field("ggml.add_space_prefix")
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = not GEMMA.items() <= names.items() if prefix is None else bool(prefix)
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def _json(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()
