from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from agent_tunix.environments.tools import LONGEST, answered, schema_of


def search(query: str, limit: int = 5, kinds: list[str] | None = None, order: Literal["new", "old"] = "new") -> str:
    """Looks for pages.

    Over two lines.

    Args:
        query: What to look for,
            in words.
        limit: How many pages.

    Returns:
        Their titles.
    """
    return f"{query} {limit}"


async def slow(x: float) -> dict:
    await asyncio.sleep(0)
    return {"twice": 2 * x}


def broken(x: int) -> int:
    raise ValueError(f"no {x}")


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_schema_follows_from_signature_and_docstring():
    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks for pages.\n\nOver two lines.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for, in words."},
                    "limit": {"type": "integer", "description": "How many pages."},
                    "kinds": {"type": "array", "items": {"type": "string"}, "nullable": True},
                    "order": {"type": "string", "enum": ["new", "old"]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_method_is_a_tool_without_its_self():
    class Game:
        def guess(self, word: str) -> str:
            """Guesses."""
            return word

    assert list(schema_of(Game().guess)["function"]["parameters"]["properties"]) == ["word"]


@pytest.mark.parametrize(
    ("asked", "content"),
    [
        (call("search", query="a", limit=2), "a 2"),
        (call("slow", x=1.5), '{"twice": 3.0}'),
        (call("broken", x=3), "error: ValueError: no 3"),
        (call("find", x=3), "error: there is no tool 'find'; there is search, slow, broken"),
    ],
)
def test_a_call_is_answered_by_what_the_tool_returned_or_by_what_was_wrong(asked, content):
    message = answered(asked, [search, slow, broken])
    assert message == {"role": "tool", "name": asked["function"]["name"], "content": content}


def test_arguments_that_do_not_fit_are_an_error_that_the_model_hears_of():
    message = answered(call("search", words="a"), [search])
    assert message["content"].startswith("error: TypeError")
    assert "words" in message["content"]


def test_a_call_that_could_not_be_read_is_answered_by_why():
    assert answered({"function": {"name": "", "error": "error: not JSON"}}, [search])["content"] == "error: not JSON"


def test_what_a_tool_returns_has_an_end():
    assert len(answered(call("search", query="x" * 10**6), [search])["content"]) == LONGEST
