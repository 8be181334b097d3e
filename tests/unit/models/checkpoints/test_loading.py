"""Every layout of a checkpoint gives the same weights, and every fault of one is named."""

import dataclasses
import json
from functools import partial
from unittest.mock import Mock

import gguf
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints import gguf_header, safetensors
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import (
    EMBEDDING,
    init_weights,
    load_weights,
    open_weights,
    quantised,
    read_architecture,
    save_tensors,
    save_weights,
    stacked_tensor,
    tensor_shapes,
)
from agent_tunix.models.quantization import Quantised
from agent_tunix.models.sharding import mesh_of_sizes


@pytest.fixture(scope="module")
def golden(goldens):
    return goldens / "gemma3"


@pytest.fixture(scope="module")
def arch(golden):
    return safetensors.read_architecture(golden)


@pytest.fixture(scope="module")
def weights(golden, arch):
    return load_weights(golden, arch, jnp.float32)


def assert_same(one, other, atol=0.0):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), one, other)


def test_a_matrix_is_stored_the_other_way_round(golden, weights):
    stored = load_file(golden / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    np.testing.assert_array_equal(weights.layers["gate_proj"][1].T, stored.astype(np.float32))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_text_part_under_any_prefix(tmp_path, golden, arch, weights, prefix):
    values = {prefix + name.removeprefix("model."): value for name, value in layouts.tensors(golden).items()}
    values["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = np.ones((2, 2), np.float32)
    values["model.multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(2, np.float32)
    values["lm_head.weight"] = values[f"{prefix}embed_tokens.weight"]
    folder = layouts.write_folder(tmp_path, (golden / "config.json").read_text(), values)
    assert_same(load_weights(folder, arch, jnp.float32), weights)


def test_a_head_of_its_own_is_refused_rather_than_left_out(tmp_path, golden, arch):
    """transformers takes the head where the two differ, whatever config.json says."""
    values = layouts.tensors(golden) | {"lm_head.weight": np.ones((64, 32), np.float32)}
    folder = layouts.write_folder(tmp_path, (golden / "config.json").read_text(), values)
    with pytest.raises(UserError, match=r"lm_head\.weight is not the embedding"):
        load_weights(folder, arch, jnp.float32)


@pytest.mark.parametrize(("dtype", "named"), [(np.int64, "I64"), (np.uint8, "U8"), (np.bool_, "BOOL")])
def test_tensors_that_are_no_weights_are_refused(tmp_path, golden, arch, dtype, named):
    values = layouts.tensors(golden)
    values["model.norm.weight"] = values["model.norm.weight"].astype(dtype)
    layouts.write_folder(tmp_path, (golden / "config.json").read_text(), values)
    with pytest.raises(UserError, match=rf"model\.norm\.weight is of type {named}; weights are floating-point numbers"):
        load_weights(tmp_path, arch, jnp.float32)


def test_shards_round_trip_and_unnamed_files_are_not_read(tmp_path, arch, weights):
    save_tensors(tmp_path, arch, jnp.float32, partial(stacked_tensor, weights, arch), shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    (tmp_path / "optimizer.safetensors").write_bytes(b"not weights")
    assert safetensors.read_architecture(tmp_path) == arch
    assert_same(load_weights(tmp_path, arch, jnp.float32), weights)


def test_a_missing_shard_is_named(tmp_path, arch, weights):
    save_tensors(tmp_path, arch, jnp.float32, partial(stacked_tensor, weights, arch), shard_bytes=20_000)
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=gone.name):
        load_weights(tmp_path, arch, jnp.float32)


def test_an_index_that_an_earlier_save_left_is_not_asked(tmp_path, arch, weights):
    """transformers' save_pretrained deletes the shards of an earlier save, not their index, and does not read it."""
    save_tensors(tmp_path, arch, jnp.float32, partial(stacked_tensor, weights, arch), shard_bytes=20_000)
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    save_tensors(tmp_path, arch, jnp.float32, partial(stacked_tensor, weights, arch))
    assert_same(load_weights(tmp_path, arch, jnp.float32), weights)


def test_gguf_gives_the_same_weights(tmp_path, golden, arch, weights):
    path = layouts.write_gguf(tmp_path / "model.gguf", golden)
    given = dataclasses.asdict(arch) | {"num_heads": 99, "norm_eps": 0.5, "rope_global_factor": 2.0, "vocab_size": 1}
    assert read_architecture(path, given) == arch
    assert_same(load_weights(path, arch, jnp.float32), weights, atol=1e-6)


def test_quantised_gguf_gives_nearly_the_same_weights(tmp_path, golden, arch, weights):
    path = layouts.write_gguf(tmp_path / "model.gguf", golden, "Q8_0")
    loaded = load_weights(path, arch, jnp.float32)
    assert_same(loaded, weights, atol=0.02)
    assert not np.array_equal(loaded.embed_VD, weights.embed_VD)


def test_orbax_gives_the_same_weights(tmp_path, golden, arch, weights):
    layouts.write_orbax(tmp_path / "gemma" / "gemma-3-test", golden)
    folder = find_checkpoint(str(tmp_path / "gemma"))
    assert folder.name == "gemma-3-test"
    given = dataclasses.asdict(arch) | {"num_heads": 99, "num_kv_heads": 99, "num_layers": 1, "hidden_dim": 1}
    assert read_architecture(folder, given) == arch
    assert_same(load_weights(folder, arch, jnp.float32), weights)


def test_the_checksum_is_that_of_the_numbers_in_whatever_format_and_type(tmp_path, golden, arch, weights):
    def checksum(checkpoint, dtype=jnp.float32) -> int:
        return open_weights(checkpoint, arch, dtype, mesh_of_sizes(), None)()[1]

    layouts.write_orbax(tmp_path / "gemma" / "gemma-3-test", golden)
    same = [layouts.write_gguf(tmp_path / "model.gguf", golden), find_checkpoint(str(tmp_path / "gemma"))]
    found = {checksum(golden), checksum(golden, jnp.bfloat16), *map(checksum, same)}
    assert len(found) == 1
    for number, name in enumerate(("q_proj", "down_proj")):
        changed = weights.layers | {name: -weights.array(name)}
        other = dataclasses.replace(weights, layers=changed)
        save_tensors(tmp_path / str(number), arch, jnp.float32, partial(stacked_tensor, other, arch))
        found.add(checksum(tmp_path / str(number)))
    assert len(found) == 3


def test_weights_are_rounded_to_the_type_asked_for(golden, arch, weights):
    loaded = load_weights(golden, arch, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}
    assert_same(jax.tree.map(lambda x: x.astype(jnp.float32), loaded), weights)


@pytest.mark.parametrize("base_dtype", ["int8", "nf4"])
def test_matrices_are_quantised_as_they_are_read_and_nothing_else_is(base_dtype):
    folder = find_checkpoint("package:tiny")
    arch = safetensors.read_architecture(folder)
    loaded = load_weights(folder, arch, jnp.float32, base_dtype=base_dtype)
    whole = load_weights(folder, arch, jnp.float32)
    assert_same(loaded, quantised(whole, base_dtype))
    assert isinstance(loaded.layers["o_proj"], Quantised)
    assert_same((loaded.embed_VD, loaded.layers["q_norm"]), (whole.embed_VD, whole.layers["q_norm"]))


def test_missing_unknown_and_misshapen_tensors_are_named_together(tmp_path, golden, arch):
    values = layouts.tensors(golden)
    del values["model.layers.2.mlp.up_proj.weight"]
    values["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    values["model.norm.weight"] = np.zeros(31, np.float32)
    folder = layouts.write_folder(tmp_path, (golden / "config.json").read_text(), values)
    with pytest.raises(UserError) as fault:
        load_weights(folder, arch, jnp.float32)
    for part in ("missing: model.layers.2.mlp.up_proj.weight", "unknown: model.layers.0.self_attn.q_proj.bias"):
        assert part in str(fault.value)
    assert "model.norm.weight has shape [31], the architecture asks for [32]" in str(fault.value)


@pytest.mark.parametrize("base_dtype", [None, "int8", "nf4"])
def test_a_number_that_is_none_is_found_and_its_tensor_named(tmp_path, base_dtype):
    """Of a quantised matrix it shows in its block's scale alone."""
    tiny = find_checkpoint("package:tiny")
    for number, name in enumerate(
        ("model.layers.1.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight", EMBEDDING)
    ):
        values = layouts.tensors(tiny)
        values[name] = values[name].copy()
        values[name].flat[5] = (np.nan, np.inf, -np.inf)[number]
        folder = layouts.write_folder(tmp_path / str(number), (tiny / "config.json").read_text(), values)
        with pytest.raises(UserError, match=f"{folder} is damaged: {name} has NaN or infinity among its numbers"):
            load_weights(folder, safetensors.read_architecture(tiny), jnp.float32, base_dtype=base_dtype)


@pytest.mark.parametrize("keep", [4, 2000, -10])
def test_half_a_file_is_named(tmp_path, golden, arch, keep):
    (tmp_path / "model.safetensors").write_bytes((golden / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged or half downloaded"):
        load_weights(tmp_path, arch, jnp.float32)


def test_a_link_that_leads_nowhere_is_named(tmp_path, arch):
    """As a cache of the hub has it whose blobs were deleted."""
    (tmp_path / "weights.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"weights\.safetensors is damaged or half downloaded"):
        load_weights(tmp_path, arch, jnp.float32)


@pytest.mark.parametrize("keep", [4, 500, -5000])
def test_half_a_gguf_is_named(tmp_path, golden, arch, keep):
    path = layouts.write_gguf(tmp_path / "whole.gguf", golden)
    (tmp_path / "half.gguf").write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"half\.gguf is damaged or half downloaded"):
        load_weights(tmp_path / "half.gguf", arch, jnp.float32)


def test_half_an_orbax_checkpoint_is_named(tmp_path, golden, arch):
    layouts.write_orbax(tmp_path / "gemma-3-test", golden)
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(UserError, match="gemma-3-test is damaged or half downloaded"):
        load_weights(tmp_path / "gemma-3-test", arch, jnp.float32)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"attn__q_einsum": {"w": np.ones((4, 32), np.float32)}}, "attn/q_einsum/w is of another kind or shape"),
        ({"attn__kv_einsum": {"w": np.ones((2, 2, 32), np.float32)}}, "attn/kv_einsum/w is of another kind or shape"),
        ({"attn__kv_einsum": {"w": np.ones((1, 2, 32, 8), np.float32)}}, "where 2 matrices are packed"),
        ({"attn___query_norm": {"scale": np.ones((2, 4), np.float32)}}, "its embedding or norms have other shapes"),
        ({"attn__q_einsum": {"w": None}}, "attn/q_einsum"),
        ({"pre_ffw_norm": {"scale": np.ones(32, np.int32)}}, "pre_ffw_norm/scale is of type int32; weights are floating"),
        ({"attn__q_einsum": {"a": np.ones((4, 32, 8), np.float32)}}, "q_proj"),
    ],
)
def test_orbax_trees_of_another_shape_are_refused(tmp_path, golden, arch, changed, said):
    folder = layouts.write_orbax(tmp_path / "other", golden, **changed)
    with pytest.raises(UserError, match="other") as refused:
        load_weights(folder, read_architecture(folder, dataclasses.asdict(arch)), jnp.float32)
    assert said in str(refused.value)


def test_a_file_that_may_not_be_read_is_not_called_damaged(tmp_path, golden, arch, monkeypatch):
    path = layouts.write_gguf(tmp_path / "model.gguf", golden)
    monkeypatch.setattr(gguf_header, "Header", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(UserError, match=r"model\.gguf may not be read \(.*\); check its owner and its permissions"):
        load_weights(path, arch, jnp.float32)


def test_a_gguf_of_another_model_is_refused(tmp_path, golden, arch):
    path = layouts.write_gguf(tmp_path / "other.gguf", golden, kind="mamba")
    with pytest.raises(UserError, match="type mamba; only gemma3, llama"):
        load_weights(path, arch, jnp.float32)


@pytest.mark.parametrize(
    ("key", "value"), [("add_final_logit_softcapping", 30.0), ("add_rope_scaling_type", gguf.RopeScalingType.YARN)]
)
def test_a_gguf_with_what_there_is_no_code_for_is_refused(tmp_path, golden, arch, key, value):
    path = layouts.write_gguf(tmp_path / "other.gguf", golden, **{key: value})
    with pytest.raises(UserError, match=r"softcapping is 30; only|RoPE of type yarn is not supported"):
        read_architecture(path, dataclasses.asdict(arch))


@pytest.mark.parametrize("value", ["high", ["high"]])
def test_a_gguf_with_texts_for_numbers_is_refused(tmp_path, golden, arch, value, monkeypatch):
    def add(writer, value) -> None:
        (writer.add_string if isinstance(value, str) else writer.add_array)("gemma3.final_logit_softcapping", value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_final_logit_softcapping", add)
    path = layouts.write_gguf(tmp_path / "other.gguf", golden, add_final_logit_softcapping=value)
    with pytest.raises(UserError, match=r"softcapping is .*high.*; only"):
        load_weights(path, read_architecture(path, dataclasses.asdict(arch)), jnp.float32)


@pytest.mark.parametrize(
    ("key", "value"), [("add_head_count", [4, 4, 4]), ("add_rope_freq_base", float("inf")), ("add_embedding_length", 0)]
)
def test_a_gguf_whose_numbers_are_none_of_a_model_is_damaged(tmp_path, golden, arch, key, value):
    path = layouts.write_gguf(tmp_path / "odd.gguf", golden, **{key: value})
    with pytest.raises(UserError, match=r"odd\.gguf is damaged"):
        read_architecture(path, dataclasses.asdict(arch))


def test_a_factor_counts_for_nothing_where_a_gguf_scales_nothing(tmp_path, golden, arch):
    path = layouts.write_gguf(tmp_path / "a.gguf", golden, add_rope_scaling_type=gguf.RopeScalingType.NONE)
    assert read_architecture(path, dataclasses.asdict(arch)).rope_global_factor == 1


def test_pointers_and_empty_folders_are_explained(tmp_path, arch):
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        load_weights(tmp_path, arch, jnp.float32)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(UserError, match="git lfs pull"):
        load_weights(tmp_path, arch, jnp.float32)


def test_saved_config_keeps_every_number(tmp_path, arch):
    odd = dataclasses.replace(
        arch, global_every=5, rope_global_factor=1.0, rope_local_base=5000.0, query_scale=168**-0.5, num_layers=11
    )
    config = safetensors.config_of(odd, "float32")
    assert type(config["query_pre_attn_scalar"]) is int
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert safetensors.read_architecture(tmp_path) == odd


def test_init_weights_have_the_shapes_of_a_checkpoint(tmp_path, arch):
    made = init_weights(jax.random.key(0), arch)
    save_weights(tmp_path, made, arch, jnp.float32)
    stored = {name: value.shape for name, value in load_file(tmp_path / "model.safetensors").items()}
    assert stored == tensor_shapes(arch)
    assert 0.8 < float(jnp.std(made.layers["down_proj"])) * 48**0.5 < 1.2


def test_numbers_that_a_file_leaves_out_are_as_in_its_family_or_as_given(tmp_path, golden, arch):
    for file in (layouts.write_gguf(tmp_path / "golden.gguf", golden), layouts.write_orbax(tmp_path / "orbax", golden)):
        found = read_architecture(file, {})
        assert (found.global_every, found.rope_local_base) == (6, 10_000.0)
        assert read_architecture(file, dataclasses.asdict(arch)) == arch
