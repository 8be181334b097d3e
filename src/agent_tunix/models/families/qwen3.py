"""Qwen3, dense (Qwen Team, 2025, arXiv:2505.09388): Llama's block, with normed queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from agent_tunix.models.architecture import Architecture
from agent_tunix.models.families import qwen2
from agent_tunix.models.families.family import (
    HEAD_NORMS,
    PRE_NORMS,
    Family,
    pre_norm_architecture,
    pre_norm_block,
    pre_norm_completed,
    pre_norm_config,
    refuse_unsupported,
)
from agent_tunix.models.lora import ATTENTION

DEFAULTS = {**qwen2.DEFAULTS, "head_dim": 128}  # of transformers' Qwen3Config


def from_config(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config, {"use_sliding_window": False})
    biases = ATTENTION if config.get("attention_bias") else ()
    # A window is written down also where it is not used.
    return pre_norm_architecture("qwen3", {**config, "sliding_window": None}, DEFAULTS, biases)


def to_config(arch: Architecture) -> dict[str, Any]:
    return pre_norm_config(arch) | {"attention_bias": bool(arch.biases), "use_sliding_window": False}


FAMILY = Family(
    name="qwen3",
    causal_lm="Qwen3ForCausalLM",
    norms={**PRE_NORMS, **HEAD_NORMS},
    block=pre_norm_block,
    from_config=from_config,
    to_config=to_config,
    completed=partial(pre_norm_completed, "qwen3"),
)
