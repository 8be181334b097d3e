"""Writes docs/configuration/keys.md and the curves of the schedules from the schema and the YAML files: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent_tunix.algorithm.schedules import SCHEDULES
from agent_tunix.config.load import config_folder, keys, validate
from agent_tunix.config.schema import Config, ServeConfig
from agent_tunix.lab.plan.plot import as_svg
from agent_tunix.lab.tune.config import LrFindConfig, TuneConfig
from agent_tunix.training.horizon import make_plan

PAGE = Path(__file__).parents[1] / "docs" / "configuration" / "keys.md"
CURVES = PAGE.parent / "schedules"
UPDATES = 100
VERBS = {
    "config": Config,
    "lr_find": LrFindConfig,
    "tune": TuneConfig,
    "serve": ServeConfig,
}  # the configurations that are explained, by file
HEAD = """# Every configuration key

Generated from the schema by `make docs`. Defaults are those of `python run_training.py` with no overrides; a group's
other choices are the files of its folder in `conf/`. The sections `lr_find`, `tune` and `serve` are those of
`agent-tunix lr-find`, `agent-tunix tune` and `agent-tunix serve`; what `evaluate.py` and `agent-tunix export` take
besides is said in [the training API](../api/train.rst).
"""


def render() -> str:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        defaults = {file: compose(file) for file in VERBS}
    lines, section = [HEAD], None
    explained = {key: (file, field) for file in reversed(VERBS) for key, field in keys(VERBS[file]).items()}
    for key in dict.fromkeys(key for kind in VERBS.values() for key in keys(kind)):
        file, field = explained[key]
        group = key.rpartition(".")[0]
        if not group and file != "config":  # the run that is served
            continue
        if group != section:
            section = group
            lines += [f"\n## {group or 'top level'}\n", "| key | default | meaning |", "|---|---|---|"]
        lines.append(f"| `{key}` | {shown(OmegaConf.select(defaults[file], key))} | {field.description}{bounds(field)} |")
    return "\n".join(lines) + "\n"


def curves() -> dict[Path, str]:
    """A picture of each schedule as its YAML file ships it, over a run of 100 updates at the default peak."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        run = ["training.micro_batch_size=1", f"training.num_batches={UPDATES}"]
        configs = {name: validate(compose("config", [f"scheduler={name}", *run]), Config) for name in SCHEDULES}
    pictures = {}
    for name, cfg in configs.items():
        schedule = make_plan(cfg, UPDATES).schedule
        rates = [schedule(t) for t in range(1, UPDATES + 1)]
        pictures[CURVES / f"{name}.svg"] = as_svg(rates, name)
    return pictures


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
    CURVES.mkdir(exist_ok=True)
    for path, picture in curves().items():
        path.write_text(picture)
