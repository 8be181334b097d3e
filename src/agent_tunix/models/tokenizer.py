"""Text to tokens and back, from a `tokenizer.json` (tokenizers), a SentencePiece `tokenizer.model` or a .gguf file.

All give the same tokens. A control token that a text spells out, as chat turns do, becomes that token.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from agent_tunix import files as bounds
from agent_tunix.console import PanicsUnheard
from agent_tunix.errors import UserError, reading
from agent_tunix.files import read_bytes
from agent_tunix.models.chat import TURN_TOKENS, Chat, template_of, turns_of
from agent_tunix.models.checkpoints import gguf_tokenizer
from agent_tunix.models.checkpoints.orbax import is_orbax

PAD, END, BEGIN, UNKNOWN, END_OF_TURN = "<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"
START_OF_TURN = "<start_of_turn>"
MOST_GROWTH = 128  # times that a text may become longer before it is cut into tokens
MOST_TOKENS = 2**24
JSON, MODEL, MODEL_CONFIG = "tokenizer.json", "tokenizer.model", "config.json"
CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
NAMES, ADDED = "special_tokens_map.json", "added_tokens.json"
TEMPLATE, TEMPLATE_IN_JSON = "chat_template.jinja", "chat_template.json"
COPIED = (JSON, MODEL, CONFIG, GENERATION, NAMES, ADDED, TEMPLATE, TEMPLATE_IN_JSON)  # what belongs to a tokenizer
# What special tokens are called where no file says it.
USUAL = {
    "bos_token": (BEGIN, "<|begin_of_text|>", "<s>"),
    "eos_token": (END, "<|end_of_text|>", "<|endoftext|>", "</s>"),
    "unk_token": (UNKNOWN,),
    "pad_token": (PAD,),
}
UNUSED = ("pad", "reserved", "unused")  # in the name of a special token that no text has


class Tokenizer:
    """A checkpoint's tokenizer, its special tokens, and how it is asked in a chat.

    `begin_id` and `unknown_id` are None where there is no such token: Qwen's have no begin, and what works on bytes knows
    every text. `begins` says whether every text begins with the first, as `begun` writes it; `encode` puts nothing in front.

    `end_ids` are all that end what a model says: those that the checkpoint names, and the one that its chat template writes
    behind an assistant's words. `ending` is that one as text, with what the template writes before it.

    `pad_id` fills up short sequences. The sampler never draws it, so it must not be a token that a model has to say. It is
    the one that the checkpoint names, unless that ends a text too, as those of Qwen and SmolLM do: a model that may not say
    it could not end by it. Then it is a special token that no text has: one that is named for padding, or reserved; else
    that for the unknown; else one that the chat template does not write, or any other that ends nothing. A vocabulary
    without such a token gives its last, which is its rarest.

    `special` has all special tokens with their ids, and `names` those that transformers has a name for, as eos_token.
    `byte_level` says whether words are made of bytes; such a tokenizer has no SentencePiece model.
    """

    def __init__(self, backend: _Backend, files: _Files):
        self._backend, self.special = backend, backend.special
        names = self.names = files.special_tokens(backend.special)
        self.byte_level = backend.byte_level
        begin, end, unknown, padding = (names.get(name) for name in USUAL)
        self.begin_id, self.unknown_id = self._id(begin), None if self.byte_level else self._id(unknown)
        self.begins = self.begin_id is not None and files.begins(backend.begins(begin))
        found = files.template()
        has = [token for token in TURN_TOKENS if self._id(token) is not None]
        template = template_of(*found, names) if found else turns_of(has, begin or "", self.begins)
        self.chat = Chat(template)
        self.ending = self.chat.ending({*backend.special, *has, *([end] if end else [])})
        ends = [self._id(end), *files.end_ids(), self._id(self.ending.strip() or None)]
        self.end_ids = tuple(dict.fromkeys(i for i in ends if i is not None and 0 <= i < backend.size))
        if not self.end_ids:
            raise UserError(
                f"{files.place} names no token that ends a text, so nothing would ever end.\n"
                f'Put it into {CONFIG} beside it, as in {{"eos_token": "</s>"}}.'
            )
        self.ending = self.ending or backend.text_of(self.end_ids[0])
        self.pad_id = self._padding(padding)
        control = (self.begin_id, self.pad_id, *self.end_ids)
        self._control = {i for i in control if i in self.end_ids or i in self.special.values()}

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for many texts, on all cores of the machine."""
        return self._backend.encode_all(texts)

    def begun(self, text: str) -> list[int]:
        """The tokens of a text by itself: after the one that begins every text, where there is such a one.

        A text that spells it at its beginning, as many chat turns do, does not begin twice.
        """
        ids = self.encode(text)
        return [self.begin_id, *ids] if self.begins and self.begin_id is not None and ids[:1] != [self.begin_id] else ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without those that begin, end and fill up texts."""
        return self._backend.decode([i for i in ids if i not in self._control])

    def name_of(self, token: int) -> str:
        """A token as the vocabulary has it, which may write blanks and bytes in a way of its own."""
        return self._backend.text_of(token)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._backend.id_of(token)

    def _padding(self, named: str | None) -> int:
        """See the class."""
        special = self.special

        def candidates() -> Iterable[int | None]:
            yield from map(self._id, (named, *USUAL["pad_token"]))
            yield from (number for word in UNUSED for token, number in special.items() if word in token.lower())
            yield self.unknown_id
            with contextlib.suppress(UserError):
                asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
                written = self.chat.template.write(asked, True, None)
                yield from (number for token, number in reversed(special.items()) if token not in written)

        found = [i for i in candidates() if i is not None and i not in self.end_ids]
        others = [*special.values(), self._backend.size - 1]
        return next(i for i in [*(i for i in found if i != self.begin_id), *found, *others] if i not in self.end_ids)


class _Backend(Protocol):
    """`special` has the tokens that stand for themselves wherever a text spells them, by their texts."""

    size: int
    special: dict[str, int]
    byte_level: bool

    def id_of(self, token: str) -> int | None: ...

    def text_of(self, number: int) -> str: ...

    def begins(self, begin: str | None) -> bool | None:
        """Whether it puts that token in front of every text; None where it does not say."""

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class _Json:
    """A `tokenizer.json`, by Hugging Face's tokenizers. That it is damaged may show only at some text."""

    def __init__(self, content: bytes, path: Path):
        from tokenizers import Tokenizer as Library

        self._path = path
        with _reading(path), PanicsUnheard():
            self._library = Library.from_buffer(content)
            self._library.no_padding()  # which the file of a model that was trained elsewhere may ask for
            self._library.no_truncation()
            around, self._library.post_processor = self._library.post_processor, None  # nothing is put around a text here
            self._around = json.loads(around.__getstate__()) if around is not None else None
            _refuse_growth([self._library.normalizer, self._library.pre_tokenizer], self._library.decoder)
            self._library.encode("?")  # which a vocabulary that lacks its own token for the unknown may not have
            added = self._library.get_added_tokens_decoder()
            self.special = {token.content: i for i, token in sorted(added.items()) if token.special}
            self.size = max([self._library.get_vocab_size(), *(i + 1 for i in added)])  # there may be gaps
            cut = self._library.pre_tokenizer
            self.byte_level = cut is not None and b"ByteLevel" in cut.__getstate__()
        searches = self._library.decoder is not None and b"Regex" in self._library.decoder.__getstate__()
        self._decoding = PanicsUnheard() if searches else contextlib.nullcontext()  # by far most calls need no more

    def id_of(self, token: str) -> int | None:
        return self._library.token_to_id(token)

    def text_of(self, number: int) -> str:
        return self._library.id_to_token(number) or ""

    def begins(self, begin: str | None) -> bool | None:
        return None if self._around is None else any(first == begin for first in _put_in_front(self._around))

    def encode(self, text: str) -> list[int]:
        with _reading(self._path), PanicsUnheard():
            return self._library.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        with _reading(self._path), PanicsUnheard():
            return [encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        with _reading(self._path), self._decoding:
            return self._library.decode(ids, skip_special_tokens=False)


def _put_in_front(around: Mapping[str, Any]) -> list[str]:
    """The tokens that a post-processor of tokenizers puts in front of a text."""
    if around["type"] == "Sequence":
        return [token for part in around["processors"] for token in _put_in_front(part)]
    first = (around.get("single") or [{}])[0] if around["type"] == "TemplateProcessing" else {}
    return [first["SpecialToken"]["id"]] if "SpecialToken" in first else []


class _SentencePiece:
    """A SentencePiece model, by Google's sentencepiece. It does not look for control tokens in a text: they are cut out.

    `added` are special tokens that a model has got later, some past the model's own.
    """

    byte_level = False

    def __init__(self, model: bytes, path: Path, added: Mapping[str, int]):
        from sentencepiece import SentencePieceProcessor

        self._path = path
        with _reading(path):
            _refuse_long_surfaces(model)
            self._library = SentencePieceProcessor(model_proto=model)
        self._pieces = self._library.get_piece_size()
        self.size = max([self._pieces, *(i + 1 for i in added.values())])
        first = {i: self._library.id_to_piece(i) for i in range(min(1024, self._pieces))}
        known = {name: i for i, name in first.items() if self._library.is_control(i) or self._library.is_unknown(i)}
        known |= {name: i for name in (END_OF_TURN, START_OF_TURN) if (i := self._id(name)) is not None}
        self.special = dict(sorted({**known, **added}.items(), key=lambda entry: entry[1]))
        longest_first = sorted(self.special, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _id(self, token: str) -> int | None:
        number = self._library.piece_to_id(token)
        return number if self._library.id_to_piece(number) == token else None

    def id_of(self, token: str) -> int | None:
        return self.special.get(token, self._id(token))

    def text_of(self, number: int) -> str:
        names = {i: token for token, i in self.special.items()}
        return names.get(number) or self._library.id_to_piece(number)

    def begins(self, begin: str | None) -> bool | None:
        return True  # unless its configuration says otherwise, as transformers has it

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in filter(None, self._cut.split(text)):
            with _reading(self._path):
                ids += [self.special[part]] if part in self.special else self._library.encode(part)
        return ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        cut = [self._cut.split(text) for text in texts]
        plain = list({part for parts in cut for part in parts if part} - self.special.keys())
        ids = {token: [number] for token, number in self.special.items()} | {"": []}
        with _reading(self._path):
            ids |= zip(plain, self._library.encode(plain), strict=True)
        return [[number for part in parts for number in ids[part]] for parts in cut]

    def decode(self, ids: Sequence[int]) -> str:
        """Leaves out ids past the vocabulary too: the embedding of larger models has spare rows."""
        with _reading(self._path):
            return self._library.decode([i for i in ids if i < self._pieces])


@dataclasses.dataclass(frozen=True)
class _Files:
    """What a checkpoint's files say of its tokenizer. `place` is the folder, or the file that holds all."""

    contents: Mapping[str, bytes]
    place: Path

    def at(self, name: str) -> Path:
        """Where a file lies: in the folder, beside that of an Orbax checkpoint, or in the file that holds all."""
        found = [folder / name for folder in (self.place, self.place.parent) if (folder / name).exists()]
        return found[0] if found and self.place.is_dir() else self.place

    def parsed(self, name: str) -> dict[str, Any]:
        """A file that holds an object; an empty one where there is no such file."""
        with _reading(self.at(name)):
            found = json.loads(self.contents.get(name, b"{}"))
            if not isinstance(found, dict):
                raise TypeError(f"{name} holds no object")
            return found

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.parsed(CONFIG)

    def special_tokens(self, there: Collection[str]) -> dict[str, str]:
        """By transformers' names: as the files say, or as they are usually called where the files do not say."""
        given = {**self.parsed(NAMES), **self.config}
        names: dict[str, str] = {}
        for name in dict.fromkeys((*USUAL, *(key for key in given if key.endswith("_token")))):
            token = given[name] if name in given else next((usual for usual in USUAL[name] if usual in there), None)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                names[name] = token
        return names

    def begins(self, by_itself: bool | None) -> bool:
        told = self.config.get("add_bos_token")
        return told if isinstance(told, bool) else bool(by_itself)

    def template(self) -> tuple[str, str] | None:
        """The chat template, and the file where it stands."""
        if TEMPLATE in self.contents:
            with _reading(self.at(TEMPLATE)):
                return self.contents[TEMPLATE].decode(), str(self.at(TEMPLATE))
        for name in (TEMPLATE_IN_JSON, CONFIG):
            found = self.parsed(name).get("chat_template")
            if isinstance(found, list):
                named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
                found = named.get("default")
                if not isinstance(found, str):
                    raise UserError(
                        f"{self.at(name)} has several chat templates, and none that is called default: "
                        f"{', '.join(map(str, named))}.\nPut the one that is to be used into {TEMPLATE} beside it."
                    )
            if isinstance(found, str):
                return found, str(self.at(name))
        return None

    def end_ids(self) -> list[int]:
        """The tokens that end a text, by the files that say how the model is to be used."""
        model = self.parsed(MODEL_CONFIG)
        inner = model.get("text_config")
        found: list[Any] = []
        for part in (self.parsed(GENERATION), model, inner if isinstance(inner, dict) else {}):
            told = part.get("eos_token_id")
            found += told if isinstance(told, list) else [told]
        return [i for i in found if isinstance(i, int)]

    def added(self) -> dict[str, int]:
        """Special tokens that a SentencePiece model has got later."""
        told: dict[str, int] = {}
        with _reading(self.at(CONFIG)):
            decoder = (self.config.get("added_tokens_decoder") or {}).items()
            told |= _placed((token["content"], i) for i, token in decoder if token.get("special"))
        with _reading(self.at(ADDED)):
            return told | _placed(self.parsed(ADDED).items())


def _placed(tokens: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Tokens with their ids, which must be such."""
    found = {token: int(i) for token, i in tokens}
    if wrong := [token for token, i in found.items() if not token or not 0 <= i < MOST_TOKENS]:
        raise ValueError(f"{wrong[0]!r} has no place among the tokens")
    return found


def own_files(checkpoint: Path) -> dict[str, bytes]:
    """The files of a checkpoint's tokenizer by their names; Kaggle puts those of an Orbax folder beside it."""
    if checkpoint.suffix == ".gguf":
        return gguf_tokenizer.tokenizer_files(checkpoint)
    folders = (checkpoint.parent, checkpoint) if is_orbax(checkpoint) else (checkpoint,)
    found = {name: folder / name for folder in folders for name in COPIED if (folder / name).exists()}
    contents = {}
    for name, path in found.items():
        with _reading(path):
            contents[name] = read_bytes(path, bounds.TOKENIZER)
    return contents


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    contents = own_files(checkpoint)
    if (path := checkpoint / MODEL_CONFIG).exists():
        with _reading(path):
            contents |= {MODEL_CONFIG: read_bytes(path, bounds.JSON)}
    files = _Files(contents, checkpoint)
    if JSON in contents:
        return Tokenizer(_Json(contents[JSON], files.at(JSON)), files)
    if MODEL in contents:
        return Tokenizer(_SentencePiece(contents[MODEL], files.at(MODEL), files.added()), files)
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
