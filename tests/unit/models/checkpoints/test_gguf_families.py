"""GGUF files of every family, with the names that llama.cpp's library gives tensors, are read as their checkpoints are."""

from __future__ import annotations

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest

from agent_tunix.errors import UserError
from agent_tunix.models.architecture import Architecture
from agent_tunix.models.checkpoints.loading import load_weights, open_tensors, read_architecture

KINDS = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def pairs_side_by_side(value: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter orders the rows of Llama's queries and keys."""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def write(path: Path, golden: Path, arch: Architecture, **more: np.ndarray) -> Path:
    names = gguf.get_tensor_name_map(KINDS[arch.family], arch.num_layers)
    writer = gguf.GGUFWriter(path, arch.family)
    writer.add_block_count(arch.num_layers)
    writer.add_embedding_length(arch.embed_dim)
    writer.add_feed_forward_length(arch.hidden_dim)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_rope_freq_base(arch.rope_global_base)
    writer.add_layer_norm_rms_eps(arch.norm_eps)
    if arch.rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(arch.rope_factors, np.float32))
    for name, value in layouts.tensors(golden).items():
        heads = {"q_proj": arch.num_heads, "k_proj": arch.num_kv_heads}.get(name.split(".")[-2])
        value = pairs_side_by_side(value, heads) if heads and arch.family == "llama" else value
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), value)
    for name, value in more.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=["llama", "llama3", "qwen2", "qwen3"])
def golden(request, goldens) -> Path:
    return goldens / "families" / request.param


def test_a_file_is_read_as_the_checkpoint_it_was_made_of(tmp_path, golden):
    arch = read_architecture(golden, {})
    path = write(tmp_path / "model.gguf", golden, arch)
    found = read_architecture(path, {})
    assert found.rope_factors == pytest.approx(arch.rope_factors)
    assert {**vars(found), "rope_factors": ()} == {**vars(arch), "rope_factors": ()}
    ours, theirs = load_weights(path, found, jnp.float32), load_weights(golden, arch, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_an_embedding_that_is_stored_twice_is_one(tmp_path, goldens):
    golden = goldens / "families" / "qwen3"
    arch = read_architecture(golden, {})
    embedding = layouts.tensors(golden)["model.embed_tokens.weight"]
    path = write(tmp_path / "twice.gguf", golden, arch, **{"output.weight": embedding})
    assert read_architecture(path, {}).tied
    other = write(tmp_path / "other.gguf", golden, arch, **{"output.weight": 2 * embedding})
    found = read_architecture(other, {})
    assert not found.tied
    np.testing.assert_array_equal(load_weights(other, found, jnp.float32).head_VD, 2 * embedding)


def test_a_tensor_that_no_one_asks_for_is_named(tmp_path, goldens):
    golden = goldens / "families" / "qwen3"
    path = write(tmp_path / "more.gguf", golden, read_architecture(golden, {}), **{"blk.0.attn_q.bias": np.ones(48, "f")})
    with pytest.raises(UserError, match=r"unknown: model\.layers\.0\.self_attn\.q_proj\.bias|biases"):
        open_tensors(path, read_architecture(golden, {}))
