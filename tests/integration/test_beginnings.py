"""The other ways to begin: a supervised warm start, a run that goes on from another, and training all weights."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agent_tunix.config.load import read_saved
from agent_tunix.models.checkpoints.loading import load_weights
from agent_tunix.training import loading
from agent_tunix.training.run_folder import read_records

SMALL = ["model=gemma3_tiny", "evaluation.num_examples=64", "evaluation.sampled=false", "optimizer.learning_rate=1e-5"]
FEW = [*SMALL, "training.micro_batch_size=2"]
GREEDY = ["evaluation.num_examples=64", "inference_config=greedy"]


def evals(tmp_path, run: str) -> list[dict]:
    return [record for record in read_records(tmp_path / run / "evals.jsonl") if record["split"] == "validation"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "warm"


@pytest.fixture
def warm(command, kept):
    """A warm start in the working directory, trained for the first test that asks for it and copied for the others."""
    if not kept.exists():
        outcome = command("train", "+experiment=warm_start", *SMALL, "training.num_batches=20", "hydra.run.dir=warm")
        assert outcome.code == 0, outcome.err
        assert f"train {SMALL[0]} " in outcome.out, "the run after it has the same model"
        assert "training.init_from=warm" in outcome.out
        shutil.copytree("warm", kept)
    else:
        shutil.copytree(kept, "warm")
    return "warm"


def test_demonstrations_teach_and_grpo_goes_on_from_them(command, tmp_path, warm):
    before, after = evals(tmp_path, warm)
    assert after["accuracy"] >= before["accuracy"] + 0.4
    losses = [record["loss"] for record in read_records(tmp_path / warm / "metrics.jsonl")]
    assert losses[-1] < 0.5 * losses[0]

    outcome = command("train", *FEW, f"training.init_from={warm}", "training.num_batches=1", "hydra.run.dir=next")
    assert outcome.code == 0, outcome.err
    assert evals(tmp_path, "next")[0]["accuracy"] == after["accuracy"]
    assert read_records(tmp_path / "next" / "metrics.jsonl")[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert command("evaluate", "run=next", "step=0", *GREEDY).code == 0
    assert read_records(tmp_path / "next" / "evals.jsonl")[-1]["accuracy"] > before["accuracy"] + 0.3
    outcome = command("evaluate", *FEW, f"training.init_from={warm}", *GREEDY, "hydra.run.dir=begun")
    assert outcome.code == 0, outcome.err
    assert f"base model tiny, with training.init_from={warm}: 64 problems" in outcome.out
    assert read_records(tmp_path / "begun" / "evals.jsonl")[-1] == read_records(tmp_path / "next" / "evals.jsonl")[-1]


def test_what_a_run_began_from_stays_though_the_earlier_one_goes_on(command, tmp_path, warm):
    begun = [f"training.init_from={warm}", "model.weights=no/where", "training.num_batches=1", "hydra.run.dir=next"]
    assert command("train", *FEW, *begun).code == 0
    saved = read_saved(tmp_path / "next" / "config.yaml")
    assert (saved["training"]["init_step"], saved["model"]["weights"]) == (20, "package:tiny")

    def accuracy():
        assert command("evaluate", "run=next", "step=0", *GREEDY).code == 0
        return read_records(tmp_path / "next" / "evals.jsonl")[-1]["accuracy"]

    before = accuracy()
    longer = ["training.num_batches=22", "optimizer.learning_rate=0.1", "scheduler.lr_min=0.05"]
    outcome = command("train", f"training.resume={warm}", *longer)
    assert outcome.code == 0, outcome.err
    assert accuracy() == before
    shutil.rmtree(tmp_path / warm / "checkpoints" / "20")
    outcome = command("evaluate", "run=next", "step=0")
    assert outcome.code == 2
    assert f"{tmp_path / warm} has no checkpoint of step 20; the steps kept are" in outcome.err


def test_adapters_of_another_shape_are_refused(command, warm):
    outcome = command("train", *FEW, f"training.init_from={warm}", "model.lora_rank=4")
    assert outcome.code == 2
    assert "do not fit model.lora_rank" in outcome.err


def test_all_weights_train_resume_and_serve_as_a_base(command, tmp_path, warm):
    full = [*FEW, "model.lora_rank=0", "optimizer.learning_rate=1e-3", "training.num_batches=2"]
    outcome = command("train", *full, "hydra.run.dir=full")
    assert outcome.code == 0, outcome.err
    records = read_records(tmp_path / "full" / "metrics.jsonl")
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert records[0]["update_survival"] > 0.9
    assert command("train", "training.resume=full", "training.num_epochs=2").code == 0
    assert json.loads((tmp_path / "full" / "summary.json").read_text())["steps"] == 4

    outcome = command("train", *FEW, "training.init_from=full", "training.num_batches=1", "hydra.run.dir=over")
    assert outcome.code == 0, outcome.err
    assert evals(tmp_path, "over")[0]["accuracy"] == evals(tmp_path, "full")[-1]["accuracy"]

    exported_whole(command, tmp_path)

    outcome = command("train", *full, f"training.init_from={warm}", "hydra.run.dir=merged")
    assert outcome.code == 0, outcome.err
    assert evals(tmp_path, "merged")[0]["accuracy"] == evals(tmp_path, warm)[-1]["accuracy"]


def exported_whole(command, tmp_path) -> None:
    """A run of all weights is exported as they are; adapters are of no use where the weights below them have changed."""
    assert command("export", "run=full", "format=merged", "output=whole").code == 0
    cfg = loading.saved_config("full", "run")
    model = loading.load_model(cfg)
    learnt, _ = loading.load_trained("full", cfg, model)
    exported = load_weights(tmp_path / "whole", model.arch, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, exported, learnt)
    assert not np.array_equal(exported.embed_VD, model.weights.embed_VD)
    for run, said in {"full": "trained all weights", "over": "weights that full has changed"}.items():
        outcome = command("export", f"run={run}", "format=peft")
        assert outcome.code == 2
        assert said in outcome.err


def test_data_without_worked_answers_cannot_be_imitated(command, tmp_path):
    rows = [{"question": f"Ann has {i} coins.", "answer": i} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=jsonl", "data.path=rows.jsonl", "data.system_prompt=''"]
    outcome = command("train", "+experiment=warm_start", *SMALL, *data)
    assert outcome.code == 2
    assert "no example has a worked answer" in outcome.err
