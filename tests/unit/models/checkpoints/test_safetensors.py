"""Configs of real checkpoints, old and new, give the numbers that we ship; what we have no code for is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from agent_tunix.errors import UserError
from agent_tunix.models.checkpoints.safetensors import INDEX, SafetensorsFolder, config_of, read_architecture
from agent_tunix.models.published import of_repository

LINEAR = {"factor": 8.0, "rope_type": "linear"}
# What google's repositories hold, less the keys that say nothing about the architecture.
PUBLISHED = {
    "1b": {
        "model_type": "gemma3_text",
        "head_dim": 256,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "4b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": LINEAR,
            "sliding_window": 1024,
        },
    },
    "12b": {
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
            "rope_scaling": LINEAR,
            "sliding_window": 1024,
        },
    },
    "27b": {
        "model_type": "gemma3",
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": LINEAR,
            "sliding_window": 1024,
        },
    },
}


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def described(size):
    return of_repository(f"google/gemma-3-{size}-it")


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configs_fit_the_table(tmp_path, size):
    assert read_architecture(write(tmp_path, PUBLISHED[size])) == described(size)


@pytest.mark.parametrize(("size", "longest"), [("270m", 32768), ("1b", 32768), ("4b", 131072), ("27b", 131072)])
def test_an_exported_model_takes_as_long_a_text_as_the_published_one(size, longest):
    assert config_of(described(size), "bfloat16")["max_position_embeddings"] == longest


def test_configs_by_kind_of_layer_fit_too(tmp_path):
    new = {key: value for key, value in PUBLISHED["1b"].items() if "rope" not in key and "pattern" not in key}
    new["layer_types"] = [("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(26)]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert read_architecture(write(tmp_path, new)) == described("1b")


def test_scaling_beside_parameters_counts_and_a_factor_of_no_scaling_does_not(tmp_path):
    """As in transformers."""
    by_kind = {"full_attention": {"rope_type": "default", "rope_theta": 1000000, "factor": 4.0}}
    for scaling, factor in ((None, 1.0), (LINEAR, 8.0)):
        config = {**PUBLISHED["1b"], "rope_parameters": by_kind, "rope_scaling": scaling}
        assert read_architecture(write(tmp_path, config)).rope_global_factor == factor


def test_a_setting_that_is_off_may_also_be_null(tmp_path):
    off = {"attention_bias": None, "use_bidirectional_attention": None, "final_logit_softcapping": None}
    assert read_architecture(write(tmp_path, {**PUBLISHED["1b"], **off})) == described("1b")


def test_fewer_layers_than_the_pattern_are_all_local(tmp_path):
    config = {**PUBLISHED["1b"], "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    assert not read_architecture(write(tmp_path, config)).is_global().any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "type mamba; only gemma3, llama"),
        ({"model_type": "qwen3_moe"}, "mixtures of experts cannot"),
        ({"model_type": "qwen2_vl", "vision_config": {}}, "models that see cannot"),
        ({"attention_bias": True}, "attention_bias"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"full_attention": LINEAR}}, "by kind of layer"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "RoPE of local layers is scaled"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "by kind of layer"),
        ({"layer_types": ["full_attention", "sliding_attention", *["full_attention"] * 24]}, "layer_types"),
        ({"layer_types": ["full_attention"] * 26, "num_hidden_layers": 10**30}, "layer_types"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, change, named):
    with pytest.raises(UserError, match=named):
        read_architecture(write(tmp_path, {**PUBLISHED["1b"], **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"query_pre_attn_scalar": 0},
        {"rope_theta": "far"},
        {"rope_scaling": 8},
        {"rope_scaling": {"rope_type": "linear", "factor": None}},
        {"rope_scaling": {"rope_type": "linear", "factr": 8.0}},
        {"rope_scaling": {"factor": 8.0}},
        {"layer_types": 6},
        {"text_config": 3},
        {"rms_norm_eps": "1e-6"},
        {"num_hidden_layers": 26.0},
        {"query_pre_attn_scalar": -1},
        {"query_pre_attn_scalar": float("inf")},
        {"sliding_window": 0},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": 1001},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_said_without_a_traceback(tmp_path, change):
    with pytest.raises(UserError, match=r"config\.json has a value of the wrong kind"):
        read_architecture(write(tmp_path, {**PUBLISHED["1b"], **change}))


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_whole_number_counts_as_a_real_one_however_large(tmp_path, key):
    """JAX takes an integer of a program for one of 32 bits."""
    arch = read_architecture(write(tmp_path, {**PUBLISHED["1b"], key: 2**31}))
    assert (arch.norm_eps if key == "rms_norm_eps" else arch.rope_global_base) == 2.0**31
    assert isinstance(arch.norm_eps, float)
    assert isinstance(arch.rope_global_base, float)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"x": "a.safetensors"}, r"lacks a\.safetensors, which its index names"),
        ({"x": 3}, "is damaged"),
        ({"x": "a" * 1000}, "is damaged|lacks a"),
        ({"x": ["a"]}, "is damaged"),
        (3, "is damaged"),
        ({str(i): f"{i}.safetensors" for i in range(9)}, r"lacks 0\.safetensors, .* and 3 more, which"),
        ({"x": "../other/a.safetensors"}, "is no file of this folder"),
        ({str(i): f"{i}.safetensors" for i in range(2**13 + 1)}, "names 8193 files"),
        ("[" * 100_000, r"safetensors\.index\.json is damaged .*nested too deeply"),
    ],
    ids=range(9),
)
def test_an_index_that_names_no_file_is_answered(tmp_path, index, said):
    (tmp_path / INDEX).write_text(index if isinstance(index, str) else json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match=said):
        SafetensorsFolder(tmp_path, tied=True)


@pytest.mark.parametrize("text", ["{", "[]", "\x00", "[" * 100_000, '{"vocab_size": ' + "1" * 5000 + "}"], ids=range(5))
def test_a_broken_config_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        read_architecture(tmp_path)


def test_a_tensor_that_two_files_hold_is_refused(tmp_path):
    for part in (1, 2):
        tensors = {"model.norm.weight": np.full(4, part, np.float32)}
        save_file(tensors, tmp_path / f"model-0000{part}-of-00002.safetensors")
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight is in model-00001-of-00002"):
        SafetensorsFolder(tmp_path, tied=True)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        read_architecture(tmp_path)
