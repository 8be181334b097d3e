"""GGUF files, llama.cpp's format: weights, often quantised, with numbers and tokenizer in one file.

Their conventions differ from Hugging Face's: tensors have other names; norms that are stored as departures from one have it
added; and in files of Llama's kind the rows of queries and keys are in another order. Numbers that llama.cpp has in its code
rather than in the file are as the family has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from agent_tunix.errors import UserError, reading
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.safetensors import EMBEDDING, FINAL_NORM, HEAD, numeric
from agent_tunix.models.families.table import FAMILIES
from agent_tunix.models.lora import ATTENTION, FEED_FORWARD, huggingface_name

BLOCK_ELEMENTS = 2**24  # dequantised at once, so that a large embedding never exists whole in float32
JOINED = 64  # rows that are dequantised as one where they divide: the library takes 16 at a time, however short
STORED_EMBEDDING, STORED_HEAD, STORED_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
TOP = {STORED_EMBEDDING: EMBEDDING, "output_norm.weight": FINAL_NORM, STORED_HEAD: HEAD}
STORED_FIELDS = {  # what a layer's tensors are called in the file, by our fields
    "input_norm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_feedforward_norm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "post_feedforward_norm": "post_ffw_norm",
}
FIELDS = {inner: field for field, inner in STORED_FIELDS.items()}
IN_LAYERS = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
# Fields of Architecture, and the keys under the family's name that hold them.
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

    def __init__(self, path: Path, family: str | None = None):
        self._path, self._header = path, _open(path)
        with _reading(path):
            kind = self._field("general.architecture")
        if kind not in FAMILIES or family not in (None, kind):
            raise UserError(
                f"{path} holds a model of type {kind!s:.80}; only {family or ', '.join(FAMILIES)} can be trained."
            )
        self.family = FAMILIES[kind]
        with _reading(path):
            self._tensors = self._named()
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def _named(self) -> dict[str, Any]:
        """The tensors by Hugging Face's names; one that has none there keeps its own, and is refused by that."""
        stored = dict(self._header.tensors)
        stored.pop(STORED_FACTORS, None)
        if self._tied():
            stored.pop(STORED_HEAD, None)
        return {self._huggingface_name(name): tensor for name, tensor in stored.items()}

    def _huggingface_name(self, stored: str) -> str:
        match, norms = IN_LAYERS.fullmatch(stored), self.family.norms
        field = FIELDS.get(match[2], "") if match else ""
        if match and field in norms and match[3] == "weight":
            return f"model.layers.{match[1]}.{norms[field][0]}.weight"
        if match and field in ATTENTION + FEED_FORWARD:
            return f"{huggingface_name(int(match[1]), field)}.{match[3]}"
        return TOP.get(stored, stored)

    def _tied(self) -> bool:
        """Whether the embedding is the head, which may be stored a second time."""
        head, embedding = (self._header.tensors.get(name) for name in (STORED_HEAD, STORED_EMBEDDING))
        if head is None or embedding is None:
            return True
        (kind, shape, rows), (other, _, others) = head, embedding
        return kind == other and shape == embedding.shape and np.array_equal(rows, others)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        import gguf

        kind, shape, rows = self._tensors[name]
        added = self.family.norm_offset if name.endswith("norm.weight") else 0.0
        with _reading(self._path):
            out = np.empty((len(rows), shape[-1]), dtype)
            step = max(1, BLOCK_ELEMENTS // out.shape[1])
            try:
                for start in range(0, len(rows), step):
                    few = rows[start : start + step]
                    long = few.reshape(len(few) // math.gcd(len(few), JOINED), -1)
                    block = gguf.dequantize(long, kind).reshape(len(few), -1)
                    out[start : start + step] = block - added if added else block
            except NotImplementedError as fault:
                raise UserError(f"{self._path}: tensor {name} is quantised as {kind.name}, which cannot be read.") from fault
            return self._in_order(name, out.reshape(shape))

    def _in_order(self, name: str, tensor: np.ndarray) -> np.ndarray:
        """Queries and keys with the halves that RoPE rotates apart, where the file has each pair side by side."""
        counts = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        module = name.split(".")[-2]
        if not self.family.gguf_turns_heads or module not in counts:
            return tensor
        heads = self._number(counts[module])
        return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)

    def architecture(self, given: Mapping[str, Any]) -> Architecture:
        """The numbers that the file gives; those that it leaves to llama.cpp's code as given, or as the family has them."""
        with _reading(self._path):
            self._check_supported()
            found = {name: self._field(self._key(key)) for name, key in NUMBERS.items()}
            found["vocab_size"] = self.shapes.get(EMBEDDING, (None,))[0]
            scaled = self._field(self._key("rope.scaling.type")) != "none"
            found["rope_global_factor"] = (self._field(self._key("rope.scaling.factor")) if scaled else None) or 1.0
            if (factors := self._header.tensors.get(STORED_FACTORS)) is not None:
                found["rope_factors"] = tuple(_numbers(factors).tolist())
            biased = [m for m in ATTENTION + FEED_FORWARD if f"{huggingface_name(0, m)}.bias" in self.shapes]
            found["biases"], found["tied"] = tuple(biased) or None, HEAD not in self.shapes
            recorded = {name: value for name, value in found.items() if value is not None}
            return numeric(self.family.completed({**given, **recorded}))

    def _key(self, key: str) -> str:
        return f"{self.family.name}.{key}"

    def _number(self, key: str) -> int:
        found = self._field(self._key(key))
        if not isinstance(found, int):
            raise TypeError(f"{self._key(key)} is {found!r}")
        return found

    def _check_supported(self) -> None:
        """Refuses what this implementation has no code for."""
        if (scaling := self._field(self._key("rope.scaling.type"))) not in (None, "none", "linear"):
            raise UserError(f"{self._path}: RoPE of type {scaling!s:.80} is not supported.")
        if experts := self._field(self._key("expert_count")):
            raise UserError(f"{self._path} holds a mixture of {experts!s:.80} experts; only dense models can be trained.")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if found := self._field(self._key(key)):
                shown = f"{found:g}" if isinstance(found, float) else found
                raise UserError(f"{self._path}: {key} is {shown!s:.80}; only models without it are supported.")

    def _field(self, key: str) -> Any:
        return _decoded(self._header.fields.get(key))


def header_field(path: Path, key: str) -> Any:
    """What a file says of itself under a key; None where it says nothing."""
    return _decoded(_open(path).fields.get(key))


def _numbers(tensor: Any) -> np.ndarray:
    """A small tensor, dequantised, as one row."""
    import gguf

    return gguf.dequantize(tensor.rows, tensor.kind).reshape(-1)


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
