"""The shipped models by their size, as conf/model describes them."""

from __future__ import annotations

from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder
from agent_tunix.config.schema import ModelSection
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.published import of_repository


def model_section(size: str) -> ModelSection:
    """Of Gemma 3's models by their size alone, of the others by the name of their file in conf/model."""
    models = config_folder() / "model"
    named = models / f"{size}.yaml"
    section = OmegaConf.load(named if named.exists() else models / f"gemma3_{size}.yaml")
    section.pop("defaults", None)  # which are Hydra's
    return ModelSection.model_validate(OmegaConf.to_container(section))


def architecture(size: str) -> Architecture:
    arch = of_repository(model_section(size).weights)
    assert arch is not None, size
    return arch
