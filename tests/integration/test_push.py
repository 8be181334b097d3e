"""From a run to the hub and back: what is exported is shown, sent, read as an adapter, and is what the run has learnt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import constants
from local_hub import Repository, local_hub, point_to

import agent_tunix
from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
FEW = ["model=gemma3_tiny", "training.micro_batch_size=2", "training.num_batches=2", "data.num_examples=64"]
FEW += ["evaluation.num_examples=8", "evaluation.sampled=false", "optimizer.learning_rate=1e-3", "optimizer.warmup_ratio=0"]
FEW += ["training.max_kl=1000.0"]
PUSH = ["export", "run=run", "push_to=me/demo"]
GREEDY = ["inference_config=greedy", "evaluation.num_examples=8"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def trained(command, kept, tmp_path):
    if not kept.exists():
        assert command("train", *FEW, "hydra.run.dir=run").code == 0
        assert command("evaluate", "run=run", *GREEDY).code == 0
        shutil.copytree("run", kept)
    else:
        shutil.copytree(kept, "run")
    return tmp_path / "run"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with local_hub() as hub:
        point_to(hub, monkeypatch, tmp_path / "cache")
        yield hub


def test_what_is_shown_is_sent_and_read_back_as_the_run_learnt_it(command, trained, hub, monkeypatch):
    outcome = command(*PUSH)
    assert outcome.code == 0, outcome.err
    assert hub.asked == [], "a dry run asks no one"
    folder = trained / "exports" / "peft-2"
    assert "Nothing is sent yet." in outcome.out
    assert f"{(folder / 'adapter_model.safetensors').stat().st_size:,} bytes" in outcome.out
    assert "push_to=me/demo dry_run=false" in outcome.out
    assert "names a folder of this machine as its base" in outcome.out
    card = (folder / "README.md").read_text()
    assert "before training" in card
    (folder / "README.md").write_text(card + "\nAs I like it.\n")
    outcome = command(*PUSH, "dry_run=false")
    assert outcome.code == 0, outcome.err
    assert f"Sent: {hub.url}/me/demo/commit/" in outcome.out
    _, files = hub.repositories["me/demo"].commits[-1]
    assert set(files) == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert files["README.md"].endswith(b"As I like it.\n")
    assert files["adapter_model.safetensors"] == (folder / "adapter_model.safetensors").read_bytes()

    outcome = command("evaluate", *FEW, *GREEDY, "model.adapter=me/demo", "hydra.run.dir=alone")
    assert outcome.code == 0, outcome.err
    ours, theirs = (read_records(Path(run) / "evals.jsonl")[-1] for run in ("run", "alone"))
    assert {**ours, "step": 0} == theirs

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    outcome = command("plan", *FEW, "model.adapter=me/demo", "hydra.run.dir=planned")
    assert outcome.code == 0, outcome.err
    assert len(hub.asked) == asked, "it is in the cache"


def test_a_run_keeps_to_the_commit_of_the_adapter_that_it_began_with(command, trained, hub):
    assert command(*PUSH, "dry_run=false", "private=true").code == 0
    begun, files = hub.repositories["me/demo"].commits[-1]
    config = json.loads(files["adapter_config.json"])
    hub.repositories["me/demo"].commit({"adapter_config.json": json.dumps({**config, "r": 3}).encode()})
    for adapter, code in {f"me/demo@{begun}": 0, "me/demo": 2}.items():
        outcome = command("plan", *FEW, f"model.adapter={adapter}")
        assert outcome.code == code, outcome.err
    hub.repositories["me/demo"].commits.pop()
    outcome = command("train", *FEW, "model.adapter=me/demo", "training.save_interval_steps=1", "hydra.run.dir=next")
    assert outcome.code == 0, outcome.err
    assert yaml.safe_load(Path("next/config.yaml").read_text())["model"]["adapter"] == f"me/demo@{begun}"
    from_hub, from_here = (
        agent_tunix.load("package:tiny", adapter=at) for at in ("me/demo", trained / "exports" / "peft-2")
    )
    np.testing.assert_array_equal(from_hub.logits([1, 2, 3]), from_here.logits([1, 2, 3]))


def test_what_the_hub_does_not_have_is_said(command, hub):
    (empty := Repository(private=False)).commit({"config.json": b"{}"})
    hub.repositories["me/model"] = empty
    for adapter, said in {
        "me/nothing": "the Hugging Face hub has no such repository, or it is private",
        "me/model@v2": "the repository has no such branch, tag or commit",
        "me/model": "model.adapter=me/model holds no adapter_config.json, so it is no adapter in PEFT's layout",
    }.items():
        outcome = command("train", *FEW, f"model.adapter={adapter}")
        assert outcome.code == 2
        assert said in outcome.err
    outcome = command("plan", "model.weights=me/nothing@v3", "data=arithmetic")
    assert "model.weights=me/nothing@v3: the Hugging Face hub has no such repository" in outcome.err


def test_mistakes_are_told_before_anything_is_written(command, trained, hub, monkeypatch):
    for given, said in {
        ("push_to=demo",): "give your name, or your organization's, too, as in push_to=me/demo",
        ("dry_run=false",): "dry_run=false is about a repository of the hub, and there is no push_to=<owner/name>",
        ("private=true",): "private=true is about a repository",
    }.items():
        outcome = command("export", "run=run", *given)
        assert outcome.code == 2
        assert said in outcome.err
    monkeypatch.delenv("HF_TOKEN")
    outcome = command(*PUSH, "dry_run=false")
    assert outcome.code == 2
    assert "push_to=me/demo: there is no token." in outcome.err
    assert not (trained / "exports").exists()


def test_an_export_of_something_else_is_not_sent(command, trained, hub):
    assert command(*PUSH).code == 0
    outcome = command(*PUSH, "dtype=bfloat16", "dry_run=false")
    assert outcome.code == 2
    assert "peft-2 exists already" in outcome.err
    assert not hub.repositories
    outcome = command(*PUSH, "format=merged", "dry_run=false")
    assert outcome.code == 0, outcome.err
    assert {"config.json", "model.safetensors", "README.md"} <= hub.repositories["me/demo"].commits[-1][1].keys()
