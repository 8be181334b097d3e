"""The paths that are served, and what is answered there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agent_tunix.serve.asking import Asking, Choice
from agent_tunix.serve.protocol import ChatRequest, CompletionRequest, RequestError, parsed, parsed_generate
from agent_tunix.serve.responses import Head, Told, usage
from agent_tunix.serve.scheduler import Asked, BrokenError, OverloadedError, Token

LARGEST_BODY = 2**24  # bytes
PATHS = "/v1/models, /v1/chat/completions, /v1/completions, /inference/v1/generate and /health"


def app_of(asking: Asking, hosts: Sequence[str] | None) -> ASGIApp:
    """The application. Requests under another host's name than `hosts` are refused, unless that is None: a page elsewhere
    could have pointed its own name at this machine.
    """
    served = _Served(asking)
    routes = [
        Route("/health", served.health),
        Route("/v1/models", served.models),
        Route("/v1/models/{model:path}", served.model),
        Route("/v1/chat/completions", _posted(served.chat), methods=["POST"]),
        Route("/v1/completions", _posted(served.completions), methods=["POST"]),
        Route("/inference/v1/generate", _posted(served.generate), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: _http_fault, Exception: _fault}
    handlers |= dict.fromkeys((RequestError, OverloadedError, BrokenError), _fault)
    app = Starlette(routes=routes, exception_handlers=handlers)
    return app if hosts is None else _OfHosts(app, hosts)


class _OfHosts:
    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in self._hosts:
                told = RequestError("This model is served to this machine alone.", status=403)
                return await _answer(told)(scope, receive, send)
        await self._app(scope, receive, send)


def _posted(answer: Callable[[Request, bytes], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Reads a body within bounds, and gives the answer up when nobody waits for it any more."""

    async def answered(request: Request) -> Response:
        try:
            body = await _body(request)
            return await _unless_left(request, answer(request, body))  # type: ignore[arg-type]
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return answered


async def _body(request: Request) -> bytes:
    too_large = RequestError(f"The body is larger than {LARGEST_BODY} bytes.", status=413)
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > LARGEST_BODY:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise too_large
    return b"".join(parts)


async def _unless_left(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What some work comes to, unless the client leaves before."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)


def _answer(mistake: RequestError) -> JSONResponse:
    return JSONResponse(mistake.body(), mistake.status)


def _told(fault: Exception) -> RequestError:
    if isinstance(fault, RequestError):
        return fault
    if isinstance(fault, OverloadedError):
        return RequestError("Too many requests wait; try again later.", status=503)
    return RequestError(f"The model could not answer: {fault}", status=500)


async def _fault(request: Request, fault: Exception) -> Response:
    return _answer(_told(fault))


async def _http_fault(request: Request, fault: HTTPException) -> Response:
    said = {404: f"There is nothing at {request.url.path}; {PATHS} are served.", 405: f"{request.method} is not known here."}
    told = RequestError(said.get(fault.status_code, fault.detail), status=fault.status_code)
    return JSONResponse(told.body(), told.status, headers=fault.headers)


class _Served:
    """One model's answers."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._began = asking, int(time.time())
        self._name = asking.opened.name

    async def health(self, request: Request) -> Response:
        scheduler = self._asking.scheduler
        alive = scheduler.alive
        return JSONResponse({"status": "ok" if alive else "broken", "in_flight": scheduler.in_flight}, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._refuse_others(request.path_params["model"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        of = {"id": self._name, "object": "model", "created": self._began, "owned_by": "agent-tunix"}
        return of | {"max_model_len": self._asking.scheduler.max_length}

    def _refuse_others(self, name: str | None) -> None:
        if name not in (None, self._name):
            said = f"There is no model {name!r}; {self._name!r} is served."
            raise RequestError(said, status=404, param="model", code="model_not_found")

    async def chat(self, request: Request, body: bytes) -> Response:
        asks: ChatRequest = parsed(ChatRequest, body)
        self._refuse_others(asks.model)
        asked = self._asking.of_chat(asks)
        told = Told(self._asking.vocabulary, bool(asks.return_tokens_as_token_ids))
        head = Head("chatcmpl", self._name)
        if asks.stream:
            return await _streamed(self._chat_parts(asks, asked, told, head))
        (choices,), _ = await self._collected([asked], asks.stop)
        found = []
        for index, choice in enumerate(choices):
            content, calls = self._asking.calls(choice.text, asks.schemas)
            message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
            if calls:
                message["tool_calls"] = calls
            one = {"index": index, "message": message, "finish_reason": "tool_calls" if calls else choice.finish}
            one["logprobs"] = told.of_chat(choice.tokens) if asks.logprobs else None
            if asks.return_token_ids:
                one["token_ids"] = [token.id for token in choice.tokens]
            found.append(one)
        more: dict[str, Any] = {"prompt_token_ids": list(asked.prompt_ids)} if asks.return_token_ids else {}
        return JSONResponse(head("chat.completion", found, usage=usage([asked], _drawn(choices)), **more))

    async def _chat_parts(
        self, asks: ChatRequest, asked: Asked, told: Told, head: Head
    ) -> AsyncGenerator[dict[str, Any], None]:
        """A text that may hold calls of tools is sent when it is whole: a part of a call is of no use."""

        def part(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
            of = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
            return head("chat.completion.chunk", [of | more], **({"usage": None} if asks.with_usage else {}))

        answered, drawn, schemas = self._asking.answer(asked, asks.stop), 0, asks.schemas
        prompt_ids = {"prompt_token_ids": list(asked.prompt_ids)} if asks.return_token_ids else {}
        try:
            for index in range(asked.n):
                yield part(index, {"role": "assistant", "content": ""}) | prompt_ids
            async for update in answered:
                choice = update.choice
                assert choice is not None
                drawn += len(update.tokens)
                more: dict[str, Any] = {"logprobs": told.of_chat(update.tokens)} if asks.logprobs else {}
                if asks.return_token_ids:
                    more["token_ids"] = [token.id for token in update.tokens]
                text, finish, calls = update.text, choice.finish, list[dict[str, Any]]()
                if schemas:
                    text, calls = self._asking.calls(choice.text, schemas) if finish else ("", [])
                if text or more:
                    yield part(update.index, {"content": text} if text else {}, **more)
                if calls:
                    numbered = [{"index": number, **call} for number, call in enumerate(calls)]
                    yield part(update.index, {"tool_calls": numbered})
                if finish:
                    yield part(update.index, {}, "tool_calls" if calls else finish)
            if asks.with_usage:
                yield head("chat.completion.chunk", [], usage=usage([asked], drawn))
        finally:
            await answered.aclose()

    async def completions(self, request: Request, body: bytes) -> Response:
        asks: CompletionRequest = parsed(CompletionRequest, body)
        self._refuse_others(asks.model)
        asked = self._asking.of_completion(asks)
        told = Told(self._asking.vocabulary, bool(asks.return_tokens_as_token_ids))
        head = Head("cmpl", self._name)
        if asks.stream:
            return await _streamed(self._completion_parts(asks, asked, told, head))
        collected, prompts = await self._collected(asked, asks.stop)
        found = list[dict[str, Any]]()
        for one, choices, prompt in zip(asked, collected, prompts, strict=True):
            each: Sequence[Choice | None] = choices or [None] * one.n  # where none is drawn, the prompt alone is told of
            for choice in each:
                of = self._completion(asks, one, choice, prompt, told)
                found.append({"index": len(found), **of})
        drawn = sum(map(_drawn, collected))
        return JSONResponse(head("text_completion", found, usage=usage(asked, drawn)))

    async def generate(self, request: Request, body: bytes) -> Response:
        """Tokens in and tokens out, as vLLM has it."""
        asks = parsed_generate(body)
        self._refuse_others(asks.model)
        (asked,), told = self._asking.of_completion(asks, None), Told(self._asking.vocabulary, True)
        ((choices,), _), head = await self._collected([asked], asks.stop), Head("gen", self._name)
        found = []
        for index, choice in enumerate(choices):
            of = {"index": index, "token_ids": [token.id for token in choice.tokens], "finish_reason": choice.finish}
            found.append(of | {"logprobs": told.of_chat(choice.tokens) if asks.logprobs is not None else None})
        answer = head("generate", found, usage=usage([asked], _drawn(choices)), prompt_token_ids=list(asked.prompt_ids))
        return JSONResponse({"request_id": answer["id"], **answer})

    def _completion(
        self, asks: CompletionRequest, asked: Asked, choice: Choice | None, prompt: Sequence[Token], told: Told
    ) -> dict[str, Any]:
        own = choice.tokens if choice else []
        before = self._asking.tokenizer.decode(asked.prompt_ids) if asks.echo else ""
        of: dict[str, Any] = {"text": before + (choice.text if choice else "")}
        of["finish_reason"] = choice.finish if choice else "length"
        of["logprobs"] = None
        if asks.logprobs is not None:
            of["logprobs"] = told.of_completion([*prompt, *own], begins=bool(prompt))
        if asks.return_token_ids:
            of |= {"prompt_token_ids": list(asked.prompt_ids), "token_ids": [token.id for token in own]}
        return of

    async def _completion_parts(
        self, asks: CompletionRequest, asked: Sequence[Asked], told: Told, head: Head
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Of several prompts one after the other."""
        drawn = 0
        for number, one in enumerate(asked):
            answered, offsets = self._asking.answer(one, asks.stop), [0] * one.n
            try:
                async for update in answered:
                    assert update.choice is not None
                    drawn += len(update.tokens)
                    of: dict[str, Any] = {"index": number * one.n + update.index, "text": update.text}
                    of["finish_reason"] = update.choice.finish
                    of["logprobs"] = None
                    if asks.logprobs is not None:
                        of["logprobs"] = told.of_completion(update.tokens, False, offsets[update.index])
                        offsets[update.index] = len(update.choice.text)
                    if asks.return_token_ids:
                        of["token_ids"] = [token.id for token in update.tokens]
                    yield head("text_completion", [of], **({"usage": None} if asks.with_usage else {}))
            finally:
                await answered.aclose()
        if asks.with_usage:
            yield head("text_completion", [], usage=usage(asked, drawn))

    async def _collected(
        self, asked: Sequence[Asked], stops: Sequence[str]
    ) -> tuple[list[list[Choice]], list[Sequence[Token]]]:
        """All choices of each prompt, whole, and what is told of the prompts' own tokens."""

        async def whole(one: Asked) -> tuple[list[Choice], Sequence[Token]]:
            choices = dict[int, Choice]()
            prompt: Sequence[Token] = ()
            async for update in self._asking.answer(one, stops):
                if update.choice is None:
                    prompt = update.tokens
                else:
                    choices[update.index] = update.choice
            return [choices[index] for index in sorted(choices)], prompt

        tasks = [asyncio.ensure_future(whole(one)) for one in asked]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [choices for choices, _ in found], [prompt for _, prompt in found]


def _drawn(choices: Sequence[Choice]) -> int:
    return sum(len(choice.tokens) for choice in choices)


async def _streamed(parts: AsyncGenerator[dict[str, Any], None]) -> Response:
    """Server-sent events. The first part is awaited here, so that a request that is refused has the status that says so."""
    first = await anext(parts)

    async def events() -> AsyncGenerator[str, None]:
        try:
            yield _event(first)
            async for part in parts:
                yield _event(part)
        except (OverloadedError, BrokenError) as fault:
            yield _event(_told(fault).body())
        finally:
            await parts.aclose()
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _event(part: dict[str, Any]) -> str:
    return f"data: {json.dumps(part, ensure_ascii=False)}\n\n"
