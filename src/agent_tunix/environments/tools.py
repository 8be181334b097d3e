"""Tools: plain typed Python functions that a model may call.

What a model is told of one follows from its signature and its docstring, of which the `Args:` of Google's style describe the
parameters. How calls are written is the format's affair: `tool_formats.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_tunix.environments.reward_call import event_loop
from agent_tunix.errors import UserError, calling, named
from agent_tunix.models.chat import Message

Tool = Callable[..., Any]
Schema = Mapping[str, Any]  # of a tool, as OpenAI's interface has it
LONGEST = 20_000  # characters of what a tool returns, past which it is cut
KINDS = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", tuple: "array"}
KINDS |= {type(None): "null"}
SECTIONS = re.compile(r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def schema_of(tool: Tool) -> Schema:
    """What a model is told of a tool: name, what it does, and its parameters with their types."""
    name = getattr(tool, "__name__", type(tool).__name__)
    with calling(lambda fault: UserError(f"the tool {name}: {named(fault)}.\nA tool is a function with types.")):
        signature, hints = inspect.signature(tool), typing.get_type_hints(tool)
    text = inspect.getdoc(tool) or ""
    about, described = SECTIONS.split(text)[0].strip(), _described(text)
    properties, required = {}, []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = _kind(hints.get(parameter.name, str))
        properties[parameter.name] = kind | (
            {"description": described[parameter.name]} if parameter.name in described else {}
        )
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _described(text: str) -> dict[str, str]:
    """The texts of a docstring's parameters, by name."""
    parts = SECTIONS.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    found: dict[str, str] = {}
    last, margin = "", None
    for line in "".join(sections.get(name, "") for name in ("Args", "Arguments", "Parameters")).splitlines():
        indent = len(line) - len(line.lstrip())
        match = ARGUMENT.match(line)
        if match and (margin is None or indent <= margin):
            last, margin = match[1], indent
            found[last] = match[2].strip()
        elif last and line.strip():
            found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _kind(hint: Any) -> dict[str, Any]:
    """A type as JSON's schema has it; any other is described by nothing."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is typing.Literal:
        return _kind(type(inner[0])) | {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        others = [one for one in inner if one is not type(None)]
        found = _kind(others[0]) if len(others) == 1 else {"anyOf": [_kind(one) for one in others]}
        return found if len(others) == len(inner) else found | {"nullable": True}
    if origin in (list, tuple, set) and inner:
        return {"type": "array", "items": _kind(inner[0])}
    plain = origin or hint
    return {"type": KINDS[plain]} if plain in KINDS else {}


def answered(call: Mapping[str, Any], tools: Sequence[Tool]) -> Message:
    """The message that answers a call: what the tool returned, or what was wrong, which the model may mend."""
    function = call["function"]
    name, content = function.get("name") or "", function.get("error")
    known = {tool.__name__: tool for tool in tools}
    if content is None and name not in known:
        content = f"error: there is no tool {name!r}; there is {', '.join(known) or 'none'}"
    if content is None:
        try:
            content = _text(awaited(known[name](**function["arguments"])))
        except Exception as fault:  # a tool's own, of which the model hears
            content = f"error: {named(fault)}"
    return {"role": "tool", "name": name, "content": content[:LONGEST]}


def awaited(value: Any) -> Any:
    """What a function returned, or what that comes to where it is async."""
    return asyncio.run_coroutine_threadsafe(_whole(value), event_loop()).result() if inspect.isawaitable(value) else value


async def _whole(value: Any) -> Any:
    return await value


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
