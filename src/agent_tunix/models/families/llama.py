"""Llama 3 (Llama Team, 2024, arXiv:2407.21783) and what is built like it: Llama 2, TinyLlama, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from agent_tunix.models.architecture import Architecture
from agent_tunix.models.families.family import (
    PRE_NORMS,
    Family,
    pre_norm_architecture,
    pre_norm_block,
    pre_norm_completed,
    pre_norm_config,
)
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD

# Of transformers' LlamaConfig.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
}


def from_config(config: Mapping[str, Any]) -> Architecture:
    biases = (*(ATTENTION if config.get("attention_bias") else ()), *(FEED_FORWARD if config.get("mlp_bias") else ()))
    whole = {**config, "sliding_window": None}  # of which this family knows nothing
    return pre_norm_architecture("llama", whole, DEFAULTS, biases)


def to_config(arch: Architecture) -> dict[str, Any]:
    biased = {"attention_bias": "o_proj" in arch.biases, "mlp_bias": "up_proj" in arch.biases}
    return pre_norm_config(arch) | biased


FAMILY = Family(
    name="llama",
    causal_lm="LlamaForCausalLM",
    norms=PRE_NORMS,
    block=pre_norm_block,
    from_config=from_config,
    to_config=to_config,
    completed=partial(pre_norm_completed, "llama"),
    gguf_turns_heads=True,
)
