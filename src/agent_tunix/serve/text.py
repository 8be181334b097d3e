"""Tokens that come one by one, as text: what may be shown already, and where a stop string cuts it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from agent_tunix.models.tokenizer import Tokenizer

HALF = "\ufffd"  # what a decoder writes for bytes that are no whole character
MOST_HELD = 8  # tokens for which the rest of a character is waited for: none has more bytes than four
BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token of one byte, as SentencePiece names it


class Decoder:
    """The text of tokens, as they come. What it gives adds up to the text of all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._read = 0  # the tokens from which text is made, and those of them whose text was given

    def push(self, token: int) -> str:
        """The text that is known with one token more; none while a character is not whole."""
        self._ids.append(token)
        before, text = self._tokenizer.decode(self._ids[self._begin : self._read]), self._text
        if text.endswith(HALF) and len(self._ids) - self._read < MOST_HELD:
            return ""
        self._begin, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def flush(self) -> str:
        """What is left when no further token comes."""
        before, text = self._tokenizer.decode(self._ids[self._begin : self._read]), self._text
        self._begin = self._read = len(self._ids)
        return text[len(before) :]

    @property
    def _text(self) -> str:
        """A few tokens before the new ones are read too: a tokenizer may write the first of a text without its blank."""
        return self._tokenizer.decode(self._ids[self._begin :])


class Cut:
    """Holds a text back where a stop string may begin, and ends it before the first one that is whole."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What may be shown of all that came so far and was not shown."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((self._beginning(stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back for a stop string that did not come."""
        shown, self._held = self._held, ""
        return shown

    def _beginning(self, stop: str) -> int:
        """How much of the text's end is a beginning of a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class Vocabulary:
    """Single tokens as texts and bytes, as they stand within a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = {number: name for name, number in tokenizer.special.items()}
        self._anchor = (tokenizer.encode("a") or [tokenizer.end_ids[0]])[-1]
        self._before = tokenizer.decode([self._anchor])
        self.text = lru_cache(2**16)(self._text)

    def bytes(self, token: int) -> list[int] | None:
        """None for a part of a character whose bytes the tokenizer does not name."""
        text = self.text(token)
        if HALF not in text:
            return list(text.encode())
        byte = BYTE.fullmatch(self._tokenizer.name_of(token))
        return [int(byte[1], 16)] if byte else None

    def _text(self, token: int) -> str:
        if token in self._names:
            return self._names[token]
        return self._tokenizer.decode([self._anchor, token])[len(self._before) :]
