"""Qwen2 (Qwen Team, 2024, arXiv:2407.10671) and Qwen2.5, Coder and Math among them: Llama's block, with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_tunix.models.architecture import Architecture
from agent_tunix.models.families.family import (
    PRE_NORMS,
    Family,
    pre_norm_architecture,
    pre_norm_block,
    pre_norm_completed,
    pre_norm_config,
    refuse_unsupported,
)

BIASES = ("q_proj", "k_proj", "v_proj")
# Of transformers' Qwen2Config.
DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
}


def from_config(config: Mapping[str, Any]) -> Architecture:
    refuse_unsupported(config, {"use_sliding_window": False})
    # A window is written down also where it is not used.
    return pre_norm_architecture("qwen2", {**config, "sliding_window": None}, DEFAULTS, BIASES)


def to_config(arch: Architecture) -> dict[str, Any]:
    return pre_norm_config(arch) | {"use_sliding_window": False}


def completed(numbers: Mapping[str, Any]) -> Architecture:
    return pre_norm_completed("qwen2", {"biases": BIASES, **numbers})


FAMILY = Family(
    name="qwen2",
    causal_lm="Qwen2ForCausalLM",
    norms=PRE_NORMS,
    block=pre_norm_block,
    from_config=from_config,
    to_config=to_config,
    completed=completed,
)
