"""Requests as prompts for the model, and its tokens as choices: what the two kinds of responses and the terminal share."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from agent_tunix.environments.tool_formats import FORMATS, HERMES, Format, format_of
from agent_tunix.errors import UserError
from agent_tunix.models.chat import TOOL, by_user
from agent_tunix.serve.opened import Opened
from agent_tunix.serve.protocol import ChatRequest, CompletionRequest, RequestError
from agent_tunix.serve.scheduler import PROMPT, Asked, Finish, Scheduler, Token
from agent_tunix.serve.text import Cut, Decoder, Vocabulary

BLOCKS = {"hermes": HERMES}  # what a call looks like in a format in which other words may stand beside it


@dataclasses.dataclass
class Choice:
    """A choice as far as it has come: all its tokens, and the text that they make up to a stop string."""

    decoder: Decoder
    cut: Cut
    tokens: list[Token] = dataclasses.field(default_factory=list)
    text: str = ""
    finish: Finish | None = None

    def push(self, tokens: Sequence[Token], finish: Finish | None) -> str:
        """Takes further tokens, up to the one that makes a stop string whole; returns the text that may be shown now."""
        shown = ""
        for token in tokens:
            self.tokens.append(token)
            shown += self.cut.push(self.decoder.push(token.id))
            if self.cut.stopped:
                finish = "stop"
                break
        else:
            if finish:
                shown += self.cut.push(self.decoder.flush())
                finish = "stop" if self.cut.stopped else finish
                shown += self.cut.flush()
        self.text += shown
        self.finish = finish
        return shown


@dataclasses.dataclass(frozen=True)
class Update:
    """What has come of a choice. `choice` is None where the prompt's own tokens are told of."""

    index: int
    choice: Choice | None
    text: str
    tokens: Sequence[Token]


class Asking:
    """One model, asked by many."""

    def __init__(self, opened: Opened, scheduler: Scheduler) -> None:
        self.opened, self.scheduler = opened, scheduler
        self.tokenizer = opened.inference.model.tokenizer
        self.vocabulary = Vocabulary(self.tokenizer)
        self.tool_format = opened.tool_format or format_of(self.tokenizer.chat.template.source)

    @property
    def _form(self) -> Format:
        return FORMATS[self.tool_format]

    def of_chat(self, request: ChatRequest) -> Asked:
        """The prompt that a conversation makes, and how it is answered."""
        text = self.prompt(request.conversation(), request.schemas, request.thinking)
        asked = self.asked(self.tokenizer.encode(text), request.most_tokens, "messages")
        return dataclasses.replace(asked, **request.drawing(), top=request.top_logprobs or 0)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]] = (), thinking: bool | None = None
    ) -> str:
        """A conversation in the model's own chat template, and the opening of its next turn."""
        opened, chat = self.opened, self.tokenizer.chat
        if all(message["role"] == "system" for message in messages):
            raise RequestError("messages: there is none of the user.", param="messages")
        if not chat.takes_tools:
            messages = [self._without_tools(message) for message in messages]
        thinking = opened.thinking if thinking is None else thinking
        told = self._form.told(schemas) if schemas else ""
        try:
            return chat.asked(messages, opened.system_prompt, thinking, schemas, told)
        except UserError as mistake:
            raise RequestError(str(mistake), param="messages") from mistake

    def of_completion(self, request: CompletionRequest, usual: int | None = 16) -> list[Asked]:
        """What is asked of each prompt of a request; `usual` tokens where it does not say how many, None: as fit."""
        found, vocabulary = list[Asked](), self.opened.inference.model.arch.vocab_size
        encode = self.tokenizer.begun if request.add_special_tokens else self.tokenizer.encode
        for prompt in request.prompts():
            ids = encode(prompt) if isinstance(prompt, str) else prompt
            if strange := [token for token in ids if not 0 <= token < vocabulary]:
                raise RequestError(
                    f"prompt: {strange[0]} is no token; the model has {vocabulary}, from 0 on.", param="prompt"
                )
            most = usual if request.max_tokens is None else request.max_tokens
            scored = (request.logprobs or 0) if request.echo and request.logprobs is not None else None
            asked = dataclasses.replace(self.asked(ids, most, "prompt"), **request.drawing(), prompt_top=scored)
            found.append(dataclasses.replace(asked, top=request.logprobs or 0))
        return found

    def asked(self, ids: Sequence[int], most: int | None, param: str) -> Asked:
        """So many tokens after a prompt, or as many as there is room for; `param` is to blame where there is none."""
        longest = self.scheduler.max_length
        room = longest - len(ids)
        if not ids:
            raise RequestError(f"{param}: makes no token.", param=param)
        if room < (1 if most is None else most):
            asked = f" and asks for {most} more" if most is not None else ""
            raise RequestError(
                f"The model is served with a context of {longest} tokens (serve.max_length); this request has {len(ids)} in "
                f"its prompt{asked}.",
                param=param,
                code="context_length_exceeded",
            )
        return Asked(tuple(ids), room if most is None else most)

    async def answer(self, asked: Asked, stops: Sequence[str]) -> AsyncGenerator[Update, None]:
        """What comes of a request, piece by piece. A choice that is stopped by a string is drawn no further."""
        choices = [Choice(Decoder(self.tokenizer), Cut(stops)) for _ in range(asked.n if asked.max_tokens else 0)]
        stream = self.scheduler.stream(asked)
        try:
            async for piece in stream:
                if piece.choice == PROMPT:
                    yield Update(PROMPT, None, "", piece.tokens)
                    continue
                choice = choices[piece.choice]
                if choice.finish is None:
                    before = len(choice.tokens)
                    text = choice.push(piece.tokens, piece.finish)
                    if choice.finish and not piece.finish:
                        piece.ticket.cancel(piece.choice)
                    yield Update(piece.choice, choice, text, choice.tokens[before:])
                if all(choice.finish for choice in choices):
                    return
        finally:
            await stream.aclose()

    def calls(self, text: str, schemas: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """The text without the calls of tools in it, and these; a call that cannot be read stays text."""
        found = self._form.parse(text, schemas) if schemas else []
        if not found or any("error" in call["function"] for call in found):
            return text, []
        calls = []
        for call in found:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            named = {"name": function["name"], "arguments": arguments}
            calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": named})
        block = BLOCKS.get(self.tool_format)
        return block.sub("", text).strip() if block else "", calls

    def _without_tools(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message for a template that knows no tools: calls are written as the model writes them."""
        if message["role"] == TOOL:
            return by_user(message)
        if not message.get("tool_calls"):
            return message
        name = "arguments" if self.tool_format == "hermes" else "parameters"
        called = [call["function"] for call in message["tool_calls"]]
        texts = [json.dumps({"name": one["name"], name: one["arguments"]}, ensure_ascii=False) for one in called]
        if self.tool_format == "hermes":
            texts = [f"<tool_call>\n{text}\n</tool_call>" for text in texts]
        return {"role": "assistant", "content": "\n".join(filter(None, [message["content"], *texts]))}
