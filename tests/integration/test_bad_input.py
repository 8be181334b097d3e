"""A user's mistake ends in one clear message and exit code 2, without a traceback and with nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys

import pytest

from agent_tunix.lab.lr_find import lr_find
from agent_tunix.models.checkpoints.hub import find_checkpoint
from agent_tunix.training.guard import Interruption

LONG_RUNS = True
TINY = ["model=gemma3_tiny", "training.num_batches=2", "training.micro_batch_size=2", "evaluation.num_examples=8"]
TINY += ["evaluation.sampled=false"]

FAULTS = {
    "optimizer.lerning_rate=1e-5": "did you mean optimizer.learning_rate?",
    "optimizer.lr=1e-5": "did you mean optimizer.learning_rate?",
    "optimzer=adamw": "did you mean optimizer?",
    "optimizer=adamx": "did you mean adamw?",
    "optimizer=null": "a group takes the name of one of its files",
    "sead=3": "did you mean seed?",
    "optimizer.learning_rate=fast": "optimizer.learning_rate=fast: must be a valid number",
    "optimizer.learning_rate=-1": "optimizer.learning_rate=-1: must be greater than 0",
    "optimizer.betas=[0.9,1.5]": "1.5: must be less than or equal to 0.999999",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9]: must have at least 2 items, not 1",
    "optimizer.weight_decay=nan": "optimizer.weight_decay=nan: must be a finite number",
    "training.num_batches=2.5": "training.num_batches=2.5: must be a valid integer",
    "training.micro_batch_size=0": "must be greater than or equal to 1",
    "training.batch_size=7": "multiple of micro_batch_size=2",
    "grpo.num_generations=1": "compares the completions of one prompt",
    "scheduler.warmup_steps=100": "longer than the run of 2",
    "scheduler.lr_min=1e-3": "is above optimizer.learning_rate",
    "model.lora_module_path=nothing": "fits no module",
    "model.lora_module_path=.*q_einsum|.*gate_proj": "To adapt gate_proj and no other, give 'model.lora",
    "model.lora_module_path=layers.0.*q_proj": "in 1 of 4 layers",
    "model.weights=/nowhere": "no such folder",
    'model.weights="~nobody_of_this_name/x"': "no such folder",
    "model.architecture.num_layers=5": "num_layers: 4 in the checkpoint, 5 in the configuration",
    "model.architecture.query_pre_attn_scalar=50": "query_pre_attn_scalar: 32.0 in the checkpoint, 50 in",
    "model.mesh_shape=[[2,2],[fsdp,tp]]": "needs 4 devices; this machine has 1.\nShapes that fit: [[1,1],[fsdp,tp]]\n",
    'model.mesh_shape=[[1,3],["fsdp","tp"]]': "tp=3 does not divide num_heads=4",
    "training.resume=nowhere": "not the folder of a run",
    "training.num_batches=": "must be a valid integer",
    "data=gsm8k": "data.path",
    "data.path=rows.jsonl": "data.path=rows.jsonl: would not be read, as data=arithmetic is generated; data=jsonl reads",
    "+reward.functions.mine=no_such_module.reward": "No module named 'no_such_module'",
    "+reward.functions.mine=json.no_such_function": "no_such_function",
    "+reward.functions.mean=json.dumps": "choose another name",
    "training.init_step=3": "a step of which run?",
    "data.num_examples=10000000": "the train split has",
    "data.num_examples=1": "fewer than one batch",
    "generation.max_prompt_length=5": "The train split of data.source=arithmetic has no example: all 3686 prompts exceed",
    "training.train_fraction=1e-9": "The train split of data.source=arithmetic has no example: give more data",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault(fault, command, tmp_path):
    outcome = command("train", *TINY, fault)
    assert outcome.code == 2
    assert FAULTS[fault] in outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert not any(tmp_path.iterdir())


def test_all_faults_are_reported_together(command):
    outcome = command("train", *TINY, "optimizer.lr=1", "grpo.num_generations=1", "optimizer.eps=0")
    assert outcome.code == 2
    for key in ("optimizer.lr", "grpo.num_generations", "optimizer.eps"):
        assert key in outcome.err


def test_a_malformed_row_is_named_by_its_line(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "Ann has 1 coins.", "answer": "1"}\n{"question": "Ann has"}\n')
    outcome = command("train", *TINY, "data=jsonl", "data.path=rows.jsonl")
    assert outcome.code == 2
    assert "rows.jsonl, line 2: no field 'answer', which data.answer_field names; the row has question" in outcome.err
    outcome = command("train", *TINY, "data=jsonl", "data.path=rows.jsonl", "data.question_field=q", "data.on_bad_row=skip")
    assert outcome.code == 2
    assert "rows.jsonl: all 2 rows are malformed; rows.jsonl, line 1: no field 'q', which data.question_field" in outcome.err


def test_words_the_tiny_model_does_not_know_are_refused(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "Natalia sold clips.", "answer": "1"}) + "\n")
    outcome = command("train", *TINY, "data=jsonl", "data.path=rows.jsonl", "training.train_fraction=1.0")
    assert outcome.code == 2
    assert "does not know all words" in outcome.err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"optimizer_name: adamw\n\tlearning_rate: 5e-6\n", 'mine.yaml", line 2, column 1'),
        (b"eps: 1e-8\neps: 1e-6\n", "found duplicate key eps"),
        (b"defaults: adamw\n", "Invalid defaults list in 'optimizer/mine'"),
        (b"# caf\xe9\neps: 1e-8\n", "mine.yaml cannot be read: 'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_a_file_of_the_users_own_that_is_no_yaml_is_named(content, said, command, tmp_path):
    own = tmp_path / "conf" / "optimizer"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_bytes(content)
    for asked in (["optimizer=mine"], ["--multirun", "optimizer=adamw,mine"]):
        outcome = command("train", *TINY, *asked)
        assert outcome.code == 2
        assert said in outcome.err
        assert os.listdir(tmp_path) == ["conf"]


def test_an_experiment_without_its_first_line_is_told_of_it(command, tmp_path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text("training:\n  num_batches: 3\n")
    outcome = command("train", *TINY, "+experiment=mine")
    assert outcome.code == 2
    assert "experiment: unknown key; a file of conf/experiment begins with the line '# @package _global_'" in outcome.err


def test_words_of_the_system_prompt_that_the_model_does_not_know_are_laid_to_it(command):
    outcome = command("train", *TINY, "data.system_prompt=Natalia")
    assert outcome.code == 2
    assert "does not know all words of data.system_prompt='Natalia'" in outcome.err


def test_malformed_rows_that_both_splits_are_cut_from_are_told_once(command, tmp_path):
    rows = [{"question": "Ann has 1 coins.", "answer": "1"}] * 9 + [{"question": "Ann has"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = command("plan", *TINY, "data=jsonl", "data.path=rows.jsonl", "data.on_bad_row=skip", "data.system_prompt=''")
    assert outcome.out.count("1 malformed rows of rows.jsonl are left out") == 1


@pytest.mark.parametrize(
    ("word", "asked"),
    [("How", ("evaluate",)), ("How", ("train",)), ("<reasoning>", ("train", "training.method=supervised"))],
)
def test_a_tokenizer_that_is_not_the_models_own_is_refused(command, tmp_path, word, asked):
    """Tokens beyond the embedding would be read as its last row, and learnt as no number."""
    shutil.copytree(find_checkpoint("package:tiny"), tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(re.sub(rf'("{word}": )\d+', r"\g<1>4700", tokenizer.read_text()))
    outcome = command(*asked, "model=gemma3_tiny", "model.weights=model", "evaluation.num_examples=4")
    assert outcome.code == 2
    assert "The tokenizer gives token 4700, but the model knows 47 tokens" in outcome.err
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("body", "code", "status"), [("return float('nan')", 3, "diverged"), ("raise KeyError('oops')", 2, "failed")]
)
def test_a_faulty_reward_function_stops_the_run_with_its_name_and_the_completion(
    body, code, status, command, tmp_path, monkeypatch
):
    monkeypatch.delitem(sys.modules, "broken_reward", raising=False)
    (tmp_path / "broken_reward.py").write_text(f"def mine(prompt, completion, answer):\n    {body}\n")
    outcome = command("train", *TINY, "+reward.functions.mine=broken_reward.mine", "hydra.run.dir=out")
    assert outcome.code == code
    assert "reward function 'mine'" in outcome.err
    assert "on the completion" in outcome.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["status"] == status
    assert "reward function 'mine'" in summary["fault"]
    assert "reward function 'mine'" in command("doctor", "out").out


def test_a_reward_function_that_hangs_ends_the_run_which_keeps_its_last_checkpoint(command, tmp_path):
    """The first batch of two prompts is scored and saved; the second is not."""
    (tmp_path / "hanging_reward.py").write_text(
        "import re\n"
        "seen = set()\n"
        "def mine(prompt, completion, answer):\n"
        "    seen.add(prompt)\n"
        "    return float(len(seen) > 2 and bool(re.match('(a+)+$', 'a' * 99 + 'b')))\n"
    )
    hanging = "+reward.functions.mine=hanging_reward.mine", "reward.timeout=2", "training.save_interval_steps=1"
    outcome = command("train", *TINY, *hanging, "hydra.run.dir=out")
    assert outcome.code == 2
    assert "The reward function 'mine' took longer than reward.timeout=2 s (hanging_reward.py, line 5)" in outcome.err
    assert "on the completion" in outcome.err
    assert "Traceback" not in outcome.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", 1)
    assert "took longer than" in summary["fault"]
    assert (tmp_path / "out" / "checkpoints" / "1").is_dir()


def test_a_sweep_that_an_error_has_ended_has_a_page_and_says_how_it_goes_on(command, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "broken_reward", raising=False)
    (tmp_path / "broken_reward.py").write_text("def mine(prompt, completion, answer):\n    raise KeyError('oops')\n")
    swept = "--multirun", "optimizer.learning_rate=1e-6,1e-5", "hydra.sweep.dir=out"
    outcome = command("train", *TINY, *swept, "+reward.functions.mine=broken_reward.mine")
    assert outcome.code == 2
    assert "the same command with hydra.sweep.dir=out goes on from here" in outcome.out.replace("\n", " ")
    assert "<title>out: Ended in an error</title>" in (tmp_path / "out" / "report.html").read_text()


def test_a_folder_that_holds_a_run_is_not_overwritten(command, write_run, tmp_path):
    write_run(tmp_path / "out")
    outcome = command("train", *TINY, "hydra.run.dir=out")
    assert outcome.code == 2
    assert "training.resume=" in outcome.err


@pytest.mark.parametrize("where", [["hydra.run.dir=file/run"], ["--multirun", "seed=1,2", "hydra.sweep.dir=file/sweep"]])
def test_a_folder_that_cannot_be_written_to_is_named(where, command, tmp_path):
    (tmp_path / "file").touch()
    outcome = command("train", *TINY, *where)
    assert outcome.code == 2
    assert "Not a directory. Check the path and its permissions" in outcome.err
    assert "Traceback" not in outcome.out + outcome.err


def test_the_default_model_without_weights_names_the_ways_to_get_them(command, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = command("train")
    assert outcome.code == 2
    for way in ("google/gemma-3-270m-it", "model.weights=<folder>", "+experiment=quick_test"):
        assert way in outcome.err


def test_an_unknown_verb_is_answered_with_the_verbs(command):
    outcome = command("trian")
    assert outcome.code == 2
    assert "did you mean train?" in outcome.err


@pytest.mark.parametrize("swept", ["seed=range(5,5)", "model=glob(zzz*)"])
def test_a_sweep_over_nothing_is_refused(command, tmp_path, swept):
    outcome = command("train", "--multirun", "+experiment=quick_test", swept)
    assert (outcome.code, "There is no job to run" in outcome.err) == (2, True), outcome.err
    assert not list(tmp_path.glob("multirun/*/*/"))


def test_a_sweep_without_a_section_is_told_of_it(command):
    outcome = command("train", "--multirun", *TINY, "~training", "seed=1,2")
    assert outcome.code == 2
    assert "training.method: missing" in outcome.err
    assert "struct" not in outcome.err


@pytest.mark.parametrize("verb", ["train", "lr-find"])
def test_a_sweep_of_any_verb_is_not_put_into_a_run(command, write_run, tmp_path, verb):
    """It would leave a sweep's index there, by which the run is taken for a sweep."""
    write_run(tmp_path / "out")
    there = sorted((tmp_path / "out").rglob("*"))
    outcome = command(verb, "--multirun", *TINY, "seed=1,2", "hydra.sweep.dir=out")
    assert (outcome.code, outcome.err) == (2, "out holds a run; choose another folder.\n")
    assert sorted((tmp_path / "out").rglob("*")) == there


@pytest.mark.parametrize("options", [["--multirun", "seed=1,2", "--cfg", "job"], ["--run", "--multirun", "seed=1,2"]])
def test_options_that_exclude_each_other_are_told_of(command, options):
    outcome = command("train", *TINY, *options)
    assert outcome.code == 2
    assert outcome.err.startswith("Only one of --run, --multirun, --cfg")


def test_an_interruption_is_for_all_jobs_of_a_sweep(command, monkeypatch):
    begun = []

    def interrupted(cfg, *_) -> None:
        begun.append(cfg.seed)
        Interruption.requests += 1

    monkeypatch.setattr(lr_find, "run", interrupted)
    monkeypatch.setattr(Interruption, "requests", 5, raising=True)  # those of earlier commands do not count
    assert command("lr-find", "--multirun", *TINY, "seed=1,2,3").code == 0
    assert begun == [1]
