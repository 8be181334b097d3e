"""A checkpoint that no file of conf/model names is trained, evaluated, planned and exported by what it says of itself."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights, tensor_shapes
from agent_tunix.models.checkpoints.peft import read_adapters
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import merge

SMALL = [
    "data=arithmetic",
    "generation=short",
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "grpo.num_generations=2",
]
SMALL += [
    "generation.max_generation_steps=8",
    "evaluation.num_examples=2",
    "evaluation.sampled=false",
    "model.dtype=float32",
]
SMALL += ["model.lora_rank=2", "training.num_batches=1", "optimizer.learning_rate=1e-2", "optimizer.warmup_ratio=0"]


@pytest.fixture
def checkpoint(goldens, tmp_path):
    """A random Qwen2, with biases and a head of its own, that knows the words of the tiny model."""
    folder = tmp_path / "qwen"
    shutil.copytree(goldens / "families" / "qwen2", folder, ignore=shutil.ignore_patterns("*.npz"))
    shutil.copy(find_checkpoint("package:tiny") / "tokenizer.json", folder)
    return folder


def test_weights_alone_are_enough(checkpoint, command, tmp_path):
    outcome = command("plan", "model.weights=qwen", *SMALL, "hydra.run.dir=planned")
    assert outcome.code == 0, outcome.err
    assert "by its size alone" in outcome.out
    few = "model.lora_module_path='(q|down)_proj'"  # are compiled faster
    outcome = command("train", "model.weights=qwen", *SMALL, few, "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    model = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]
    assert (model["model_family"], model["architecture"]["biases"]) == ("qwen2", ["q_proj", "k_proj", "v_proj"])
    assert model["guidance"] == {"learning_rate": [1e-5, 3e-5], "prompts": 4, "measured": False}

    assert command("evaluate", "run=run", "evaluation.num_examples=2").code == 0
    assert command("export", "run=run", "output=adapter").code == 0
    assert command("export", "run=run", "format=merged", "output=merged", "dtype=float32").code == 0
    arch = read_architecture(checkpoint)
    base, adapters = load_weights(checkpoint, arch, jnp.float32), read_adapters(tmp_path / "adapter", arch)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["Qwen2ForCausalLM"], "qwen2")
    assert read_architecture(tmp_path / "merged") == arch
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == tensor_shapes(arch)
    merged, expected = load_weights(tmp_path / "merged", arch, jnp.float32), merge(base, adapters)
    for field, value in expected.layers.items():
        np.testing.assert_allclose(merged.layers[field], value, atol=1e-5, err_msg=field)
    np.testing.assert_array_equal(merged.head_VD, base.head_VD)
    assert any((np.asarray(expected.layers[m]) != np.asarray(base.layers[m])).any() for m in adapters.a), "it has learnt"


def test_a_model_of_its_own_needs_weights(command):
    outcome = command("train", "model=auto", *SMALL)
    assert (outcome.code, "model.weights is missing" in outcome.err) == (2, True)


def test_all_weights_of_it_are_trained_head_and_biases_too(checkpoint, command, tmp_path):
    outcome = command("train", "model.weights=qwen", *SMALL, "model.lora_rank=0", "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    assert command("export", "run=run", "format=merged", "output=merged", "dtype=float32").code == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "merged"))
    same = {name for name in before if (before[name].astype(np.float32) == after[name]).all()}
    assert not same & {"lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.up_proj.weight"}


def test_a_checkpoint_with_a_tensor_that_no_one_asks_for_is_refused_by_its_name(checkpoint, command):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True, "model_type": "llama"}))
    outcome = command("train", "model.weights=qwen", *SMALL)
    assert outcome.code == 2
    assert "unknown: model.layers.0.self_attn.k_proj.bias" in outcome.err
