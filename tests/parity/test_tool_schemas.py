"""What a model is told of a tool, beside what transformers tells it."""

from __future__ import annotations

from typing import Literal

import pytest

from agent_tunix.environments.tools import schema_of

pytestmark = pytest.mark.parity


def plain(query: str, limit: int, share: float, deep: bool):
    """
    Looks for pages.

    Args:
        query: What to look for.
        limit: How many pages,
            at most.
        share: Of them.
        deep: Whether to go on.

    Returns:
        Their titles.
    """


def composed(words: list[str], places: dict, unit: Literal["m", "km"] = "m", name: str | None = None):
    """
    Measures.

    Args:
        words: Some words.
        places: Places by name.
        unit: The unit. (choices: ["m", "km"])
        name: A name.
    """


@pytest.mark.parametrize("tool", [plain, composed])
def test_a_schema_is_that_of_transformers(tool):
    from transformers.utils import get_json_schema

    theirs, ours = get_json_schema(tool)["function"], schema_of(tool)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, told in theirs["parameters"]["properties"].items():
        own = dict(ours["parameters"]["properties"][name])
        own["description"] = own["description"].split(" (choices")[0]
        assert own == told
