"""Checkpoints in Hugging Face's layout (config.json, *.safetensors, tokenizer) to and from our stacked weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.flax import save_file

from agent_tunix.errors import UserError
from agent_tunix.models.gemma3 import Architecture, Layers, Weights
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, huggingface_name, module_shape

PACKAGED = "package:"
NORMS = {
    "input_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_feedforward_norm": "pre_feedforward_layernorm",
    "post_feedforward_norm": "post_feedforward_layernorm",
}


def find_checkpoint(source: str) -> Path:
    """The local folder that `model.weights` means; raises UserError where there is none within reach."""
    if source.startswith(PACKAGED):
        return Path(__file__).parent / source.removeprefix(PACKAGED)
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    return _from_hub(source)


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer.json", "tokenizer.model"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted, etag_timeout=5))
    except Exception as fault:
        raise UserError(
            f"model.weights={repository}: no such folder here, and the Hugging Face hub did not give it "
            f"({type(fault).__name__}).\n"
            "Ways to get weights:\n"
            f"  accept the licence at huggingface.co/{repository}, then `huggingface-cli login` and run again\n"
            "  model.weights=<folder> with config.json, *.safetensors and the tokenizer, downloaded before\n"
            "No weights are needed for the quick test, which runs on any CPU:\n"
            "  python run_training.py +experiment=quick_test"
        ) from fault


def read_architecture(folder: Path) -> Architecture:
    """The architecture that a checkpoint's config.json describes."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    rope = config.get("rope_scaling") or {}
    return Architecture(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        embed_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        sliding_window=config["sliding_window"],
        global_every=config.get("sliding_window_pattern", 6),
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        rope_local_base=config.get("rope_local_base_freq", 10_000.0),
        rope_global_base=config.get("rope_theta", 1_000_000.0),
        rope_global_factor=rope.get("factor", 1.0),
        norm_eps=config["rms_norm_eps"],
    )


def load_weights(folder: Path, arch: Architecture, dtype: jnp.dtype) -> Weights:
    """Reads every tensor of a checkpoint folder once, straight into the stacked layout."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no *.safetensors file.")
    handles = [safe_open(file, framework="flax") for file in files]
    where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 (safe_open is no dict)

    def tensor(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in where:
            raise UserError(f"{folder} has no tensor {name}.")
        value = where[name].get_tensor(name)
        if value.shape != shape:
            raise UserError(f"{folder}: tensor {name} has shape {value.shape}, the architecture asks for {shape}.")
        return value.astype(dtype)

    return _assemble(arch, tensor)


def _assemble(arch: Architecture, tensor: Callable[[str, tuple[int, ...]], jax.Array]) -> Weights:
    def stacked(name: Callable[[int], str], shape: tuple[int, ...]) -> jax.Array:
        return jnp.stack([tensor(name(layer), shape) for layer in range(arch.num_layers)])

    def matrix(module: str) -> jax.Array:
        fan_in, fan_out = module_shape(arch, module)
        return stacked(lambda i: f"{huggingface_name(i, module)}.weight", (fan_out, fan_in)).swapaxes(1, 2)

    def norm(field: str) -> jax.Array:
        width = arch.head_dim if field in ("q_norm", "k_norm") else arch.embed_dim
        return stacked(lambda i: f"model.layers.{i}.{NORMS[field]}.weight", (width,))

    layers = {module: matrix(module) for module in ATTENTION + FEED_FORWARD} | {field: norm(field) for field in NORMS}
    return Weights(
        embed_VD=tensor("model.embed_tokens.weight", (arch.vocab_size, arch.embed_dim)),
        layers=Layers(**layers),
        final_norm_D=tensor("model.norm.weight", (arch.embed_dim,)),
    )


def init_weights(key: jax.Array, arch: Architecture, dtype: jnp.dtype = jnp.float32) -> Weights:
    """Random weights of an architecture, each matrix of variance 1 / in."""
    keys = iter(jax.random.split(key, 1 + len(ATTENTION + FEED_FORWARD) * arch.num_layers))

    def tensor(name: str, shape: tuple[int, ...]) -> jax.Array:
        if "norm" in name:
            return jnp.zeros(shape, dtype)
        fan_in = arch.embed_dim if "embed" in name else shape[1]
        return (jax.random.normal(next(keys), shape) * fan_in**-0.5).astype(dtype)

    return _assemble(arch, tensor)


def save_weights(folder: Path, weights: Weights, arch: Architecture, dtype: jnp.dtype) -> None:
    """Writes config.json and model.safetensors that transformers' Gemma3ForCausalLM loads."""
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": weights.embed_VD,
        "model.norm.weight": weights.final_norm_D,
    }
    for layer in range(arch.num_layers):
        for field in dataclasses.fields(weights.layers):
            value = getattr(weights.layers, field.name)[layer]
            if field.name in NORMS:
                tensors[f"model.layers.{layer}.{NORMS[field.name]}.weight"] = value
            else:
                tensors[f"{huggingface_name(layer, field.name)}.weight"] = value.T
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: jnp.asarray(np.ascontiguousarray(value), dtype) for name, value in tensors.items()}
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_huggingface_config(arch, jnp.dtype(dtype).name), indent=2) + "\n")


def _huggingface_config(arch: Architecture, dtype: str) -> dict[str, Any]:
    kinds = ["full_attention" if i % arch.global_every == 0 else "sliding_attention" for i in range(1, arch.num_layers + 1)]
    scaling = {"factor": arch.rope_global_factor, "rope_type": "linear"} if arch.rope_global_factor != 1 else None
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": arch.vocab_size,
        "num_hidden_layers": arch.num_layers,
        "hidden_size": arch.embed_dim,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "intermediate_size": arch.hidden_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": arch.sliding_window,
        "sliding_window_pattern": arch.global_every,
        "layer_types": kinds,
        "query_pre_attn_scalar": round(arch.query_scale**-2, 6),
        "rope_local_base_freq": arch.rope_local_base,
        "rope_theta": arch.rope_global_base,
        "rope_scaling": scaling,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "torch_dtype": dtype,
    }
