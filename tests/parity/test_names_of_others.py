"""The page for those who come from TRL has TRL's own names and defaults."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrating" / "trl.md"
ROW = re.compile(r"^\| `(\w+)`(?:, a list)? \| `?([^|`]+?)`?(?:, all)? \|", re.MULTILINE)
SAID = {"none": "None", "true": "True", "false": "False"}


@pytest.mark.parity
def test_the_names_and_defaults_of_trl_are_its_own():
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed: pip install -e '.[parity]'")
    source = (Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text()
    fields = {
        node.target.id: next((keyword.value for keyword in node.value.keywords if keyword.arg == "default"), None)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
    }
    rows = {name: said for name, said in ROW.findall(PAGE.read_text()) if name in fields}
    assert len(rows) > 12
    for name, said in rows.items():
        default = fields[name]
        if name != "reward_weights":  # None there, which means 1 each
            assert ast.literal_eval(default) == literal(said), name


def literal(said: str) -> object:
    try:
        return ast.literal_eval(SAID.get(said, said))
    except ValueError:
        return said
