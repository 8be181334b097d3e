"""Imports go only downwards: a module may import its own layer and the layers below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import agent_tunix

LAYERS = [
    "__init__",
    "interface",
    "cli",
    "verbs",
    "lab",
    "serve",
    "training",
    "environments",
    "engine",
    "algorithm",
    "models",
    "kernels",
    "config",
    "console",
    "types",
    "files",
    "errors",
    "signals",
]
ROOT = Path(agent_tunix.__file__).parent
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imported(source: str) -> set[str]:
    """The agent_tunix layers that a module's source names in its imports, wherever they stand."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("agent_tunix.")}


def layer(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_only_downwards(module):
    allowed = LAYERS[LAYERS.index(layer(module)) :]
    upwards = imported((ROOT / module).read_text()) - set(allowed)
    assert not upwards, f"{module} imports {upwards}"


def test_an_import_inside_a_function_and_under_a_package_is_seen():
    assert imported("def f():\n    from agent_tunix.training import loop\nimport agent_tunix.cli") == {"training", "cli"}
    assert imported("from agent_tunix import engine") == {"engine"}
    assert imported("import json\nfrom pathlib import Path") == set()
