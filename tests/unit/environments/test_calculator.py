"""The calculator of the demo that acts: what it computes, what it refuses, and its control."""

from __future__ import annotations

import pytest

from agent_tunix.environments.calculator import Calculator, calculated
from agent_tunix.environments.tool_formats import FORMATS
from agent_tunix.environments.tools import answered, schema_of


@pytest.mark.parametrize(
    ("expression", "value"),
    [("412+385", "797"), ("385-412", "-27"), ("2+3*4-5", "9"), ("-2*3", "-6"), ("007", "7"), (" 3 * 40 ", "120")],
)
def test_an_expression_has_its_value(expression, value):
    assert calculated(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "412+", "+", "4--2", "2**9", "(1+2)", "1/2", "1.5", "x", "__import__('os')", "١+١", "9" * 19, "1" + "*9" * 21],
)
def test_what_is_no_such_expression_is_an_error(expression):
    assert calculated(expression) == "error"


def test_the_longest_product_is_computed():
    assert calculated("*".join(["9" * 18] * 21)) == str(int("9" * 18) ** 21)


def said(environment: Calculator, text: str) -> list[str]:
    """What an environment replies to a text with calls in tags."""
    calls = FORMATS["tags"].parse(text, [schema_of(tool) for tool in environment.tools])
    return [answered(call, environment.tools)["content"] for call in calls]


def test_a_call_in_tags_is_answered():
    assert said(Calculator(), "<calculator>412+385</calculator>") == ["797"]
    assert said(Calculator(), "412+385") == []


def test_a_shuffled_calculator_says_the_same_wrong_value_to_all():
    first, second = (said(Calculator(shuffled=True), "<calculator>412+385</calculator>") for _ in range(2))
    assert first == second != ["797"]
    assert first[0].isdigit()
