"""The text model of Gemma 3 (Gemma Team, 2025, arXiv:2503.19786).

Four RMSNorms a layer, normed queries and keys, GeGLU, five sliding-window layers to one global layer with their own RoPE
bases, and an embedding scaled by sqrt(D) that is tied to the head. A multimodal checkpoint is read for its text part alone.

Both generations of config.json are understood: single keys (`rope_theta`, `sliding_window_pattern`) and, since transformers
5, `rope_parameters` and `layer_types` by kind of layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.blocks import Layer
from agent_tunix.models.families.family import HEAD_NORMS, TIED, Family, refuse_unsupported, rope_scaling, shared_config

# Of transformers' Gemma3TextConfig. Most of them are left out for 4B, 12B and 27B.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
}
FIXED: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    TIED: True,
    "quantization_config": None,
}
SMALL = 26  # layers of 1B; larger ones see further, and are the multimodal ones
LARGEST = 62  # layers of 27B


def block(layer: Layer, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
    h_BTD, kept = layer.attention(layer.norm("input_norm", x_BTD))
    x_BTD = layer.stream(x_BTD + layer.norm("post_attention_norm", h_BTD))
    h_BTD = layer.feed_forward(layer.norm("pre_feedforward_norm", x_BTD), "gelu")
    return layer.stream(x_BTD + layer.norm("post_feedforward_norm", h_BTD)), kept


def from_config(config: Mapping[str, Any]) -> Architecture:
    head = {TIED: config[TIED]} if TIED in config else {}  # the head is the whole model's, not the text part's
    config = {**config, **(config.get("text_config") or {}), **head}
    refuse_unsupported(config, FIXED)
    config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    local_base, global_base, factor = _rope(config)
    return Architecture(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        embed_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        sliding_window=config["sliding_window"],
        global_every=_global_every(config),
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        rope_local_base=local_base,
        rope_global_base=global_base,
        rope_global_factor=factor,
        norm_eps=config["rms_norm_eps"],
    )


def _global_every(config: Mapping[str, Any]) -> int:
    """Every how many layers one is global, from the list of kinds where there is one."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        return pattern
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(pattern, count + 1)
    if len(kinds) != count or kinds != layer_kinds(count, every):
        raise UserError(f"layer_types does not repeat every {every} of {count} layers.")
    return every


def layer_kinds(num_layers: int, global_every: int) -> list[str]:
    return ["full_attention" if i % global_every == 0 else "sliding_attention" for i in range(1, num_layers + 1)]


def _rope(config: Mapping[str, Any]) -> tuple[float, float, float]:
    """The RoPE base of local layers, and base and factor of global ones."""
    by_kind, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kinds_of_layers = {"full_attention", "sliding_attention"}
    if (by_kind and not kinds_of_layers & set(by_kind)) or kinds_of_layers & set(scaling):
        raise UserError(
            "rope_parameters must be given by kind of layer (full_attention, sliding_attention), and rope_scaling must not."
        )
    far = {"rope_theta": config.get("rope_theta", 1_000_000.0), **(by_kind.get("full_attention") or {}), **scaling}
    near = {"rope_theta": config.get("rope_local_base_freq", 10_000.0), **(by_kind.get("sliding_attention") or {})}
    factors = []
    for rope in (near, far):
        if "llama3" in (rope.get("rope_type"), rope.get("type")):
            raise UserError("RoPE of type llama3 is not supported.")
        factors.append(rope_scaling(rope, 1.0, config["head_dim"])[0])
    if factors[0] != 1:
        raise UserError("RoPE of local layers is scaled, which is not supported.")
    return float(near["rope_theta"]), float(far["rope_theta"]), factors[1]


def to_config(arch: Architecture) -> dict[str, Any]:
    """In single keys, which every version of transformers, vLLM and llama.cpp's converter reads."""
    scalar, numbers = round(arch.query_scale**-2, 6), shared_config(arch)
    return numbers | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": arch.sliding_window,
        "sliding_window_pattern": arch.global_every,
        "layer_types": layer_kinds(arch.num_layers, arch.global_every),
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,  # transformers takes whole numbers only
        "rope_local_base_freq": arch.rope_local_base,
        # As published, longer for models with scaled positions.
        "max_position_embeddings": 32768 if numbers["rope_scaling"] is None else 131072,
        "attention_bias": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }


def completed(numbers: Mapping[str, Any]) -> Architecture:
    layers, embed_dim, heads = numbers["num_layers"], numbers["embed_dim"], numbers["num_heads"]
    scalar = embed_dim / heads if layers == LARGEST else numbers["head_dim"]
    usual = {
        "sliding_window": 512 if layers <= SMALL else 1024,
        "global_every": 6,
        "query_scale": scalar**-0.5,
        "rope_local_base": 10_000.0,
        "rope_global_base": 1_000_000.0,
        "rope_global_factor": 1.0 if layers <= SMALL else 8.0,
        "norm_eps": 1e-6,
    }
    return Architecture(**usual | dict(numbers))


FAMILY = Family(
    name="gemma3",
    causal_lm="Gemma3ForCausalLM",
    norms={
        "input_norm": ("input_layernorm", "embed_dim"),
        **HEAD_NORMS,
        "post_attention_norm": ("post_attention_layernorm", "embed_dim"),
        "pre_feedforward_norm": ("pre_feedforward_layernorm", "embed_dim"),
        "post_feedforward_norm": ("post_feedforward_layernorm", "embed_dim"),
    },
    block=block,
    from_config=from_config,
    to_config=to_config,
    completed=completed,
    other_names=("gemma3_text",),
    norm_offset=1.0,
    scales_embedding=True,
    kernels=True,
)
