"""Hugging Face's layout of a Gemma 3 checkpoint: config.json, *.safetensors, and the names its tensors go by.

A multimodal checkpoint is read for its text part alone. Both generations of config.json are understood: single keys
(`rope_theta`, `sliding_window_pattern`) and, since transformers 5, `rope_parameters` and `layer_types` by kind of layer.
"""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (teaches numpy the type that most checkpoints are stored in)
import numpy as np
from safetensors import safe_open

from agent_tunix import files
from agent_tunix.errors import UserError, calling, reading, unparsed
from agent_tunix.models.architecture import Architecture

INDEX = "model.safetensors.index.json"
GREATEST = 1e12  # of any number that a model has
MOST_LAYERS, MOST_TENSORS, MOST_FILES = 1000, 2**17, 2**13
NAMED = 6  # files that a message lists before it only counts them
NO_WEIGHTS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
TIED = "tie_word_embeddings"
# The defaults of transformers' Gemma3TextConfig, for keys that a config.json leaves out: those of 4B, 12B and 27B do most.
DEFAULTS: dict[str, Any] = {
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
# Settings that this implementation has no code for, with the value that it takes for granted.
FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    TIED: True,
    "quantization_config": None,
}
TEXT = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?((?:embed_tokens|layers|norm)\..+)")
NOT_TEXT = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
EMBEDDING, HEAD = "model.embed_tokens.weight", re.compile(r"(?:language_model\.)?lm_head\.weight")


def read_config(folder: Path, family: str = "gemma3") -> dict[str, Any]:
    """A checkpoint's config.json; raises UserError where it is missing, broken or of another family."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} has no config.json: it is not a checkpoint in Hugging Face's layout.")
    with reading(path, "download it again"):
        config = files.read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in (family, f"{family}_text"):
        raise UserError(f"{path} describes a model of type {kind!s:.80}; only {family} and {family}_text can be trained.")
    return config


def read_architecture(folder: Path, family: str = "gemma3") -> Architecture:
    """The architecture that a checkpoint's config.json describes."""
    whole = read_config(folder, family)
    head = {TIED: whole[TIED]} if TIED in whole else {}  # the head is the whole model's, not the text part's
    with calling(partial(_wrong_kind, folder / "config.json")):
        return numeric(_architecture({**whole, **(whole.get("text_config") or {}), **head}, folder))


def _wrong_kind(path: Path, fault: BaseException) -> UserError:
    """For whatever comes of numbers that are lists, or of lists that are none."""
    if isinstance(fault, UserError):
        return fault
    return UserError(f"{path} has a value of the wrong kind ({unparsed(fault)}); download it again.")


def _architecture(config: dict[str, Any], folder: Path) -> Architecture:
    _check_fixed(config, folder)
    config = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    local_base, global_base, factor = _rope(config, folder)
    return Architecture(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        embed_dim=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_dim=config["intermediate_size"],
        sliding_window=config["sliding_window"],
        global_every=_global_every(config, folder),
        query_scale=config["query_pre_attn_scalar"] ** -0.5,
        rope_local_base=local_base,
        rope_global_base=global_base,
        rope_global_factor=factor,
        norm_eps=config["rms_norm_eps"],
    )


def numeric(arch: Architecture) -> Architecture:
    """The architecture, if its numbers are numbers of a model: a file may hold "6" or 6.0 for 6, and infinity."""
    for field in dataclasses.fields(arch):
        value = getattr(arch, field.name)
        if not isinstance(value, int if field.type == "int" else int | float) or not 0 < value < GREATEST:
            raise TypeError(f"{field.name} is {value!r}")
    if arch.num_layers > MOST_LAYERS:
        raise ValueError(f"num_layers is {arch.num_layers}")
    return arch


def _check_fixed(config: dict[str, Any], folder: Path) -> None:
    for key, value in FIXED.items():
        found = config.get(key, value)
        if found != value and not (found is None and value is False):
            shown = "set" if isinstance(found, dict | list) else json.dumps(found)
            raise UserError(f"{folder / 'config.json'}: {key} is {shown}; only {json.dumps(value)} is supported.")


def _global_every(config: dict[str, Any], folder: Path) -> int:
    """Every how many layers one is global, from the list of kinds where there is one."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds, count = config.get("layer_types"), config["num_hidden_layers"]
    if kinds is None:
        return pattern
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(pattern, count + 1)
    if len(kinds) != count or kinds != layer_kinds(count, every):
        raise UserError(f"{folder / 'config.json'}: layer_types does not repeat every {every} of {count} layers.")
    return every


def layer_kinds(num_layers: int, global_every: int) -> list[str]:
    return ["full_attention" if i % global_every == 0 else "sliding_attention" for i in range(1, num_layers + 1)]


def _rope(config: dict[str, Any], folder: Path) -> tuple[float, float, float]:
    """The RoPE base of local layers, and base and factor of global ones."""
    by_kind, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kinds_of_layers = {"full_attention", "sliding_attention"}
    if (by_kind and not kinds_of_layers & set(by_kind)) or kinds_of_layers & set(scaling):
        raise UserError(
            f"{folder / 'config.json'}: rope_parameters must be given by kind of layer (full_attention, "
            "sliding_attention), and rope_scaling must not."
        )
    far = {"rope_theta": config.get("rope_theta", 1_000_000.0), **(by_kind.get("full_attention") or {}), **scaling}
    near = {"rope_theta": config.get("rope_local_base_freq", 10_000.0), **(by_kind.get("sliding_attention") or {})}
    near_factor, far_factor = (_rope_factor(layer, folder) for layer in (near, far))
    if near_factor != 1:
        raise UserError(f"{folder / 'config.json'}: RoPE of local layers is scaled, which is not supported.")
    return float(near["rope_theta"]), float(far["rope_theta"]), far_factor


def _rope_factor(layer: dict[str, Any], folder: Path) -> float:
    """By how much positions are scaled; as in transformers, a factor counts for nothing beside the type default."""
    kind = layer.get("rope_type", layer.get("type"))
    if kind not in (None, "default", "linear"):
        raise UserError(f"{folder / 'config.json'}: RoPE of type {kind!s:.80} is not supported.")
    if ("factor" in layer and kind is None) or ("factor" not in layer and kind == "linear"):
        raise ValueError(f"RoPE has {layer}, of which type and factor are wanted, or neither")
    return float(layer["factor"]) if kind == "linear" else 1.0


def config_of(arch: Architecture, dtype: str) -> dict[str, Any]:
    """A config.json in single keys, which every version of transformers, vLLM and llama.cpp's converter reads."""
    scalar = round(arch.query_scale**-2, 6)
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
        "layer_types": layer_kinds(arch.num_layers, arch.global_every),
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,  # transformers takes whole numbers only
        "rope_local_base_freq": arch.rope_local_base,
        "rope_theta": arch.rope_global_base,
        "rope_scaling": scaling,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": 32768 if scaling is None else 131072,  # as published for models with scaled positions
        TIED: True,
        "attention_bias": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "torch_dtype": dtype,
        "transformers_version": "4.50.0",  # of this layout; without it transformers 5 warns of other tokenizers' fault
    }


class SafetensorsFolder:
    """The text model's tensors of a folder of safetensors files, under the names of Gemma3ForCausalLM."""

    def __init__(self, folder: Path):
        self._where: dict[str, tuple[Any, str, Path]] = {}
        self._head: tuple[Any, str, Path] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _files(folder):
            with reading(path, "delete it and download it again"):
                self._add(path)

    def _add(self, path: Path) -> None:
        """Notes the tensors of a file."""
        with files.open_regular(path) as file:
            if file.read(20).startswith(b"version https://git-"):
                raise UserError(f"{path} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`.")
        handle = safe_open(path, framework="numpy")
        if len(stored_names := handle.keys()) > MOST_TENSORS:
            raise ValueError(f"it has {len(stored_names)} tensors")
        for stored in stored_names:
            if NOT_TEXT.match(stored):
                continue
            if HEAD.fullmatch(stored):
                self._head = (handle, stored, path)
                continue
            match = TEXT.fullmatch(stored)
            name = f"model.{match.group(1)}" if match else stored
            if name in self._where:
                raise UserError(f"{path}: tensor {stored} is in {self._where[name][2].name} too; leave one of them.")
            self._where[name] = (handle, stored, path)
            self.shapes[name] = tuple(handle.get_slice(stored).get_shape())

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        tensor = _tensor(*self._where[name])
        if name == EMBEDDING and self._head and not np.array_equal(_tensor(*self._head), tensor, equal_nan=True):
            _, stored, path = self._head
            raise UserError(f"{path}: {stored} is not the embedding; only a head that is tied to it is supported.")
        return tensor.astype(dtype, copy=False)


def _tensor(handle: Any, stored: str, path: Path) -> np.ndarray:
    if (kind := handle.get_slice(stored).get_dtype()) in NO_WEIGHTS:
        raise UserError(f"{path}: tensor {stored} is of type {kind}; weights are floating-point numbers.")
    with reading(f"{path}: tensor {stored} of type {kind}"):
        return handle.get_tensor(stored)


def _files(folder: Path) -> list[Path]:
    """The files that make up the model: model.safetensors, else those that the index names, else all there are."""
    if (single := folder / "model.safetensors").exists():
        return [single]
    if (folder / INDEX).exists():
        with reading(folder / INDEX, "download it again"):
            names = sorted(set(files.read_json(folder / INDEX)["weight_map"].values()))
            if strange := [name for name in names if Path(name).name != name]:
                raise ValueError(f"{strange[0]!r} is no file of this folder")
            if len(names) > MOST_FILES:
                raise ValueError(f"it names {len(names)} files")
            missing = [name for name in names if not (folder / name).exists()]
        if missing:
            more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
            raise UserError(
                f"{folder} lacks {', '.join(missing[:NAMED])}{more}, which its index names; finish the download."
            )
        return [folder / name for name in names]
    if not (found := sorted(folder.glob("*.safetensors"))):
        raise UserError(f"{folder} holds no *.safetensors file.")
    return found
