"""Text to tokens and back, from a `tokenizer.json` (tokenizers) or a SentencePiece `tokenizer.model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from agent_tunix.errors import UserError

PAD, END, BEGIN, UNKNOWN, END_OF_TURN = "<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"
START_OF_TURN = "<start_of_turn>"


class Tokenizer(Protocol):
    """`encode` puts no begin token in front by itself; `decode` leaves the control tokens out."""

    pad_id: int
    begin_id: int
    unknown_id: int
    end_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class JsonTokenizer:
    """A `tokenizer.json`, by Hugging Face's tokenizers."""

    def __init__(self, path: Path):
        from tokenizers import Tokenizer as Backend

        self._backend = Backend.from_file(str(path))
        self.pad_id, self.begin_id, self.unknown_id, *ends = (
            _required(self._backend.token_to_id(token), token, path) for token in (PAD, BEGIN, UNKNOWN, END, END_OF_TURN)
        )
        self.end_ids = tuple(ends)
        self._control = {self.pad_id, self.begin_id, *ends}

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([i for i in ids if i not in self._control], skip_special_tokens=False)


class SentencePieceTokenizer:
    """A `tokenizer.model`, by Google's sentencepiece."""

    def __init__(self, path: Path):
        from sentencepiece import SentencePieceProcessor

        self._backend = SentencePieceProcessor(model_file=str(path))
        known = {self._backend.id_to_piece(i): i for i in range(min(1024, self._backend.get_piece_size()))}
        self.pad_id, self.begin_id, self.unknown_id, *ends = (
            _required(known.get(token), token, path) for token in (PAD, BEGIN, UNKNOWN, END, END_OF_TURN)
        )
        self.end_ids = tuple(ends)
        self._control = {self.pad_id, self.begin_id, *ends}

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids if i not in self._control])


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder."""
    for name, kind in (("tokenizer.json", JsonTokenizer), ("tokenizer.model", SentencePieceTokenizer)):
        if (folder / name).exists():
            return kind(folder / name)
    raise UserError(f"{folder} holds neither tokenizer.json nor tokenizer.model; copy the model's tokenizer there.")


def _required(token_id: int | None, token: str, path: Path) -> int:
    if token_id is None:
        raise UserError(f"{path} has no token {token}: it is not a tokenizer of the Gemma family.")
    return token_id
