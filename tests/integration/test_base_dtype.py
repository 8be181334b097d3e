"""Runs over a quantised base: they learn, resume, begin from one another, and leave what runs over a whole base leave."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import Config
from agent_tunix.models.checkpoints.loading import quantised, stacked_tensor
from agent_tunix.models.lora import merge
from agent_tunix.models.quantization import Quantised
from agent_tunix.training import loading
from agent_tunix.training.run_folder import read_records

SMALL = [
    "model=gemma3_tiny",
    "data.num_examples=64",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
    "training.micro_batch_size=2",
    "training.num_batches=2",
    "optimizer.warmup_ratio=0",
    "optimizer.learning_rate=1e-4",
    "model.lora_module_path='(q|up)_proj'",  # fewer adapters are compiled faster
]


def train(command, folder: str, *arguments: str) -> str:
    outcome = command("train", *SMALL, *arguments, f"hydra.run.dir={folder}")
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def run(command, kept) -> None:
    """The folder `run`, trained for the first test that asks for it and copied for the other."""
    if not kept.exists():
        train(command, "run", "model.base_dtype=nf4")
        shutil.copytree("run", kept)
    else:
        shutil.copytree(kept, "run")


def config(folder: str) -> Config:
    return validate(read_saved(loading.Path(folder) / "config.yaml"), Config)


def adapters(folder: str):
    cfg = config(folder)
    return loading.load_trained(folder, cfg, loading.load_model(cfg))[0]


def test_a_run_samples_from_what_it_trains_and_resumes_to_the_bit(command, run, tmp_path):
    first = read_records(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["kl"] == pytest.approx(0, abs=1e-6), "the reference is the same quantised base"
    assert first["mismatch/kl"] < 1e-6
    train(command, "half", "model.base_dtype=nf4", "training.num_batches=1", "scheduler.total_steps=2")
    assert command("train", "training.resume=half", "training.num_batches=2").code == 0
    ours, theirs = adapters("half"), adapters("run")
    for module, b in theirs.b.items():
        np.testing.assert_array_equal(ours.b[module], b)
        assert np.abs(b).max() > 0


def test_adapters_are_merged_into_the_base_that_was_quantised(command, run, tmp_path):
    outcome = command("export", "run=run", "format=merged", "output=whole")
    assert outcome.code == 0, outcome.err
    assert "The run held its base in nf4; its adapters are merged into the base in float32." in outcome.out
    plain = loading.load_model(loading.held_in(config("run"), "float32", None))
    merged, found = merge(plain.weights, adapters("run")), load_file(tmp_path / "whole" / "model.safetensors")
    for name, value in found.items():
        np.testing.assert_allclose(value, stacked_tensor(merged, plain.arch, name), atol=1e-6)

    assert command("export", "run=run", "output=adapter").code == 0
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (stored["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"] == adapters("run").b["up_proj"][0].T).all()

    assert command("evaluate", "run=run", "evaluation.num_examples=8", "inference_config=greedy").code == 0
    *_, trained = [r for r in read_records(tmp_path / "run" / "evals.jsonl") if r["split"] == "validation"]
    assert trained["n"] == 8
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parity  # it takes long
def test_a_run_that_begins_from_another_holds_the_base_as_it_says_itself(command):
    whole = train(command, "whole", "model.lora_rank=0", "training.num_batches=1")
    held = train(command, "held", f"training.init_from={whole}", "model.base_dtype=nf4", "training.num_batches=1")
    learnt, _ = loading.load_trained(whole, config(whole), loading.load_model(config(whole)))
    base = loading.load_model(config(held)).weights.layers
    assert isinstance(base["up_proj"], Quantised)
    np.testing.assert_array_equal(base["up_proj"].codes, quantised(learnt, "nf4").layers["up_proj"].codes)

    def beginning(**model) -> Config:
        cfg = config(held).model_dump(mode="json")
        return validate(cfg | {"model": cfg["model"] | model, "training": cfg["training"] | {"init_from": held}}, Config)

    onwards = loading.load_model(beginning(base_dtype=None)).weights.layers
    np.testing.assert_array_equal(onwards["up_proj"], learnt.layers["up_proj"])
    merged = loading.load_model(beginning(base_dtype=None, lora_rank=0)).weights.layers
    np.testing.assert_allclose(merged["up_proj"], merge(learnt, adapters(held)).layers["up_proj"], atol=1e-6)
    assert (np.asarray(merged["up_proj"]) != np.asarray(onwards["up_proj"])).any()


def test_another_architecture_is_not_begun_from(command, write_run, tmp_path):
    write_run(tmp_path / "begun")
    outcome = command("train", *SMALL, "training.init_from=begun", "model.architecture.sliding_window=8")
    assert outcome.code == 2
    assert "is not the model that model.architecture describes:\n  sliding_window: 32 in the checkpoint, 8" in outcome.err
