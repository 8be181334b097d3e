"""All families of models that can be trained, by name."""

from __future__ import annotations

from agent_tunix.models.architecture import Architecture
from agent_tunix.models.families import gemma3, llama, qwen2, qwen3
from agent_tunix.models.families.family import Family

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (gemma3, llama, qwen2, qwen3)}


def family_of(arch: Architecture) -> Family:
    return FAMILIES[arch.family]
