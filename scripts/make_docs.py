"""Writes docs/configuration/keys.md from the schema and the YAML files: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder, keys
from agent_tunix.config.schema import Config

PAGE = Path(__file__).parents[1] / "docs" / "configuration" / "keys.md"
HEAD = """# Every configuration key

Generated from the schema by `make docs`. Defaults are those of `python run_training.py` with no overrides; a group's
other choices are the files of its folder in `conf/`.
"""


def render() -> str:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        defaults = compose("config")
    lines, section = [HEAD], None
    for key, field in keys(Config).items():
        group = key.rpartition(".")[0]
        if group != section:
            section = group
            lines += [f"\n## {group or 'top level'}\n", "| key | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{key}` | {shown(OmegaConf.select(defaults, key))} | {field.description}{bounds(field)} |")
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    text = text.replace("|", "\\|")
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


def bounds(field: Any) -> str:
    """The hard bounds of a number, as the schema states them."""
    found = re.findall(r"(Ge|Gt|Le|Lt)\(\w+=([^)]+)\)", repr(field.metadata) + repr(field.annotation))
    signs = {"Ge": ">=", "Gt": ">", "Le": "<=", "Lt": "<"}
    return f" ({', '.join(f'{signs[kind]} {value}' for kind, value in found)})" if found else ""


if __name__ == "__main__":
    PAGE.write_text(render())
