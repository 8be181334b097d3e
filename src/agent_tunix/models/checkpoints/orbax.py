"""Orbax checkpoints as Kaggle offers them for Gemma 3 (variation `flax`), in the layout of google-deepmind/gemma.

They hold no configuration: sizes follow from the shapes, and numbers that shapes do not show are as
other models of the family have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from agent_tunix.errors import UserError, calling, reading, said
from agent_tunix.files import refuse_traps
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.families import gemma3

MARKS = ("_METADATA", "manifest.ocdbt")
LAYOUT = "Gemma 3 in the layout of google-deepmind/gemma"
NOT_TEXT = ("vision_encoder", "siglip_encoder", "SigLiPFromPatches", "embedder/mm_")
IN_LAYERS = {  # Hugging Face's names for a tensor of a layer: two where two matrices are packed along the first axis
    "attn/q_einsum/w": ["self_attn.q_proj"],
    "attn/kv_einsum/w": ["self_attn.k_proj", "self_attn.v_proj"],
    "attn/attn_vec_einsum/w": ["self_attn.o_proj"],
    "mlp/gating_einsum/w": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp/linear/w": ["mlp.down_proj"],
    "attn/_query_norm/scale": ["self_attn.q_norm"],
    "attn/_key_norm/scale": ["self_attn.k_norm"],
    "pre_attention_norm/scale": ["input_layernorm"],
    "post_attention_norm/scale": ["post_attention_layernorm"],
    "pre_ffw_norm/scale": ["pre_feedforward_layernorm"],
    "post_ffw_norm/scale": ["post_feedforward_layernorm"],
}


def find_orbax(folder: Path) -> Path | None:
    """The Orbax checkpoint that a folder is, or has as its only subfolder of that kind and in place of other weights."""
    if is_orbax(folder):
        return folder
    if (folder / "config.json").exists():
        return None
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and is_orbax(path)]
    return inner[0] if len(inner) == 1 else None


def is_orbax(folder: Path) -> bool:
    return any((folder / mark).exists() for mark in MARKS)


class OrbaxFolder:
    """The text model's tensors of an Orbax checkpoint, under Hugging Face's names and in its shapes."""

    def __init__(self, folder: Path):
        self._folder, self._checkpointer = folder, ocp.PyTreeCheckpointer()
        with reading(folder, "download it again"):
            refuse_traps(folder)
            metadata = self._checkpointer.metadata(folder.resolve())
            leaves = _flatten(metadata.item_metadata.tree)
        self._stored: dict[str, tuple[tuple[str, ...], int | None]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path, leaf in leaves.items():
            joined = "/".join(map(str, path)).removeprefix("params/").removeprefix("transformer/")
            if not joined.startswith(NOT_TEXT):
                self._add(path, joined, leaf)

    def _add(self, path: tuple[str, ...], stored: str, leaf: ocp.metadata.ArrayMetadata) -> None:
        """Notes under which names a stored tensor is asked for, and in which shapes."""
        names = _names(stored)
        other = f"{self._folder} is not {LAYOUT}: {stored} is of another kind or shape"
        with calling(lambda fault: UserError(f"{other} ({said(fault)}).")):
            shapes = [_huggingface_shape(name, tuple(leaf.shape), len(names)) for name in names]
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if not floating:
            raise UserError(f"{self._folder}: tensor {stored} is of type {leaf.dtype}; weights are floating-point numbers.")
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            self._stored[name] = path, index if len(names) > 1 else None
            self.shapes[name] = shape

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        path, index = self._stored[name]
        tree, restore = _nested(path, np.zeros(())), _nested(path, ocp.RestoreArgs(restore_type=np.ndarray))
        args = ocp.args.PyTreeRestore(item=tree, restore_args=restore, partial_restore=True)
        with reading(self._folder, "download it again"):
            value = self._checkpointer.restore(self._folder.resolve(), args=args)
            for key in path:
                value = value[key]
            return _huggingface_layout(name, value if index is None else value[index]).astype(dtype, copy=False)

    def architecture(self, given: Mapping[str, Any]) -> Architecture:
        """The sizes that the shapes tell; the rest as given, or as in other models of the family."""
        layer = "model.layers.0.self_attn"
        with calling(lambda fault: UserError(f"{self._folder} is not {LAYOUT}: {_lacking(fault)}.")):
            vocab_size, embed_dim = self.shapes["model.embed_tokens.weight"]
            (head_dim,) = self.shapes[f"{layer}.q_norm.weight"]
            told = {
                "vocab_size": vocab_size,
                "embed_dim": embed_dim,
                "head_dim": head_dim,
                "num_layers": sum(name.endswith(".input_layernorm.weight") for name in self.shapes),
                "num_heads": self.shapes[f"{layer}.q_proj.weight"][0] // head_dim,
                "num_kv_heads": self.shapes[f"{layer}.k_proj.weight"][0] // head_dim,
                "hidden_dim": self.shapes["model.layers.0.mlp.gate_proj.weight"][0],
            }
            return gemma3.completed({**given, **told})


def _lacking(fault: BaseException) -> str:
    if isinstance(fault, KeyError):
        return f"it has nothing for tensor {fault}"
    return "its embedding or norms have other shapes"


def _flatten(tree, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], ocp.metadata.ArrayMetadata]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in _flatten(branch, (*path, name)).items()}


def _nested(path: tuple[str, ...], leaf):
    for key in reversed(path):
        leaf = {key: leaf}
    return leaf


def _names(stored: str) -> list[str]:
    """Hugging Face's names for a stored tensor, which keeps its own if there are none."""
    if stored == "embedder/input_embedding":
        return ["model.embed_tokens.weight"]
    if stored == "final_norm/scale":
        return ["model.norm.weight"]
    layer, _, rest = stored.partition("/")
    prefix = f"model.layers.{layer.removeprefix('layer_')}"
    return [f"{prefix}.{name}.weight" for name in IN_LAYERS.get(rest, ())] or [stored]


def _huggingface_layout(name: str, value: np.ndarray) -> np.ndarray:
    """[heads, in, width] or [heads, width, out] to [out, in]; the feed-forward's second matrix is stored [in, out]."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return value.swapaxes(1, 2).reshape(-1, value.shape[1])
    if name.endswith("o_proj.weight"):
        return value.reshape(-1, value.shape[2]).T
    return value.T if name.endswith("down_proj.weight") else value


def _huggingface_shape(name: str, stored: tuple[int, ...], packed: int) -> tuple[int, ...]:
    if not name.startswith("model."):
        return stored
    if packed > 1 and stored[0] != packed:
        raise ValueError(f"{stored}, where {packed} matrices are packed")
    shape = stored[1:] if packed > 1 else stored
    return _huggingface_layout(name, np.broadcast_to(np.zeros(()), shape)).shape
