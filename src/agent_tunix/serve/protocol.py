"""What clients send, by OpenAI's interface and vLLM's additions to it; what is wrong with it is said as they expect."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from agent_tunix.serve.slots import MOST_TOP

MOST_CHOICES = 128
MOST_PROMPTS = 1024
# What would change the answer and is not done here, with the value that asks for nothing.
UNKNOWN: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "length_penalty": 1,
    "use_beam_search": False,
    "logit_bias": {},
    "suffix": "",
    "structured_outputs": {},
    "guided_json": {},
    "guided_regex": "",
    "guided_choice": [],
    "guided_grammar": "",
}


class RequestError(Exception):
    """A request that cannot be answered, and what to say."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        kinds = {500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def _listed(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _no_top_k(value: Any) -> Any:
    return None if value in (-1, 0) else value


Stop = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], BeforeValidator(_listed), Field(max_length=64)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, strict=False)


class StreamOptions(_Fields):
    include_usage: bool = False


class Request(_Fields):
    """What both kinds of requests have."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_no_top_k)] = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = []
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def drawing(self) -> dict[str, Any]:
        """How tokens are drawn. Without a seed every request has one of its own."""
        temperature = 1.0 if self.temperature is None else self.temperature
        temperature = 0.0 if temperature < 1e-3 else temperature
        seed = secrets.randbits(63) if self.seed is None else self.seed
        top_p = 1.0 if self.top_p is None else self.top_p
        drawn = {"temperature": temperature, "top_k": self.top_k, "top_p": top_p, "seed": seed, "n": self.n or 1}
        return drawn | {"past_ends": bool(self.ignore_eos), "stop_ids": tuple(self.stop_token_ids or ())}

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Function(_Fields):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Fields):
    type: Literal["function"] = "function"
    function: Function


class CalledFunction(_Fields):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(_Fields):
    id: str | None = None
    function: CalledFunction


class ChatMessage(_Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatRequest(Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools, as the model is told of them; none where it is not to call any."""
        empty = {"type": "object", "properties": {}, "required": []}
        found = [tool.function for tool in self.tools or () if self.tool_choice != "none"]
        return [
            {
                "type": "function",
                "function": {
                    "name": function.name,
                    "description": function.description or "",
                    "parameters": {**empty, **(function.parameters or {})},
                },
            }
            for function in found
        ]

    @property
    def thinking(self) -> bool | None:
        return (self.chat_template_kwargs or {}).get("enable_thinking")

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates take them: contents are texts, arguments are mappings."""
        messages = list[dict[str, Any]]()
        names = dict[str, str]()
        for number, message in enumerate(self.messages):
            role = "system" if message.role == "developer" else message.role
            plain: dict[str, Any] = {"role": role, "content": _text(message.content, f"messages[{number}].content")}
            if message.tool_calls:
                plain["tool_calls"] = [_call(call, number) for call in message.tool_calls]
                names |= {call.id: call.function.name for call in message.tool_calls if call.id}
            if role == "tool":
                plain["name"] = message.name or names.get(message.tool_call_id or "", "")
                plain["tool_call_id"] = message.tool_call_id or ""
            messages.append(plain)
        return messages


class CompletionRequest(Request):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """Each a text or its tokens."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def parsed(kind: type[Request], body: bytes) -> Any:
    """A request of some kind; what is not one raises a `RequestError` that names the field."""
    return _validated(kind, _object(body))


def parsed_generate(body: bytes) -> CompletionRequest:
    """vLLM's request of tokens in and tokens out, as `renderers` sends it for verifiers."""
    found = _object(body)
    ids, how = found.get("token_ids"), found.get("sampling_params") or {}
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        raise RequestError("token_ids: must be the tokens of a prompt.", param="token_ids")
    if not isinstance(how, Mapping):
        raise RequestError("sampling_params: must be an object.", param="sampling_params")
    return _validated(CompletionRequest, {**how, "model": found.get("model"), "prompt": ids})


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as fault:
        raise RequestError(f"The body is not JSON: {fault}") from fault
    if not isinstance(found, Mapping):
        raise RequestError("The body is not a JSON object.")
    return found


def _validated(kind: type[Request], found: Mapping[str, Any]) -> Any:
    try:
        request = kind.model_validate(found)
    except ValidationError as faults:
        first = min(faults.errors(), key=lambda fault: len(fault["loc"]))
        param = ".".join(map(str, first["loc"][:1])) or None
        place = ".".join(map(str, first["loc"]))
        raise RequestError(f"{place}: {first['msg']}", param=param) from faults
    for name, nothing in UNKNOWN.items():
        if (given := found.get(name, nothing)) not in (None, nothing):
            raise RequestError(f"{name}={given!r:.100}: this server does not know {name}; leave it out.", param=name)
    form = found.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise RequestError("response_format: this server only writes text.", param="response_format")
    if isinstance(request, ChatRequest):
        _check_chat(request)
    if isinstance(request, CompletionRequest):
        _check_completion(request)
    return request


def _check_chat(request: ChatRequest) -> None:
    if request.most_tokens == 0:
        raise RequestError("max_tokens: must be at least 1.", param="max_tokens")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true.", param="top_logprobs")
    if request.tool_choice not in (None, "none", "auto"):
        raise RequestError(
            "tool_choice: a model cannot be made to call a tool here; auto and none are known.", param="tool_choice"
        )
    thinking = request.thinking
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError("chat_template_kwargs.enable_thinking: must be true or false.", param="chat_template_kwargs")


def _check_completion(request: CompletionRequest) -> None:
    prompts = request.prompts()
    if not prompts or not all(prompts):
        raise RequestError("prompt: is empty.", param="prompt")
    if len(prompts) > MOST_PROMPTS:
        raise RequestError(f"prompt: has {len(prompts)} prompts; at most {MOST_PROMPTS} are taken.", param="prompt")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens: must be at least 1 without echo.", param="max_tokens")
    if request.best_of not in (None, request.n or 1):
        raise RequestError("best_of: must be n here.", param="best_of")
    if request.stream and request.echo:
        raise RequestError("echo: is not known together with stream.", param="echo")


def _text(content: str | Sequence[Mapping[str, Any]] | None, place: str) -> str:
    """A content as text; it may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.get("text") for part in content]
    if not all(part.get("type") == "text" for part in content) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{place}: only parts of type text are known.", param="messages")
    return "".join(map(str, texts))


def _call(call: ToolCall, number: int) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as fault:
            raise RequestError(
                f"messages[{number}].tool_calls: arguments are not JSON: {fault}", param="messages"
            ) from fault
    if not isinstance(arguments, Mapping):
        raise RequestError(f"messages[{number}].tool_calls: arguments are no JSON object.", param="messages")
    return {"type": "function", "function": {"name": call.function.name, "arguments": dict(arguments)}}
