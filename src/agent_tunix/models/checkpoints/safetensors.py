"""Hugging Face's layout of a checkpoint: config.json, *.safetensors, and the names its tensors go by.

Of a multimodal checkpoint the text part alone is read.
"""

from __future__ import annotations

import dataclasses
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
from agent_tunix.models.families.family import Family
from agent_tunix.models.families.table import FAMILIES, family_of

INDEX = "model.safetensors.index.json"
GREATEST = 1e12  # of any number that a model has
MOST_LAYERS, MOST_TENSORS, MOST_FILES = 1000, 2**17, 2**13
NAMED = 6  # files that a message lists before it only counts them
NO_WEIGHTS = {"BOOL", *(f"{sign}{bits}" for sign in "IU" for bits in (8, 16, 32, 64))}
TEXT = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?((?:embed_tokens|layers|norm)\..+)")
NOT_TEXT = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")  # of older checkpoints: it follows from the configuration
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def read_config(folder: Path, family: str | None = None) -> dict[str, Any]:
    """A checkpoint's config.json; raises UserError where it is missing, broken or of a family that is not asked for."""
    path = folder / "config.json"
    if not path.exists():
        raise UserError(f"{folder} has no config.json: it is not a checkpoint in Hugging Face's layout.")
    with reading(path, "download it again"):
        config = files.read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    found = family_named(kind)
    if found is None or family not in (None, found.name):
        raise UserError(f"{path} describes a model of type {kind!s:.80}; {_trained(kind, config, family)}.")
    return config


def family_named(kind: Any) -> Family | None:
    """The family that a config.json calls so."""
    return next((family for family in FAMILIES.values() if kind in (family.name, *family.other_names)), None)


def _trained(kind: Any, config: Any, family: str | None) -> str:
    """Which models could be trained in the place of one that cannot."""
    if family is not None and family_named(kind):
        return f"model.model_family={family} asks for another family: choose the model group that fits, or model=auto"
    experts = isinstance(config, dict) and {"num_experts", "num_local_experts", "n_routed_experts"} & config.keys()
    if experts or "moe" in str(kind):
        return f"mixtures of experts cannot be trained; only dense models of {', '.join(FAMILIES)} can"
    if isinstance(config, dict) and "vision_config" in config:
        return f"models that see cannot be trained; only text models of {', '.join(FAMILIES)} can, and Gemma 3's text part"
    return f"only {', '.join(FAMILIES)} can be trained"


def read_architecture(folder: Path, family: str | None = None) -> Architecture:
    """The architecture that a checkpoint's config.json describes."""
    config = read_config(folder, family)
    found = family_named(config["model_type"])
    assert found  # as `read_config` has seen
    with calling(partial(_wrong_kind, folder / "config.json")):
        return numeric(found.from_config(config))


def _wrong_kind(path: Path, fault: BaseException) -> UserError:
    """For whatever comes of numbers that are lists, or of lists that are none."""
    if isinstance(fault, UserError):
        return UserError(f"{path}: {fault}")
    return UserError(f"{path} has a value of the wrong kind ({unparsed(fault)}); download it again.")


def numeric(arch: Architecture) -> Architecture:
    """The architecture, if its numbers are numbers of a model: a file may hold "6" or 6.0 for 6, and infinity.

    Real numbers that were written as whole ones are real: of an integer JAX asks that it has 32 bits.
    """
    kinds, real = {"int": int, "float": int | float}, dict[str, Any]()
    for field in dataclasses.fields(arch):
        if field.type not in kinds:
            continue
        value = getattr(arch, field.name)
        if not isinstance(value, kinds[field.type]) or not 0 < value < GREATEST:
            raise TypeError(f"{field.name} is {value!r}")
        if field.type == "float":
            real[field.name] = float(value)
    if arch.num_layers > MOST_LAYERS:
        raise ValueError(f"num_layers is {arch.num_layers}")
    if arch.num_heads % arch.num_kv_heads or arch.head_dim % 2:
        raise ValueError(f"{arch.num_heads} heads of {arch.head_dim} share {arch.num_kv_heads} keys")
    if not isinstance(arch.tied, bool):
        raise TypeError(f"tie_word_embeddings is {arch.tied!r}")
    return dataclasses.replace(arch, **real)


def config_of(arch: Architecture, dtype: str) -> dict[str, Any]:
    """A config.json that transformers loads."""
    family = family_of(arch)
    return {
        "architectures": [family.causal_lm],
        "model_type": family.name,
        **family.to_config(arch),
        "torch_dtype": dtype,
        "transformers_version": "4.50.0",  # of this layout; without it transformers 5 warns of other tokenizers' fault
    }


class SafetensorsFolder:
    """The text model's tensors of a folder of safetensors files, under the names of transformers' text models.

    Of a model whose head is its embedding, a head that is stored too must be the same.
    """

    def __init__(self, folder: Path, tied: bool):
        self._where: dict[str, tuple[Any, str, Path]] = {}
        self._head: tuple[Any, str, Path] | None = None
        self._tied = tied
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
            if NOT_TEXT.match(stored) or COMPUTED.fullmatch(stored):
                continue
            match, is_head = TEXT.fullmatch(stored), stored.removeprefix("language_model.") == HEAD
            if is_head and self._tied:
                self._head = (handle, stored, path)
                continue
            name = HEAD if is_head else f"model.{match.group(1)}" if match else stored
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
