from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.environments.tool_formats import FORMATS, format_of
from agent_tunix.environments.tools import schema_of


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def calculator(expression: str) -> str:
    """Computes."""
    return expression


SCHEMAS = [schema_of(add), schema_of(calculator)]


def calls(name: str, text: str):
    found = [call["function"] for call in FORMATS[name].parse(text, SCHEMAS)]
    return [(one["name"], one["arguments"]) if "error" not in one else one["error"] for one in found]


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        (
            "hermes",
            'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
            [("add", {"a": 1, "b": 2})],
        ),
        ("hermes", '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "f"}', [("add", {}), ("f", {})]),
        ("hermes", "nothing to call", []),
        ("json", '{"name": "add", "parameters": {"a": 1, "b": 2}}', [("add", {"a": 1, "b": 2})]),
        ("json", 'Let me see.\n```json\n{"name": "add", "arguments": {"a": 1}}\n```', [("add", {"a": 1})]),
        ("json", '[{"name": "add", "parameters": {}}, {"name": "f"}]', [("add", {}), ("f", {})]),
        ("json", "{x} is the name of a set", []),
        ("json", "<answer>4</answer>", []),
        (
            "functiongemma",
            "<start_function_call>call:search{query:<escape>a, {b}<escape>,limit:3,deep:true}<end_function_call>",
            [("search", {"query": "a, {b}", "limit": 3, "deep": True})],
        ),
        ("functiongemma", "<start_function_call>call:now{}<end_function_call>", [("now", {})]),
        ("tags", "<calculator>2*3</calculator>", [("calculator", {"expression": "2*3"})]),
        ("tags", "<add>1</add> <calculator> 2 </calculator>", [("add", {"a": "1"}), ("calculator", {"expression": "2"})]),
        ("tags", "<calculator>2*3", []),
    ],
)
def test_calls_are_found_as_the_format_writes_them(name, text, found):
    assert calls(name, text) == found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>add(1, 2)</tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>'),
        ("json", '{"name": "add", "parameters": {"a": 1}'),
        ("functiongemma", "<start_function_call>add 1 2<end_function_call>"),
        ("functiongemma", "<start_function_call>call:f{a:<escape>b}<end_function_call>"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_and_not_nothing(name, text):
    (found,) = calls(name, text)
    assert found.startswith("error: ")


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.integers(), st.text(), st.booleans(), st.lists(st.text()))))
def test_whatever_the_arguments_are_they_come_back(arguments):
    written = json.dumps({"name": "add", "arguments": arguments}).replace("</tool_call>", "")
    assert calls("hermes", f"<tool_call>{written}</tool_call>") == [("add", json.loads(written)["arguments"])]
    assert calls("json", written) == [("add", json.loads(written)["arguments"])]


@given(st.text())
@pytest.mark.parametrize("name", FORMATS)
def test_no_text_is_too_strange_to_be_looked_at(name, text):
    for said in (text, f"<tool_call>{text}</tool_call><start_function_call>call:f{{{text}}}"):
        assert all(isinstance(found, str | tuple) for found in calls(name, said))


def test_a_template_says_which_format_is_its_own():
    assert format_of("... <tool_call></tool_call> ...") == "hermes"
    assert format_of("... <start_function_call> ...") == "functiongemma"
    assert format_of("no word of tools") == "json"
    for name in ("hermes", "json"):
        assert '"name": "calculator"' in FORMATS[name].told(SCHEMAS)
