"""Runs that start from an adapter of another tool, and adapters of other kinds, from beginning to export."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.peft import CONFIG, TENSORS, write_adapters
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import Adapters, init_adapters
from agent_tunix.training.run_folder import read_records

FEW = ["model=gemma3_tiny", "training.micro_batch_size=2", "training.num_batches=2", "data.num_examples=64"]
FEW += ["evaluation.num_examples=8", "evaluation.sampled=false", "optimizer.learning_rate=1e-3", "optimizer.warmup_ratio=0"]
KEYS = ["model.lora_rank=4", "model.lora_alpha=64", "model.use_rslora=true", "model.lora_module_path=q_proj|down_proj"]


@pytest.fixture
def adapter(tmp_path) -> Path:
    """The folder of an adapter that has learnt something."""
    arch = read_architecture(find_checkpoint("package:tiny"))
    fresh = init_adapters(jax.random.key(5), arch, ("q_proj", "down_proj"), 4, 64.0, use_rslora=True)
    b = {name: 0.02 * jax.random.normal(jax.random.key(6), zeros.shape) for name, zeros in fresh.b.items()}
    (folder := tmp_path / "adapter").mkdir()
    learnt = Adapters(fresh.a, b, fresh.scale)
    write_adapters(folder, learnt, 64.0, "owner/tiny", multimodal=False, dtype="float32", use_rslora=True)
    return folder


def last_evaluation(run: str) -> dict:
    return read_records(Path(run) / "evals.jsonl")[-1]


def test_a_run_starts_from_an_adapter_and_is_compared_with_it(command, adapter):
    outcome = command("train", *FEW, *KEYS, "model.adapter=adapter", "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    first, second = read_records(Path("run") / "metrics.jsonl")
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 1e-5
    greedy = ["inference_config=greedy", "evaluation.num_examples=8"]
    assert command("evaluate", "run=run", "step=0", *greedy).code == 0
    outcome = command("evaluate", *FEW, *greedy, "model.adapter=adapter", "hydra.run.dir=alone")
    assert outcome.code == 0, outcome.err
    assert "with model.adapter=adapter: 8 problems" in outcome.out
    assert last_evaluation("alone") == last_evaluation("run")

    adapter.rename(adapter.parent / "moved")
    outcome = command("train", "training.resume=run", "training.num_epochs=2")
    assert outcome.code == 2
    assert "model.adapter=adapter: there is no" in outcome.err
    outcome = command("train", "training.resume=run", "training.num_epochs=2", "model.adapter=moved")
    assert outcome.code == 0, outcome.err
    assert command("export", "run=run", "step=4", "output=exported").code == 0
    settings = json.loads((Path("exported") / CONFIG).read_text())
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 64, True)
    began, ended = load_file("moved/" + TENSORS), load_file("exported/" + TENSORS)
    assert began.keys() == ended.keys()
    changed = max(np.abs(began[name] - ended[name]).max() for name in began)
    assert 1e-4 < changed < 5e-3, "four updates of at most 1e-3"


@pytest.mark.parity  # it takes long
def test_jobs_of_a_sweep_start_from_an_adapter_together(command, adapter):
    rates = "optimizer.learning_rate=1e-3,1e-2"
    outcome = command(
        "train",
        "--multirun",
        *FEW,
        *KEYS,
        rates,
        "model.adapter=adapter",
        "hydra.sweep.dir=sweep",
    )
    assert outcome.code == 0, outcome.err
    for job in "01":
        assert read_records(Path("sweep") / job / "metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)


def test_what_an_adapter_is_must_be_what_the_run_trains(command, adapter):
    modules = "'model.lora_module_path=q_proj|down_proj'"
    for given, said in {
        (): f"give\n  model.lora_rank=4 model.lora_alpha=64.0 model.use_rslora=true {modules}\n",
        tuple(KEYS[:3]): f"give\n  {modules}\n",
        (*KEYS, "training.init_from=run"): "a run starts from one of them",
        ("model.lora_rank=0",): "model.lora_rank=0 trains all weights and has no adapters",
        (*KEYS, "model.adapter=nowhere"): "model.adapter=nowhere: there is no",
    }.items():
        for verb in ("train", "plan"):
            outcome = command(verb, *FEW, "model.adapter=adapter", *given)
            assert outcome.code == 2
            assert said in outcome.err
    outcome = command("plan", *FEW, *KEYS, "model.adapter=adapter")
    assert outcome.code == 0, outcome.err
    assert "names owner/tiny as its base" not in outcome.out
    text = (adapter / CONFIG).read_text().replace("owner/tiny", "owner/large")
    (adapter / CONFIG).write_text(text)
    assert "names owner/large as its base" in command("plan", *FEW, *KEYS, "model.adapter=adapter").out


DORA = ["model.use_dora=true", "model.lora_rank=4", "model.lora_alpha=64", "model.lora_module_path=q_proj|down_proj"]


def test_dora_trains_resumes_to_the_bit_and_is_exported_and_read(command):
    outcome = command("train", *FEW, *DORA, "hydra.run.dir=run")
    assert outcome.code == 0, outcome.err
    first, second = read_records(Path("run") / "metrics.jsonl")
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert max(first["mismatch/kl"], second["mismatch/kl"]) < 1e-6, "what samples is what is trained"
    command("train", *FEW, *DORA, "training.num_batches=1", "scheduler.total_steps=2", "hydra.run.dir=half")
    assert command("train", "training.resume=half", "training.num_batches=2").code == 0
    for run in ("run", "half"):
        assert command("export", f"run={run}", f"output={run}-adapter").code == 0
    assert command("export", "run=run", "format=merged", "output=merged").code == 0
    straight, half = (load_file(f"{run}-adapter/{TENSORS}") for run in ("run", "half"))
    for name, found in half.items():
        np.testing.assert_array_equal(found, straight[name])
    base = load_file(find_checkpoint("package:tiny") / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    a, b, m = (straight[f"base_model.model.{module}.lora_{end}"] for end in ("A.weight", "B.weight", "magnitude_vector"))
    whole = base[f"{module}.weight"].astype(np.float64) + 16 * b.astype(np.float64) @ a
    assert 1e-4 < np.abs(m - np.linalg.norm(base[f"{module}.weight"], axis=1)).max() < 5e-3, "two updates of at most 1e-3"
    merged = load_file("merged/model.safetensors")[f"{module}.weight"]
    np.testing.assert_allclose(merged, m[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)

    greedy = ["inference_config=greedy", "evaluation.num_examples=8"]
    assert command("evaluate", "run=run", *greedy).code == 0
    outcome = command("evaluate", *FEW, *greedy, "model.adapter=run-adapter", "hydra.run.dir=alone")
    assert outcome.code == 0, outcome.err
    ours, theirs = (last_evaluation(folder) for folder in ("run", "alone"))
    assert {**ours, "step": 0} == theirs
    outcome = command("plan", *FEW, *KEYS, "model.adapter=run-adapter")
    assert "model.use_rslora=false model.use_dora=true" in outcome.err


def test_jobs_of_a_sweep_train_dora_together_as_each_does_alone(command):
    rates = "optimizer.learning_rate=1e-3,1e-2"
    outcome = command("train", "--multirun", *FEW, *DORA, rates, "hydra.sweep.dir=sweep")
    assert outcome.code == 0, outcome.err
    assert command("train", *FEW, *DORA, "optimizer.learning_rate=1e-2", "hydra.run.dir=alone").code == 0
    together, alone = (read_records(Path(run) / "metrics.jsonl") for run in ("sweep/1", "alone"))
    for ours, theirs in zip(together, alone, strict=True):
        for key in ("loss", "kl", "grad_norm", "reward/mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6)
