"""How models write calls of tools, and how they are told of tools where their chat template does not tell them.

    hermes         <tool_call>{"name": ..., "arguments": {...}}</tool_call>        Qwen, Hermes, SmolLM2
    json           {"name": ..., "parameters": {...}}, alone or in a code block    Llama 3, Gemma 3
    functiongemma  <start_function_call>call:name{key:<escape>text<escape>}<end_function_call>
    tags           <name>text</name>, for tools of one parameter                   a small model of one's own

A call that cannot be read is a call with an error, which the tool's message tells the model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agent_tunix.environments.tools import Schema

Call = dict[str, Any]  # {"type": "function", "function": {"name": ..., "arguments": {...}}}, or "error" beside the name
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
FENCE = re.compile(r"```(?:json|tool_code)?\s*(.*?)```", re.DOTALL)
GEMMA = re.compile(r"<start_function_call>(.*?)(?:<end_function_call>|\Z)", re.DOTALL)
GEMMA_CALL = re.compile(r"\s*call:\s*([\w.-]+)\s*\{(.*)\}\s*", re.DOTALL)
GEMMA_ARGUMENT = re.compile(r"\s*([\w.-]+)\s*:\s*(?:<escape>(.*?)<escape>|([^,<{}\[\]]+))\s*(?:,|\Z)", re.DOTALL)


class Format(NamedTuple):
    """A way of writing calls. `parse` finds them in what a model said, `told` is what a model is told of tools."""

    parse: Callable[[str, Sequence[Schema]], list[Call]]
    told: Callable[[Sequence[Schema]], str]
    mark: str | None = None  # in a chat template that has this format


def _call(name: Any, arguments: Any) -> Call:
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        return _wrong("a call has a name, and arguments by their names")
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _wrong(said: str) -> Call:
    return {"type": "function", "function": {"name": "", "arguments": {}, "error": f"error: {said}"}}


def _of_json(text: str) -> list[Call]:
    """The calls that a JSON text holds: one object, or a list of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as fault:
        return [_wrong(f"the call is not JSON ({fault})")]
    calls = []
    for one in found if isinstance(found, list) else [found]:
        if isinstance(one, Mapping) and isinstance(one.get("function"), Mapping):
            one = one["function"]
        if not isinstance(one, Mapping):
            return [_wrong("a call is a JSON object")]
        calls.append(_call(one.get("name"), one.get("arguments", one.get("parameters", {}))))
    return calls


def _hermes(text: str, schemas: Sequence[Schema]) -> list[Call]:
    return [call for found in HERMES.findall(text) for call in _of_json(found)]


def _json(text: str, schemas: Sequence[Schema]) -> list[Call]:
    """All of a text, or its code blocks; a text that begins as no object is not a call."""
    blocks = [block.strip() for block in FENCE.findall(text)] or [text.strip()]
    return [call for block in blocks if block[:1] in ("{", "[") and '"name"' in block for call in _of_json(block)]


def _functiongemma(text: str, schemas: Sequence[Schema]) -> list[Call]:
    calls = []
    for found in GEMMA.findall(text):
        match = GEMMA_CALL.fullmatch(found)
        arguments, rest = {}, match[2] if match else ""
        while rest.strip():
            argument = GEMMA_ARGUMENT.match(rest)
            if not argument:
                match = None
                break
            arguments[argument[1]] = argument[2] if argument[2] is not None else _literal(argument[3].strip())
            rest = rest[argument.end() :]
        calls.append(_call(match[1], arguments) if match else _wrong("the call is not call:name{key:value}"))
    return calls


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tags(text: str, schemas: Sequence[Schema]) -> list[Call]:
    """In the order in which they stand there. The text is the tool's first parameter."""
    first = {schema["function"]["name"]: next(iter(schema["function"]["parameters"]["properties"])) for schema in schemas}
    tag = re.compile("|".join(rf"<({re.escape(name)})>(.*?)</{re.escape(name)}>" for name in first) or r"(?!)", re.DOTALL)
    found = ([part for part in match.groups() if part is not None] for match in tag.finditer(text))
    return [_call(name, {first[name]: argument.strip()}) for name, argument in found]


def _listed(schemas: Sequence[Schema]) -> str:
    return "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)


def _told_hermes(schemas: Sequence[Schema]) -> str:
    return (
        f"You may call these functions:\n{_listed(schemas)}\n"
        "To call one, write a JSON object with its name and its arguments between <tool_call> and </tool_call>:\n"
        '<tool_call>\n{"name": "<name>", "arguments": {"<parameter>": "<value>"}}\n</tool_call>'
    )


def _told_json(schemas: Sequence[Schema]) -> str:
    return (
        f"You may call these functions:\n{_listed(schemas)}\n"
        "To call one, answer with nothing but a JSON object of its name and its parameters, as in "
        '{"name": "<name>", "parameters": {"<parameter>": "<value>"}}.'
    )


def _told_tags(schemas: Sequence[Schema]) -> str:
    """Nothing: a model that writes tags has been trained to."""
    return ""


FORMATS = {
    "hermes": Format(_hermes, _told_hermes, "<tool_call>"),
    "functiongemma": Format(_functiongemma, _told_json, "<start_function_call>"),
    "json": Format(_json, _told_json),
    "tags": Format(_tags, _told_tags),
}


def format_of(template: str) -> str:
    """The format that a chat template asks for; json where it has no mark of another."""
    return next((name for name, one in FORMATS.items() if one.mark and one.mark in template), "json")
