"""`agent-tunix export`: exported equals trained, a folder appears whole, and mistakes are explained."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from agent_tunix.config.load import read_saved, validate
from agent_tunix.config.schema import Config, ExportConfig
from agent_tunix.models import transformer
from agent_tunix.models.checkpoints import peft
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.models.checkpoints.safetensors import read_architecture
from agent_tunix.models.lora import Adapters
from agent_tunix.models.tokenizer import load_tokenizer
from agent_tunix.training import export, loading, rollouts
from agent_tunix.training.answering import Asking, answers_to
from agent_tunix.training.data import load_examples, prompt_width
from agent_tunix.training.run_folder import claimed
from agent_tunix.training.setup import engine_of

LONG_RUNS = True
TRAIN = ["train", "model=gemma3_tiny", "training.num_batches=2", "training.save_interval_steps=1", "hydra.run.dir=run"]
STRONG = [
    "optimizer.learning_rate=1e-3",
    "training.max_kl=1000.0",
    "optimizer.warmup_ratio=0",
    "optimizer.max_grad_norm=10",
    "data.num_examples=64",
    "training.micro_batch_size=2",
    "evaluation.num_examples=8",
    "evaluation.sampled=false",
]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def trained(command, kept, tmp_path):
    """A run in the working directory, trained for the first test that asks for it and copied for the others."""
    if not kept.exists():
        assert command(*TRAIN, *STRONG).code == 0
        shutil.copytree("run", kept)
    else:
        shutil.copytree(kept, "run")
    return tmp_path / "run"


def test_merged_completes_as_trained(command, trained, tmp_path):
    outcome = command("export", "run=run", "format=merged")
    assert outcome.code == 0, outcome.err
    folder = trained / "exports" / "merged-2"
    assert str(folder.relative_to(tmp_path)) in outcome.out

    cfg = validate(read_saved(trained / "config.yaml"), Config)
    model = loading.load_model(cfg)
    adapters, _ = loading.load_trained(str(trained), cfg, model)
    arch = read_architecture(folder)
    weights = load_weights(folder, arch, jnp.float32)
    exported = loading.Model(arch, load_tokenizer(folder), weights, lambda: (weights, 0))
    assert arch == model.arch

    examples = load_examples(cfg, "test", 8, model.tokenizer, print)
    width = prompt_width(examples, 0)
    prompts = rollouts.pad_prompts(examples, width, model)
    hidden = [
        transformer.forward(weights, lora, arch, prompts.tokens_PS, prompts.positions_PS)[0]
        for weights, lora in ((model.weights, adapters), (exported.weights, None), (model.weights, None))
    ]
    np.testing.assert_allclose(hidden[0], hidden[1], atol=2e-4)
    assert np.abs(hidden[0] - hidden[2]).max() > 0.1, "training changed too little for this test to mean anything"

    greedy = loading.training_sampling(cfg, model.tokenizer)
    greedy = dataclasses.replace(greedy, greedy=True, num_generations=1)
    asking = Asking(width, 8, jax.random.key(0), greedy)
    texts = [
        answers_to(engine, engine.policy(t), None, examples, asking).texts
        for engine, t in ((engine_of(cfg, model, None), adapters), (engine_of(cfg, exported, None), None))
    ]
    assert texts[0] == texts[1]


def test_a_merged_model_says_of_itself_what_its_base_said(command, trained, tmp_path):
    """How long a text it was made for, and the tokens of its tokenizer; the command to go on with can be pasted."""
    shutil.copytree(find_checkpoint("package:tiny"), tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    wrong = {"eos_token_id": 7, "bos_token_id": 8}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096} | wrong))
    written = trained / "config.yaml"
    written.write_text(written.read_text().replace("package:tiny", str(tmp_path / "base")))
    (tmp_path / "base" / "tokenizer.model").write_bytes(b"for llama.cpp")
    outcome = command("export", "run=run", "format=gguf-ready", "output='two words'")
    assert outcome.code == 0, outcome.err
    assert "python convert_hf_to_gguf.py 'two words'" in outcome.out
    found, tokenizer = json.loads((tmp_path / "two words" / "config.json").read_text()), load_tokenizer(tmp_path / "base")
    assert found["max_position_embeddings"] == 4096
    assert (found["eos_token_id"], found["bos_token_id"]) == (tokenizer.end_ids[0], tokenizer.begin_id)


def test_peft_folder_has_names_and_shapes_of_peft(command, trained):
    """Beside what an export that was killed has left, which goes with it."""
    (left := trained.parent / ".adapter.half").mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with claimed(left):
        assert "is being written by another process" in command("export", "run=run", "step=1", "output=adapter").err
    assert list(left.iterdir())
    assert command("export", "run=run", "step=1", "output=adapter").code == 0
    folder = trained.parent / "adapter"
    assert not left.exists()
    assert sorted(file.name for file in folder.iterdir()) == [
        *(".export.json", "README.md", "adapter_config.json", "adapter_model.safetensors")
    ]
    config = json.loads((folder / "adapter_config.json").read_text())
    model = validate(read_saved(trained / "config.yaml"), Config).model
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (16, model.lora_alpha, "LORA")
    shapes = {name: value.shape for name, value in load_file(folder / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.layers.3.mlp.down_proj.lora_A.weight"] == (16, 256)
    assert shapes["base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"] == (128, 16)
    assert len(shapes) == 2 * 7 * 4
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1, "whoever reads one file reads all"
    assert command("export", "run=run", "step=1", "dtype=bfloat16", "output=short").code == 0
    whole, short = (load_file(trained.parent / name / "adapter_model.safetensors") for name in ("adapter", "short"))
    assert {value.dtype for value in short.values()} == {jnp.dtype("bfloat16")}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.astype(np.float32), rtol=2**-8), whole, short)


def test_mistakes_are_explained_and_leave_nothing_behind(command, trained, tmp_path):
    for arguments, message in {
        ("run=nowhere",): "run=nowhere: this is not the folder of a run",
        ("run=no/where",): "run=no/where: this is not the folder of a run",
        ("run=run/config.yaml",): "run=run/config.yaml: this is not the folder of a run",
        ("run=null",): "run=null: must be a valid string",
        (): "run is missing: give the folder of a run",
        ("run=run", "step=7"): "the steps kept are 1, 2",
        ("run=run", "format=onnx"): "format=onnx: must be",
        ("run=run", "formt=peft"): "formt: unknown key; did you mean format?",
        ("run=run", "format=gguf-ready"): "no tokenizer.model",
        ("run=run", "output=run"): "exists already",
        ("run=run", "format=peft,merged", "--multirun"): "export writes one folder",
    }.items():
        outcome = command("export", *arguments)
        assert outcome.code == 2
        assert message in outcome.err
        assert "Traceback" not in outcome.err
    assert not (trained / "exports").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_working_directory_that_is_empty_stays(command, tmp_path):
    assert command("export", "run=nowhere").code == 2
    assert tmp_path.exists()


def test_sizes_that_are_published_with_a_vision_tower_have_its_names(tmp_path, trained):
    """From a base in another layout than Hugging Face's, which does not tell."""
    cfg = validate(read_saved(trained / "config.yaml"), Config)
    for layers, name in {18: "model.layers.17", 34: "model.language_model.layers.33"}.items():
        adapters = Adapters({"q_proj": np.ones((layers, 4, 2))}, {"q_proj": np.ones((layers, 2, 4))}, 1.0)
        export._write_peft(tmp_path, tmp_path / "base.gguf", cfg, adapters, "float32")
        written = load_file(tmp_path / "adapter_model.safetensors")
        assert f"base_model.model.{name}.self_attn.q_proj.lora_A.weight" in written
        targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
        assert targets == (["q_proj"] if layers == 18 else r".*language_model.*\.(q_proj)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_told_to_end_leaves_no_folder(command, trained, monkeypatch, number):
    monkeypatch.setattr(peft, "save_file", lambda *_, **__: os.kill(os.getpid(), number))
    before = signal.signal(number, signal.SIG_DFL)  # which is another under nohup
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit(130)))
    outcome = command("export", "run=run", "format=peft")
    assert signal.signal(number, before) == signal.SIG_DFL
    assert outcome.code == 130
    assert outcome.err.startswith("Interrupted.")
    assert not (trained / "exports").exists()


def test_a_failed_export_leaves_no_folder(trained, monkeypatch):
    cfg = ExportConfig(run=str(trained), step=None, format="peft", output=None, dtype="float32")
    for fault in (OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")):
        monkeypatch.setattr(peft, "save_file", Mock(side_effect=fault))
        with pytest.raises(export.UserError, match="No space left"):
            export.run(cfg, export.Console(quiet=True))
        assert not (trained / "exports").exists()
