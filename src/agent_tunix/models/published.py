"""The architectures of published models, so that `plan` need not download them: the numbers of their config.json."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.safetensors import family_named

TABLE = Path(__file__).parent / "published.json"


@functools.cache
def of_repository(repository: str) -> Architecture | None:
    """The architecture of a repository of the hub; None for one that the table does not have, as for a revision of one."""
    for model in json.loads(TABLE.read_text(encoding="utf-8")):
        family = family_named(model["config"]["model_type"])
        if repository in model["repositories"] and family is not None:
            return family.from_config(model["config"])
    return None
