"""PEFT's layout of adapters: adapter_config.json and adapter_model.safetensors, A as [rank, in] and B as [out, rank]."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from agent_tunix.errors import UserError, reading
from agent_tunix.files import open_regular, read_json
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, Adapters, huggingface_name, module_shape, scale_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.model\.(?:language_model\.)?layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])\.weight")
# Settings that change what adapters do, with the values for which the code here is right.
FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
    "lora_bias": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "use_qalora": False,
    "use_bdlora": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
# Ways to begin after which the base is no longer the one that was published.
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def is_peft(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def write_adapters(
    folder: Path, adapters: Adapters, alpha: float, base: str, multimodal: bool, dtype: str, use_rslora: bool = False
) -> None:
    """Writes adapters for PEFT; `base` names the model they sit on, whose text part may be one of a multimodal one."""
    modules = sorted(adapters.a)
    tensors = {}
    for module in modules:
        for layer in range(len(adapters.a[module])):
            name = huggingface_name(layer, module)
            name = name.replace("model.", "model.language_model.", 1) if multimodal else name
            for letter, stacked in (("A", adapters.a), ("B", adapters.b)):
                matrix = np.ascontiguousarray(stacked[module][layer].T, jnp.dtype(dtype))
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = matrix
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.a[modules[0]].shape[-1],
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # vLLM takes whole numbers only
        "use_rslora": use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # The vision tower of a multimodal model has modules of the same names, which were not trained.
        "target_modules": rf".*language_model.*\.({'|'.join(modules)})" if multimodal else modules,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def base_of(folder: Path) -> str:
    """The model that adapters name as the one they sit on."""
    base = _config(folder).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UserError(f"{folder / CONFIG} does not name its base; give the model's weights too.")
    return base


def read_adapters(folder: Path, arch: Architecture) -> Adapters:
    """Adapters that `write_adapters` wrote, or others that are on all layers of their modules; in float32."""
    config, found = _config(folder), dict[tuple[str, str], dict[int, np.ndarray]]()
    for key, value in FIXED.items():
        if (config.get(key) or None) != (value or None):
            raise UserError(f"{folder / CONFIG}: {key} is {config.get(key)!r:.80}; only {value!r} is supported.")
    if str(begun := config.get("init_lora_weights")).lower().startswith(CHANGE_BASE):
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights is {begun!r:.80}, which changes the base; have PEFT save it as LoRA, "
            "by path_initial_model_for_weight_conversion."
        )
    with reading(folder / TENSORS):
        rank, alpha, use_rslora = int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora"))
        open_regular(folder / TENSORS).close()
        for name, tensor in load_file(folder / TENSORS).items():
            known = NAME.fullmatch(name)
            if known is None or known[2] not in ATTENTION + FEED_FORWARD:
                raise UserError(f"{folder / TENSORS}: {name} is an adapter of no module of this model.")
            found.setdefault((known[3], known[2]), {})[int(known[1])] = tensor.T.astype(np.float32)
    if not found:
        raise UserError(f"{folder / TENSORS} holds no adapters.")
    a: dict[str, jax.Array] = {}
    b: dict[str, jax.Array] = {}
    for module in sorted({module for _, module in found}):
        fan_in, fan_out = module_shape(arch, module)
        for letter, stacks, shape in (("A", a, (fan_in, rank)), ("B", b, (rank, fan_out))):
            by_layer = found.get((letter, module), {})
            if sorted(by_layer) != [*range(arch.num_layers)] or {matrix.shape for matrix in by_layer.values()} != {shape}:
                raise UserError(
                    f"{folder / TENSORS}: lora_{letter} of {module} does not fit the model, of which all {arch.num_layers} "
                    f"layers are to have one of shape {[*shape[::-1]]}."
                )
            stacks[module] = jnp.stack([by_layer[layer] for layer in range(arch.num_layers)])
    return Adapters(a, b, scale_of(rank, alpha, use_rslora))


def _config(folder: Path) -> dict[str, Any]:
    with reading(folder / CONFIG):
        config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} cannot be read: it holds no object")
    return config
