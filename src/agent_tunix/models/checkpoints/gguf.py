"""GGUF files, llama.cpp's format: weights, often quantised, with numbers and tokenizer in one file.

Their conventions differ from Hugging Face's: tensors have other names, and norms are stored with 1 added, which Gemma's code
would add. Numbers that llama.cpp has in its code rather than in the file come from `conf/model`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agent_tunix.errors import UserError, reading
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.safetensors import numeric

BLOCK_ELEMENTS = 2**24  # dequantised at once, so that a large embedding never exists whole in float32
JOINED = 64  # rows that are dequantised as one where they divide: the library takes 16 at a time, however short
TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Fields of Architecture, and the keys under `gemma3.` that hold them.
NUMBERS = {
    "num_layers": "block_count",
    "embed_dim": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "hidden_dim": "feed_forward_length",
    "sliding_window": "attention.sliding_window",
    "rope_local_base": "rope.freq_base_swa",
    "rope_global_base": "rope.freq_base",
    "norm_eps": "attention.layer_norm_rms_epsilon",
}


class GgufFile:
    """The tensors of a .gguf file, dequantised, under Hugging Face's names."""

    def __init__(self, path: Path, family: str = "gemma3"):
        self._path, self._header = path, _open(path)
        with _reading(path):
            kind = self._field("general.architecture")
        if kind != family:
            raise UserError(f"{path} holds a model of type {kind!s:.80}; only {family} can be trained.")
        self._tensors = {_huggingface_name(stored): tensor for stored, tensor in self._header.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        import gguf

        kind, shape, rows = self._tensors[name]
        with _reading(self._path):
            out = np.empty((len(rows), shape[-1]), dtype)
            step = max(1, BLOCK_ELEMENTS // out.shape[1])
            try:
                for start in range(0, len(rows), step):
                    few = rows[start : start + step]
                    long = few.reshape(len(few) // math.gcd(len(few), JOINED), -1)
                    block = gguf.dequantize(long, kind).reshape(len(few), -1)
                    out[start : start + step] = block - 1 if name.endswith("norm.weight") else block
            except NotImplementedError as fault:
                raise UserError(f"{self._path}: tensor {name} is quantised as {kind.name}, which cannot be read.") from fault
            return out.reshape(shape)

    def architecture(self, described: Architecture) -> Architecture:
        """The numbers that the file gives; those it leaves to llama.cpp's code as described."""
        with _reading(self._path):
            self._check_supported()
            found = {name: self._field(f"gemma3.{key}") for name, key in NUMBERS.items()}
            found["vocab_size"] = self.shapes.get("model.embed_tokens.weight", (None,))[0]
            scaled = self._field("gemma3.rope.scaling.type") != "none"
            found["rope_global_factor"] = (self._field("gemma3.rope.scaling.factor") if scaled else None) or 1.0
            given = {name: value for name, value in found.items() if value is not None}
            return numeric(dataclasses.replace(described, **given))

    def _check_supported(self) -> None:
        """Refuses what this implementation has no code for."""
        if (scaling := self._field("gemma3.rope.scaling.type")) not in (None, "none", "linear"):
            raise UserError(f"{self._path}: RoPE of type {scaling!s:.80} is not supported.")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if found := self._field(f"gemma3.{key}"):
                shown = f"{found:g}" if isinstance(found, float) else found
                raise UserError(f"{self._path}: {key} is {shown!s:.80}; only models without it are supported.")

    def _field(self, key: str) -> Any:
        return _decoded(self._header.fields.get(key))


def header_field(path: Path, key: str) -> Any:
    """What a file says of itself under a key; None where it says nothing."""
    return _decoded(_open(path).fields.get(key))


def _decoded(value: Any) -> Any:
    if isinstance(value, float):
        return float(str(np.float32(value)))  # 1e-6, not its nearest float32
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [text.decode() for text in value]
    return value.decode() if isinstance(value, bytes) else value


@lru_cache(maxsize=1)  # numbers, weights and tokenizer share it
def _open(path: Path) -> Any:
    try:
        from agent_tunix.models.checkpoints.gguf_header import Header
    except ImportError as fault:
        raise UserError(f"{path} needs the gguf library: pip install 'agent-tunix[gguf]'.") from fault
    with _reading(path):
        return Header(path)


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "delete it and download it again")


def _huggingface_name(stored: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored)
    if match and match.group(2) in MODULES:
        return f"model.layers.{match.group(1)}.{MODULES[match.group(2)]}.weight"
    return TOP.get(stored, stored)
