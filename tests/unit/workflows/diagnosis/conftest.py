"""The configuration of the demo, as a run writes it down."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder


@pytest.fixture(scope="session")
def config() -> dict:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return OmegaConf.to_container(compose("config", ["+experiment=quick_test"]), resolve=True)
