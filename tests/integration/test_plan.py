"""`agent-tunix plan` tells what the run then does."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from hydra import compose, initialize_config_dir
from safetensors.numpy import load_file, save_file

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.plan import memory, plan
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.training import setup
from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
RUN = ["model=gemma3_tiny", "training.num_batches=3", "training.micro_batch_size=2", "grpo.num_iterations=2"]
RUN += ["evaluation.num_examples=8", "evaluation.sampled=false"]


def test_the_plan_is_what_the_run_does(command, tmp_path):
    unusual = "optimizer.weight_decay=0.2"
    planned = command("plan", *RUN, unusual, "hydra.run.dir=plan")
    assert planned.code == 0, planned.err
    assert planned.out.count("warning:") == planned.out.count(f"warning: {unusual}") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))
    assert (tmp_path / "plan" / "learning_rate.svg").read_text().startswith("<svg")
    assert command("train", *RUN, unusual, "hydra.run.dir=run").code == 0
    assert len(json.loads((tmp_path / "run" / "summary.json").read_text())["warnings"]) == 1
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert "It fits " in planned.out
    assert re.search(rf"updates\s+│\s+{len(records)}\b", planned.out)
    for name, step in (("first", 1), ("end of warm-up", 1), ("middle", 3), ("last", 6)):
        shown = re.search(rf"{name} \(update {step}\)\s+│\s+(\S+)", planned.out)
        assert float(shown.group(1)) == pytest.approx(records[step - 1]["lr"], rel=1e-2)


def test_worked_answers_that_do_not_fit_are_left_out_as_by_the_run(command):
    few = ["+experiment=warm_start", "model=gemma3_tiny", "data.num_examples=200", "generation.max_generation_steps=14"]
    planned = command("plan", *few, "hydra.run.dir=plan")
    assert planned.code == 0, planned.err
    notices: list[str] = []
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        cfg = validate(compose("config", few), Config)
    plan = setup.prepare(cfg, setup.Loaded(), notices.append).plan
    assert re.search(rf"updates\s+│\s+{plan.total_steps}\b", planned.out)
    [left_out] = [text for text in notices if "have no worked answer" in text]
    assert left_out in planned.out
    refused = command("plan", *few[:3], "generation.max_generation_steps=2")
    assert (refused.code, refused.out) == (2, "")
    assert "no example has a worked answer that fits" in refused.err


def test_dry_run_is_the_same(command):
    assert command("train", *RUN, "dry_run=true", "hydra.run.dir=a").out.replace("a/", "") == command(
        "plan", *RUN, "hydra.run.dir=b"
    ).out.replace("b/", "")


def test_a_continued_run_is_planned_with_its_own_configuration(command, write_run, tmp_path):
    write_run(tmp_path / "run", training__num_batches=3)
    outcome = command("plan", "training.resume=run", "training.num_epochs=2", "hydra.run.dir=plan")
    assert outcome.code == 0, outcome.err
    assert "last (update 6)" in outcome.out


def test_what_is_changed_of_a_continued_run_is_judged_beside_its_own_values(command, write_run, tmp_path):
    """Not beside those that are shipped, whose schedule knows no such key, and whose rate is lower."""
    write_run(tmp_path / "run", scheduler__scheduler_name="wsd", optimizer__learning_rate=1e-4)
    outcome = command("plan", "training.resume=run", "scheduler.decay_ratio=0.3", "scheduler.lr_min=5e-6")
    assert outcome.code == 0, outcome.err
    wrong = command("plan", "training.resume=run", "scheduler.lr_min=1e-3")
    assert (wrong.code, "optimizer.learning_rate=0.0001" in wrong.err) == (2, True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.resume=nowhere", "not the folder of a run"),
        (
            "training.init_from=nowhere",
            "nowhere/config.yaml.\nIf it was moved, write its new path into config.yaml of the run",
        ),
        ("model.lora_module_path=nothing", "model.lora_module_path=nothing: fits no module"),
        ("model.lora_module_path=q_einsum|up_proj", "no module's name has q_einsum in it"),
        ("+reward.functions.mine=no_such_module.reward", "No module named 'no_such_module'"),
        ("model.weights=/no/such/folder", "model.weights=/no/such/folder: there is no such folder or .gguf file"),
        ("model.weights=nothing.gguf", "model.weights=nothing.gguf: there is no such folder or .gguf file"),
        ("model.architecture.num_layers=5", "num_layers: 4 in the checkpoint, 5 in the configuration"),
    ],
)
def test_what_the_run_would_refuse_the_plan_refuses(command, override, said):
    outcome = command("plan", *RUN, override)
    assert (outcome.code, said in outcome.err) == (2, True)


def test_a_start_that_has_no_checkpoint_is_refused_by_the_plan_too(command, write_run, tmp_path):
    write_run(tmp_path / "begun")
    outcome = command("plan", *RUN, "training.init_from=begun")
    assert (outcome.code, "begun/checkpoints holds no checkpoint yet" in outcome.err) == (2, True), outcome.err


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_tokenizer_of_more_words_than_the_model_has_is_refused(command, tmp_path, verb):
    shutil.copytree(find_checkpoint("package:tiny"), tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    words["zebras"] = len(words)
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"question": "{n} zebras", "answer": {n}}}\n' for n in range(20)))
    outcome = command(verb, *RUN, "model.weights=other", "data=jsonl", "data.path=rows.jsonl", "data.system_prompt=''")
    assert outcome.code == 2
    assert f"The tokenizer gives token {words['zebras']}, but the model knows {len(words) - 1} tokens" in outcome.err


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_weights_that_lack_a_tensor_are_refused(command, tmp_path, verb):
    shutil.copytree(find_checkpoint("package:tiny"), tmp_path / "other")
    (file,) = (tmp_path / "other").glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    outcome = command(verb, *RUN, "model.weights=other")
    assert (outcome.code, "missing: model.norm.weight" in outcome.err) == (2, True), outcome.err


def test_a_part_of_a_cards_memory_is_left_to_its_runtime(command, monkeypatch):
    monkeypatch.setattr(plan, "card", lambda: ("a card", 1.0))
    monkeypatch.setattr(memory, "estimate", lambda shapes: {"peak": 0.95})
    assert "It does NOT fit a card (1.0 GB)" in command("plan", *RUN, "hydra.run.dir=plan").out


def test_an_option_may_stand_after_overrides(command):
    outcome = command("plan", "model=gemma3_tiny", "--cfg", "job")
    assert (outcome.code, "dry_run: true" in outcome.out) == (0, True), outcome.err


def test_a_run_of_any_length_is_planned(command):
    outcome = command("plan", *RUN, "training.num_epochs=1000000000", "hydra.run.dir=plan")
    assert (outcome.code, "last (update 6000000000)" in outcome.out) == (0, True)


def test_data_that_is_there_and_cannot_be_read_is_not_called_out_of_reach(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    outcome = command("plan", *RUN, "data=jsonl", "data.path=rows.jsonl")
    assert (outcome.code, "rows.jsonl, line 1: not JSON" in outcome.err) == (2, True)


def test_the_examples_of_a_model_that_is_not_here_are_counted_as_the_run_counts_them(command, tmp_path):
    """20 rows of a file, of which 18 are for training."""
    rows = [{"question": f"{n}?", "answer": n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ["data=jsonl", "data.path=rows.jsonl", "training.micro_batch_size=2", "hydra.run.dir=plan"]
    for given, batches in (([], 9), (["data.num_examples=6"], 3), (["training.num_batches=500"], 9)):
        outcome = command("plan", *own, *given)
        assert outcome.code == 0, outcome.err
        assert re.search(rf"updates\s+│\s+{batches}\b", outcome.out)
        assert ("the data holds 9 batches, not training.num_batches=500" in outcome.out) == (given != [] and batches == 9)
    for fraction, said in (("1.0", "leaves no example"), ("0.01", "raise training.train_fraction=0.01")):
        outcome = command("plan", *own, f"training.train_fraction={fraction}", "training.num_batches=2")
        assert (outcome.code, said in outcome.err) == (2, True)
    outcome = command("plan", *own, "+experiment=warm_start")
    assert (outcome.code, "no example has a worked answer in data.path=rows.jsonl" in outcome.err) == (2, True)


def test_a_real_model_is_planned_without_its_weights_or_data(command):
    outcome = command("plan", "training.num_batches=100", "hydra.run.dir=plan")
    assert outcome.code == 0, outcome.err
    assert "275,692,160" in outcome.out, "268,098,176 weights and 7,593,984 of adapters of rank 32"
    assert "out of reach" in outcome.out
    assert "optimizer.learning_rate=3e-06 is low: 1e-05 to 3e-05 suit 270m" in outcome.out.replace("\n", " ")


def test_usual_settings_are_not_warned_of(command):
    assert "warning" not in command("plan", "+experiment=quick_test", "hydra.run.dir=plan").out
