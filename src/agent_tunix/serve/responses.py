"""What clients are sent, as OpenAI's interface has it, with token ids as vLLM sends them where they are asked for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from agent_tunix.serve.scheduler import Asked, Token
from agent_tunix.serve.text import Vocabulary

LEAST = -9999.0  # in the place of minus infinity, which JSON does not have


class Head:
    """What all parts of a response begin with."""

    def __init__(self, kind: str, model: str) -> None:
        self._of = {"id": f"{kind}-{secrets.token_hex(16)}", "created": int(time.time()), "model": model}

    def __call__(self, object: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._of, "object": object, "choices": choices, **more}


def usage(asked: Sequence[Asked], drawn: int) -> dict[str, int]:
    prompt = sum(len(one.prompt_ids) for one in asked)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


class Told:
    """Log-probabilities, in the form of either kind of response. `as_ids` writes tokens as `token_id:<number>`."""

    def __init__(self, vocabulary: Vocabulary, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._name: Callable[[int], str] = (lambda token: f"token_id:{token}") if as_ids else vocabulary.text

    def of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self._name(token), "logprob": max(logprob, LEAST), "bytes": self._vocabulary.bytes(token)}

        def likeliest(token: Token) -> list[dict[str, Any]]:
            return [one(*other) for other in token.top]

        return {"content": [one(t.id, t.logprob) | {"top_logprobs": likeliest(t)} for t in tokens], "refusal": None}

    def of_completion(self, tokens: Sequence[Token], begins: bool, offset: int = 0) -> dict[str, Any]:
        """`begins` says that the first token begins the text: nothing comes before it that could make it likely.

        Two tokens may be written alike; the likelier one is told of.
        """
        names = [self._name(token.id) for token in tokens]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._vocabulary.text(token.id))
        logprobs = [max(token.logprob, LEAST) for token in tokens]
        top = []
        for token in tokens:
            likeliest = dict[str, float]()
            for other, logprob in (*token.top, (token.id, token.logprob)):
                likeliest.setdefault(self._name(other), max(logprob, LEAST))
            top.append(likeliest)
        first = [None] if begins else []
        return {
            "tokens": names,
            "token_logprobs": [*first, *logprobs[len(first) :]],
            "top_logprobs": [*first, *top[len(first) :]],
            "text_offset": offsets,
        }
