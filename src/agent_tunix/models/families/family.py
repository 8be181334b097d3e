"""What a family of models is: one record, which each module beside this one makes, and the parts that they share."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from agent_tunix.errors import UserError
from agent_tunix.models.architecture import NO_WINDOW, Architecture
from agent_tunix.models.blocks import Layer

TIED = "tie_word_embeddings"
# For each norm of a layer: what follows `model.layers.<n>.` in Hugging Face's name of it, and which width it has.
Norms = Mapping[str, tuple[str, str]]
PRE_NORMS: Norms = {
    "input_norm": ("input_layernorm", "embed_dim"),
    "pre_feedforward_norm": ("post_attention_layernorm", "embed_dim"),
}
HEAD_NORMS: Norms = {"q_norm": ("self_attn.q_norm", "head_dim"), "k_norm": ("self_attn.k_norm", "head_dim")}


@dataclasses.dataclass(frozen=True)
class Family:
    """All that tells one family from another. To add one, write a module that makes its record, and list it in table.py."""

    name: str  # in config.json, as its model_type, and in GGUF files
    causal_lm: str  # transformers' class
    norms: Norms
    # A layer: from the residual stream before it to that after it, and what attention keeps of the tokens.
    block: Callable[[Layer, jax.Array], tuple[jax.Array, Any]]
    # Numbers of a config.json, in which null counts as left out, to the architecture and back.
    from_config: Callable[[Mapping[str, Any]], Architecture]
    to_config: Callable[[Architecture], dict[str, Any]]
    # The numbers that formats without a config.json record, by our names; the others are as in every model of the family.
    completed: Callable[[Mapping[str, Any]], Architecture]
    other_names: tuple[str, ...] = ()  # that config.json may have for it
    norm_offset: float = 0.0  # 1 where norms are stored as departures from one
    scales_embedding: bool = False  # by the square root of the width
    gguf_turns_heads: bool = False  # llama.cpp stores queries and keys with the pairs that RoPE rotates side by side
    kernels: bool = False  # whether the GPU kernels for decoding and for turning sequences compute its block


def pre_norm_block(layer: Layer, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
    """The block of Llama (Touvron et al., 2023, arXiv:2302.13971): norms before attention and before SwiGLU."""
    h_BTD, kept = layer.attention(layer.norm("input_norm", x_BTD))
    x_BTD = layer.stream(x_BTD + h_BTD)
    h_BTD = layer.feed_forward(layer.norm("pre_feedforward_norm", x_BTD), "silu")
    return layer.stream(x_BTD + h_BTD), kept


def pre_norm_architecture(family: str, config: Mapping[str, Any], defaults: Mapping[str, Any], biases: tuple[str, ...]):
    """The architecture by a config.json of Llama's kind, whose missing keys have the defaults of transformers' class."""
    refuse_unsupported(config, {"hidden_act": "silu", "quantization_config": None})
    c = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    heads = c["num_attention_heads"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    rope = {"rope_theta": c.get("rope_theta", 10_000.0), **(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    if (share := rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))) != 1:
        raise UserError(f"partial_rotary_factor is {share}; only models that rotate whole heads are supported.")
    base = float(rope["rope_theta"])
    factor, factors = rope_scaling(rope, base, head_dim)
    return Architecture(
        vocab_size=c["vocab_size"],
        num_layers=c["num_hidden_layers"],
        embed_dim=c["hidden_size"],
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        hidden_dim=c["intermediate_size"],
        sliding_window=c.get("sliding_window") or NO_WINDOW,
        global_every=1 if c.get("sliding_window") is None else c["num_hidden_layers"] + 1,
        query_scale=head_dim**-0.5,
        rope_local_base=base,
        rope_global_base=base,
        rope_global_factor=factor,
        norm_eps=c["rms_norm_eps"],
        family=family,
        tied=c.get(TIED, False),
        biases=biases,
        rope_factors=factors,
    )


def pre_norm_config(arch: Architecture) -> dict[str, Any]:
    """The numbers of a config.json of Llama's kind."""
    return shared_config(arch) | {"hidden_act": "silu"}


def shared_config(arch: Architecture) -> dict[str, Any]:
    """The numbers of a config.json that every family has, under the same keys."""
    return {
        "vocab_size": arch.vocab_size,
        "num_hidden_layers": arch.num_layers,
        "hidden_size": arch.embed_dim,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.hidden_dim,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_global_base,
        "rope_scaling": scaling_of(arch),
        TIED: arch.tied,
    }


def pre_norm_completed(family: str, numbers: Mapping[str, Any]) -> Architecture:
    """An architecture of Llama's kind from the numbers that a format records."""
    base, embed_dim, heads = numbers.get("rope_global_base", 10_000.0), numbers["embed_dim"], numbers["num_heads"]
    head_dim = numbers.get("head_dim", embed_dim // heads)
    usual = {
        "head_dim": head_dim,
        "num_kv_heads": heads,
        "sliding_window": NO_WINDOW,
        "global_every": 1,
        "query_scale": head_dim**-0.5,
        "rope_local_base": base,
        "rope_global_base": base,
        "rope_global_factor": 1.0,
        "norm_eps": 1e-6,
        "family": family,
    }
    return Architecture(**usual | dict(numbers))


def refuse_unsupported(config: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Refuses settings that there is no code for; `fixed` are the values that are taken for granted."""
    for key, value in fixed.items():
        found = config.get(key, value)
        if found != value and not (found is None and value is False):
            shown = "set" if isinstance(found, dict | list) else f"{json.dumps(found):.80}"
            raise UserError(f"{key} is {shown}; only {json.dumps(value)} is supported.")


def rope_scaling(rope: Mapping[str, Any], base: float, head_dim: int) -> tuple[float, tuple[float, ...]]:
    """What positions are divided by: for all angles, or for each. A factor counts for nothing beside the type default."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in (None, "default", "linear", "llama3"):
        raise UserError(f"RoPE of type {kind!s:.80} is not supported.")
    if ("factor" in rope and kind is None) or ("factor" not in rope and kind in ("linear", "llama3")):
        raise ValueError(f"RoPE has {dict(rope)}, of which type and factor are wanted, or neither")
    if kind == "llama3":
        return 1.0, llama3_factors(rope, base, head_dim)
    return (float(rope["factor"]) if kind == "linear" else 1.0), ()


def llama3_factors(rope: Mapping[str, Any], base: float, head_dim: int) -> tuple[float, ...]:
    """What each angle is divided by (Llama Team, 2024, arXiv:2407.21783): the factor for long waves, 1 for short ones."""
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    longest = float(rope["original_max_position_embeddings"])

    def of_wave(length: float) -> float:
        share = (longest / length - low) / (high - low)  # of the unscaled angle
        share = min(1.0, max(0.0, share))
        return 1.0 / ((1.0 - share) / factor + share)

    return tuple(of_wave(2 * math.pi * base ** (2 * i / head_dim)) for i in range(head_dim // 2))


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # of all published ones


def scaling_of(arch: Architecture) -> dict[str, Any] | None:
    """config.json's account of scaled positions."""
    if arch.rope_factors:
        described = {"rope_type": "llama3", "factor": round(max(arch.rope_factors), 4), **LLAMA3}
        again = llama3_factors(described, arch.rope_global_base, arch.head_dim)
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(again, arch.rope_factors, strict=True)):
            raise UserError("The RoPE factors of this model are none that a config.json can describe.")
        return described
    return {"rope_type": "linear", "factor": arch.rope_global_factor} if arch.rope_global_factor != 1 else None
