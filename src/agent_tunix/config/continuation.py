"""The configuration of a run that is gone on with: its own, with the single values that may be changed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from agent_tunix.config.load import read_config, validate
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError

FIXED = {  # what a run cannot change and still be one run
    "seed": "the order of the data follows from it",
    "model.lora_alpha": "it scales what the adapters have learnt",
    "optimizer.optimizer_name": "its state is another optimizer's",
    "training.init_from": "it is compared with what it began from",
    "training.method": "what was learnt by the other would count as its own",
    "training.train_fraction": "problems that were trained on would count as held out",
}


def resumed(folder: str, overrides: Sequence[str]) -> tuple[Config, Path]:
    """A run's own configuration, with the values that were overridden on the command line of its continuation."""
    path = Path(folder)
    if not (path / "config.yaml").exists():
        raise UserError(f"training.resume={folder}: this is not the folder of a run, it has no config.yaml.")
    saved = read_config(path / "config.yaml")
    began = {key: OmegaConf.select(saved, key) for key in FIXED}
    for override, parsed in zip(overrides, OverridesParser.create().parse_overrides(list(overrides)), strict=True):
        key, value = parsed.key_or_group, parsed.value()
        if key in ("training.resume", "dry_run"):
            continue
        if "." not in key and key != "seed":
            raise UserError(
                f"{override}: a resumed run keeps its own groups; only single values, as in a.b=c, can be changed."
            )
        OmegaConf.update(saved, key, value, force_add=True)
        if key in FIXED and not _same(key, began[key], OmegaConf.select(saved, key)):
            kept = "null" if began[key] is None else began[key]
            raise UserError(f"{override.lstrip('+')}: a resumed run keeps {key}={kept}, as {FIXED[key]}. Start another run.")
    return validate(saved, Config), path


def _same(key: str, before: Any, now: Any) -> bool:
    """Whether it is still one run; the folder that it began from may have been moved."""
    return before == now or (key == "training.init_from" and None not in (before, now))
