"""The configuration of a run that is gone on with: its own, with the single values that may be changed on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from agent_tunix.config.load import read_config, validate
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError

FIXED = {  # what a run cannot change and still be one run
    "seed": "the order of the data follows from it",
    "model.lora_alpha": "it scales what the adapters have learnt",
    "optimizer.optimizer_name": "its state is another optimizer's",
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
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key in ("training.resume", "dry_run"):
            continue
        if "." not in key and key != "seed":
            raise UserError(
                f"{override}: a resumed run keeps its own groups; only single values, as in a.b=c, can be changed."
            )
        saved.merge_with(OmegaConf.from_dotlist([f"{key}={value}"]))
        if key in FIXED and OmegaConf.select(saved, key) != began[key]:
            raise UserError(f"{key}={value}: a resumed run keeps {key}={began[key]}, as {FIXED[key]}. Start another run.")
    return validate(saved, Config), path
