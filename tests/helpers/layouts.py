"""Checkpoints to test with: the golden model in each layout that a user may have."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def tensors(golden: Path) -> dict[str, np.ndarray]:
    return {name: value.astype(np.float32) for name, value in load_file(golden / "model.safetensors").items()}


def write_folder(folder: Path, config: str, values: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    save_file(values, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, golden: Path, quantisation: str = "F32", kind: str = "gemma3", **more: Any) -> Path:
    """As llama.cpp's converter writes it: its own names, norms with one added, numbers as metadata, `more` of them too."""
    import gguf

    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(3)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_sliding_window(6)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_scaling_factor(8.0)
    writer.add_layer_norm_rms_eps(1e-6)
    for method, value in more.items():
        getattr(writer, method)(value)
    for name, value in tensors(golden).items():
        parts = name.removesuffix(".weight").split(".")
        stored = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1])
        stored = stored or f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}"
        value = value + 1 if parts[-1].endswith("norm") else value
        matrix = value.ndim == 2 and value.shape[1] % 32 == 0 and quantisation != "F32"
        kind_of_data = gguf.GGMLQuantizationType[quantisation if matrix else "F32"]
        writer.add_tensor(f"{stored}.weight", gguf.quantize(value, kind_of_data), raw_dtype=kind_of_data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_orbax(folder: Path, golden: Path, heads: int = 4, kv_heads: int = 2, **changed: dict) -> Path:
    """As google-deepmind/gemma stores it: one einsum weight for keys and values, one for gate and up.

    `changed` are modules of layer 0, each with what it is to hold instead.
    """
    import orbax.checkpoint as ocp

    t = tensors(golden)
    tree = {
        "transformer/embedder": {"input_embedding": t["model.embed_tokens.weight"]},
        "transformer/final_norm": {"scale": t["model.norm.weight"]},
        "transformer/vision_encoder/siglip_encoder/embedding": {"kernel": np.ones((2, 2), np.float32)},
    }
    for i in range(3):
        theirs, ours = f"transformer/layer_{i}", f"model.layers.{i}"

        def by_head(module: str, count: int, prefix: str = f"{ours}.self_attn") -> np.ndarray:
            matrix = t[f"{prefix}.{module}.weight"]
            return matrix.reshape(count, -1, matrix.shape[1]).swapaxes(1, 2)

        tree[f"{theirs}/attn/q_einsum"] = {"w": by_head("q_proj", heads)}
        tree[f"{theirs}/attn/kv_einsum"] = {"w": np.stack([by_head("k_proj", kv_heads), by_head("v_proj", kv_heads)])}
        tree[f"{theirs}/attn/attn_vec_einsum"] = {"w": t[f"{ours}.self_attn.o_proj.weight"].T.reshape(heads, -1, 32)}
        gate, up = (t[f"{ours}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        tree[f"{theirs}/mlp/gating_einsum"] = {"w": np.stack([gate, up])}
        tree[f"{theirs}/mlp/linear"] = {"w": t[f"{ours}.mlp.down_proj.weight"].T}
        for name, stored in {
            "attn/_query_norm": "self_attn.q_norm",
            "attn/_key_norm": "self_attn.k_norm",
            "pre_attention_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "pre_ffw_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }.items():
            tree[f"{theirs}/{name}"] = {"scale": t[f"{ours}.{stored}.weight"]}
    tree |= {f"transformer/layer_0/{name.replace('__', '/')}": leaves for name, leaves in changed.items()}
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(folder.resolve(), tree)
    checkpointer.wait_until_finished()
    return folder
