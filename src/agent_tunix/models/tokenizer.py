"""Text to tokens and back, from a `tokenizer.json` (tokenizers), a SentencePiece `tokenizer.model` or a .gguf file.

All give the same tokens. A control token that a text spells out, as Gemma's chat turns do, becomes that token.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from agent_tunix.console import PanicsUnheard
from agent_tunix.errors import UserError, reading
from agent_tunix.files import TOKENIZER, read_bytes
from agent_tunix.models.checkpoints.gguf import GgufFile
from agent_tunix.models.checkpoints.orbax import is_orbax

PAD, END, BEGIN, UNKNOWN, END_OF_TURN = "<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"
START_OF_TURN = "<start_of_turn>"
MOST_GROWTH = 128  # times that a text may become longer before it is cut into tokens
JSON, MODEL = "tokenizer.json", "tokenizer.model"


class Tokenizer(Protocol):
    """`encode` puts no begin token in front by itself. `encode_all` is the same for many texts, on all cores of the machine.
    `decode` leaves the control tokens out.
    """

    pad_id: int
    begin_id: int
    unknown_id: int
    end_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class JsonTokenizer:
    """A `tokenizer.json`, by Hugging Face's tokenizers. That it is damaged may show only at some text."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Backend

        self._path = path
        with _reading(path), PanicsUnheard():
            self._backend = Backend.from_buffer(read_bytes(path, TOKENIZER))
            self._backend.no_padding()  # which the file of a model that was trained elsewhere may ask for
            self._backend.no_truncation()
            self._backend.post_processor = None  # no token is put around a text here
            _refuse_growth([self._backend.normalizer, self._backend.pre_tokenizer], self._backend.decoder)
            self._backend.encode("?")  # which a vocabulary that lacks its own token for the unknown may not have
        searches = self._backend.decoder is not None and b"Regex" in self._backend.decoder.__getstate__()
        self._decoding = PanicsUnheard() if searches else contextlib.nullcontext()  # by far most calls need no more
        self.pad_id, self.begin_id, self.unknown_id, *ends = (
            _required(self._backend.token_to_id(token), token, path) for token in (PAD, BEGIN, UNKNOWN, END, END_OF_TURN)
        )
        self.end_ids = tuple(ends)
        self._control = {self.pad_id, self.begin_id, *ends}

    def encode(self, text: str) -> list[int]:
        with _reading(self._path), PanicsUnheard():
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        with _reading(self._path), PanicsUnheard():
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        with _reading(self._path), self._decoding:
            return self._backend.decode([i for i in ids if i not in self._control], skip_special_tokens=False)


class SentencePieceTokenizer:
    """A SentencePiece model, by Google's sentencepiece."""

    def __init__(self, model: bytes, path: Path):
        from sentencepiece import SentencePieceProcessor

        self._path = path
        with _reading(path):
            _refuse_long_surfaces(model)
            self._backend = SentencePieceProcessor(model_proto=model)
        self._size = self._backend.get_piece_size()
        known = {self._backend.id_to_piece(i): i for i in range(min(1024, self._size))}
        names = (PAD, BEGIN, UNKNOWN, END, END_OF_TURN)
        self._named = {token: _required(known.get(token), token, path) for token in names}
        self.pad_id, self.begin_id, self.unknown_id, *ends = self._named.values()
        self.end_ids = tuple(ends)
        self._control = {self.pad_id, self.begin_id, *ends}
        self._cut = re.compile(f"({'|'.join(map(re.escape, names))})")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._cut.split(text):  # sentencepiece does not look for control tokens in a text
            with _reading(self._path):
                ids += [self._named[part]] if part in self._named else self._backend.encode(part)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [self._cut.split(text) for text in texts]
        plain = list({part for parts in cut for part in parts} - self._named.keys())
        ids = {token: [number] for token, number in self._named.items()}
        with _reading(self._path):
            ids |= zip(plain, self._backend.encode(plain), strict=True)
        return [[number for part in parts for number in ids[part]] for parts in cut]

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves out ids past the vocabulary too: the embedding of larger models has spare rows."""
        with _reading(self._path):
            return self._backend.decode([i for i in ids if i not in self._control and i < self._size])


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint; Kaggle puts that of an Orbax folder beside it."""
    if checkpoint.suffix == ".gguf":
        return SentencePieceTokenizer(GgufFile(checkpoint).tokenizer_model(), checkpoint)
    for folder in (checkpoint, checkpoint.parent) if is_orbax(checkpoint) else (checkpoint,):
        if (folder / JSON).exists():
            return JsonTokenizer(folder / JSON)
        if (folder / MODEL).exists():
            with _reading(folder / MODEL):
                return SentencePieceTokenizer(read_bytes(folder / MODEL, TOKENIZER), folder / MODEL)
    raise UserError(f"{checkpoint} holds neither {JSON} nor {MODEL}; copy the model's tokenizer there.")


def _refuse_growth(before: Sequence[Any], after: Any) -> None:
    """Refuses steps around the model that could make a text many times longer, as a chain of replacements can."""
    for steps in (before, [after]):
        growth = math.prod(_growth(json.loads(step.__getstate__())) for step in steps if step is not None)
        if growth > MOST_GROWTH:
            raise ValueError(f"it could make a text {growth:.2g} times longer")


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer a text may become by a step of tokenizers."""
    if step["type"] == "Sequence":
        return math.prod(
            _growth(part) for name in ("normalizers", "pretokenizers", "decoders") for part in step.get(name, ())
        )
    if step["type"] == "Replace":
        content, found = step["content"], step["pattern"].get("String")  # a regular expression may find an empty text
        return max(1.0, len(content) / len(found)) if found else 1.0 + len(content)
    if step["type"] == "Prepend":
        return 1.0 + len(step["prepend"])
    if step["type"] == "Precompiled":
        return 1.0 + _longest(base64.b64decode(step["precompiled_charsmap"]))
    return 2.0 if step["type"] == "ByteLevel" else 1.0


def _refuse_long_surfaces(model: bytes) -> None:
    """As `_refuse_growth`, for a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2

    pb: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    whole = pb.ModelProto.FromString(model)
    maps = (whole.normalizer_spec.precompiled_charsmap, whole.denormalizer_spec.precompiled_charsmap)
    growth = max(*map(_longest, maps), len(whole.trainer_spec.unk_surface))
    if growth > MOST_GROWTH:
        raise ValueError(f"it could make a text {growth} times longer")


def _longest(charsmap: bytes) -> int:
    """The length of the longest text in SentencePiece's map of characters to texts: a trie, then texts that end in zeros."""
    trie = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + trie :].split(b"\0")))


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "download it again")


def _required(token_id: int | None, token: str, path: Path) -> int:
    if token_id is None:
        raise UserError(f"{path} has no token {token}: it is not a tokenizer of the Gemma family.")
    return token_id
