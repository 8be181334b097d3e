"""PEFT's layout of adapters: adapter_config.json and adapter_model.safetensors, A as [rank, in] and B as [out, rank].

Those of DoRA also have the magnitudes of each module, [out].
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from agent_tunix.errors import UserError, reading
from agent_tunix.files import open_regular, read_json
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, Adapters, DoraAdapters, huggingface_name, module_shape, scale_of

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
NAME = re.compile(
    r"base_model\.model\.model\.(?:language_model\.)?layers\.(\d+)\.\w+\.(\w+)\.lora_(A\.weight|B\.weight|magnitude_vector)"
)
A, B, MAGNITUDES = "A.weight", "B.weight", "magnitude_vector"
# Settings that change what adapters do, with the values for which the code here is right.
FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
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
    folder: Path,
    adapters: Adapters,
    alpha: float,
    base: str,
    multimodal: bool,
    dtype: str,
    use_rslora: bool = False,
    revision: str | None = None,
) -> None:
    """Writes adapters for PEFT; `base` names the model they sit on, whose text part may be one of a multimodal one."""
    modules = sorted(adapters.a)
    tensors = {}
    for module in modules:
        for layer in range(len(adapters.a[module])):
            name = huggingface_name(layer, module)
            name = name.replace("model.", "model.language_model.", 1) if multimodal else name
            for kind, stacked in _kinds(adapters).items():
                array = np.ascontiguousarray(stacked[module][layer].T, jnp.dtype(dtype))
                tensors[f"base_model.model.{name}.lora_{kind}"] = array
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **({"revision": revision} if revision else {}),
        "r": adapters.a[modules[0]].shape[-1],
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # vLLM takes whole numbers only
        "use_rslora": use_rslora,
        "use_dora": isinstance(adapters, DoraAdapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        # The vision tower of a multimodal model has modules of the same names, which were not trained.
        "target_modules": rf".*language_model.*\.({'|'.join(modules)})" if multimodal else modules,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _kinds(adapters: Adapters) -> dict[str, dict[str, jax.Array]]:
    """The arrays of adapters by the ends of their tensors' names."""
    magnitudes = {MAGNITUDES: adapters.magnitudes} if isinstance(adapters, DoraAdapters) else {}
    return {A: adapters.a, B: adapters.b, **magnitudes}


def named_base(folder: Path) -> str | None:
    """The model that adapters name as the one they sit on, if they name one."""
    base = _config(folder).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None


def base_of(folder: Path) -> str:
    """The model that adapters name as the one they sit on."""
    if (base := named_base(folder)) is None:
        raise UserError(f"{folder / CONFIG} does not name its base; give the model's weights too.")
    return base


def settings_of(folder: Path) -> dict[str, Any]:
    """What adapters say of themselves, by our keys of `model`."""
    config = _config(folder)
    for key, value in FIXED.items():
        if (config.get(key) or None) != (value or None):
            raise UserError(f"{folder / CONFIG}: {key} is {config.get(key)!r:.80}; only {value!r} is supported.")
    if str(begun := config.get("init_lora_weights")).lower().startswith(CHANGE_BASE):
        raise UserError(
            f"{folder / CONFIG}: init_lora_weights is {begun!r:.80}, which changes the base; have PEFT save it as LoRA, "
            "by path_initial_model_for_weight_conversion."
        )
    with reading(folder / CONFIG):
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1 or not 0 < alpha < math.inf:
            raise ValueError(f"r is {rank} and lora_alpha {alpha:g}")
        kind = {key: bool(config.get(key)) for key in ("use_rslora", "use_dora")}
        return {"lora_rank": rank, "lora_alpha": alpha, **kind}


def read_adapters(folder: Path, arch: Architecture) -> Adapters:
    """Adapters that `write_adapters` wrote, or others that are on all layers of their modules; in float32."""
    settings = settings_of(folder)
    path = folder / TENSORS
    if not path.exists() and (folder / PICKLED).exists():
        raise UserError(f"{folder} holds {PICKLED}, which may run code when it is read; have PEFT save it as {TENSORS}.")
    with reading(path):
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no dict
            stacks = _stacks(path, shapes, arch, settings["lora_rank"], settings["use_dora"])
            arrays = {key: jnp.stack([_tensor(file, name) for name in names]) for key, names in stacks.items()}
    scale = scale_of(settings["lora_rank"], settings["lora_alpha"], settings["use_rslora"])
    a, b, magnitudes = ({of: x for (kind, of), x in arrays.items() if kind == wanted} for wanted in (A, B, MAGNITUDES))
    return DoraAdapters(a, b, scale, magnitudes=magnitudes) if settings["use_dora"] else Adapters(a, b, scale)


def _stacks(
    path: Path, shapes: dict[str, tuple[int, ...]], arch: Architecture, rank: int, use_dora: bool
) -> dict[tuple[str, str], list[str]]:
    """For A and B of each module the names of its tensors, layer by layer. Refuses what does not fit before it is read."""
    found = dict[tuple[str, str], dict[int, str]]()
    for name in shapes:
        known = NAME.fullmatch(name)
        if known is None or known[2] not in ATTENTION + FEED_FORWARD:
            raise UserError(f"{path}: {name[:200]} is an adapter of no module of this model.")
        found.setdefault((known[3], known[2]), {})[int(known[1])] = name
    if not found:
        raise UserError(f"{path} holds no adapters.")
    stacks = {}
    for module in sorted({module for _, module in found}):
        fan_in, fan_out = module_shape(arch, module)
        of_module: dict[str, tuple[int, ...]] = {A: (rank, fan_in), B: (fan_out, rank)}
        for kind, shape in (of_module | ({MAGNITUDES: (fan_out,)} if use_dora else {})).items():
            by_layer = found.pop((kind, module), {})
            if sorted(by_layer) != [*range(arch.num_layers)] or {shapes[name] for name in by_layer.values()} != {shape}:
                raise UserError(
                    f"{path}: lora_{kind.removesuffix('.weight')} of {module} does not fit the model, of which all "
                    f"{arch.num_layers} layers are to have one of shape {[*shape]}."
                )
            stacks[kind, module] = [by_layer[layer] for layer in range(arch.num_layers)]
    if found:
        raise UserError(f"{path} holds magnitudes, which {CONFIG} does not tell of: use_dora is false there.")
    return stacks


def _tensor(file: Any, name: str) -> np.ndarray:
    """An array as ours are; matrices are [in, out]."""
    tensor = file.get_tensor(name)
    if not jnp.issubdtype(tensor.dtype, jnp.floating) or not np.isfinite(tensor.astype(np.float32)).all():
        raise ValueError(f"{name} holds other things than finite floating-point numbers")
    return tensor.T.astype(np.float32)


def _config(folder: Path) -> dict[str, Any]:
    with reading(folder / CONFIG):
        config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} cannot be read: it holds no object")
    return config
