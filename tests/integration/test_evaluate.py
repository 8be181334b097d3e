"""evaluate.py on a run, on an earlier step of it and on the base model."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig

from agent_tunix.engine.checkpoint import Checkpoints
from agent_tunix.engine.update import init_state
from agent_tunix.environments import arithmetic
from agent_tunix.environments.stream import Example
from agent_tunix.lab.report.contents import contents
from agent_tunix.training import loading
from agent_tunix.training.grading import grade
from agent_tunix.training.run_folder import read_records

LONG_RUNS = True
SMALL = ["evaluation.num_examples=8"]
GREEDY = [*SMALL, "inference_config=greedy"]  # as a run evaluates itself
TRAIN = ["model=gemma3_tiny", "data.num_examples=64", "training.micro_batch_size=2", "evaluation.sampled=false"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def trained(command, kept):
    """A run in the working directory, trained for the first test that asks for it and copied for the others."""
    if not kept.exists():
        assert command("train", *TRAIN, "training.num_batches=2", *SMALL, "hydra.run.dir=run").code == 0
        shutil.copytree("run", kept)
    else:
        shutil.copytree(kept, "run")
    return "run"


def test_the_commands_at_the_close_hold_in_the_users_shell_also_where_hydra_has_left_its_folder(
    command, tmp_path, monkeypatch
):
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # what it says of this run is forgotten with the test
    (tmp_path / "run_training.py").touch()
    outcome = command("train", *TRAIN, "training.num_batches=2", *SMALL, "hydra.run.dir=run", "hydra.job.chdir=true")
    assert f"evaluate run={tmp_path / 'run'} " in outcome.out
    assert " run_training.py +experiment=control" in outcome.out


def test_a_run_before_and_after(command, trained, tmp_path):
    known = len(read_records(tmp_path / trained / "evals.jsonl"))
    assert command("evaluate", f"run={trained}", *GREEDY).code == 0
    assert command("evaluate", f"run={trained}", "step=0", *GREEDY).code == 0
    after, before = read_records(tmp_path / trained / "evals.jsonl")[known:]
    assert (after["step"], before["step"]) == (2, 0)
    assert after["split"] == before["split"] == "test"
    assert after["n"] == 8
    assert not (tmp_path / "evaluations").exists()


@pytest.mark.usefixtures("hardly_optimized")
def test_several_passes_give_majority_and_pass_at_k(command, trained, tmp_path):
    outcome = command("evaluate", f"run={trained}", "inference_config=standard", "num_passes=4", *SMALL)
    assert outcome.code == 0, outcome.err
    record = read_records(tmp_path / trained / "evals.jsonl")[-1]
    assert record["accuracy"] == pytest.approx(record["pass@1"])
    assert record["pass@1"] <= record["pass@2"] <= record["pass@4"]
    assert 0 <= record["majority_accuracy"] <= record["pass@4"]


def test_greedy_passes_would_all_be_one_so_one_is_made_and_told(command, trained, tmp_path):
    outcome = command("evaluate", f"run={trained}", "num_passes=4", *GREEDY)
    assert "num_passes=4: greedy decoding draws the same each time, so one pass is made." in outcome.out
    assert "1 pass(es)" in outcome.out
    record = read_records(tmp_path / trained / "evals.jsonl")[-1]
    assert record["num_passes"] == 1
    assert "pass@1" not in record


def test_the_base_model(command, trained, tmp_path):
    assert command("evaluate", "model=gemma3_tiny", *GREEDY, "hydra.run.dir=base").code == 0
    assert command("evaluate", f"run={trained}", "step=0", *GREEDY).code == 0
    base = read_records(tmp_path / "base" / "evals.jsonl")[-1]
    start = read_records(tmp_path / trained / "evals.jsonl")[-1]
    assert base["accuracy"] == start["accuracy"]


def test_several_evaluations_of_one_command(command, trained, tmp_path):
    outcome = command("evaluate", f"run={trained}", "step=0,2", *GREEDY, "--multirun")
    assert outcome.code == 0, outcome.err
    assert [record["step"] for record in read_records(tmp_path / trained / "evals.jsonl")[-2:]] == [0, 2]
    assert [path.name for path in tmp_path.iterdir()] == [trained]


def test_a_step_without_a_checkpoint_is_refused(command, trained, tmp_path):
    outcome = command("evaluate", f"run={trained}", "step=7", *SMALL)
    assert outcome.code == 2
    assert "the steps kept are 2" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == [trained]


def test_a_damaged_checkpoint_serves_no_command(command, trained, tmp_path):
    """One bit of the adapters has changed: they could be read, and would be others."""
    path = max((tmp_path / trained / "checkpoints" / "2" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    for verb in (
        ("evaluate", f"run={trained}", *SMALL),
        ("export", f"run={trained}"),
        ("train", f"training.resume={trained}"),
        ("train", *TRAIN, f"training.init_from={trained}", "hydra.run.dir=next"),
    ):
        outcome = command(*verb)
        assert outcome.code == 2, verb
        assert re.search(r"checkpoint of step 2 .*damaged", outcome.err), verb
        assert f"rm -r {tmp_path / trained / 'checkpoints' / '2'}" in outcome.err, verb
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_may_not_be_written_to_is_refused_before_anything_is_computed(command, trained, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: path != trained)  # modes are nothing to those who may do all
    outcome = command("evaluate", f"run={trained}", *GREEDY)
    assert outcome.code == 2
    assert f"run={trained}: the results are written there" in outcome.err
    assert "accuracy" not in outcome.out


@pytest.mark.parametrize("asked", ["training.resume=runs/mine", "dry_run=true"])
def test_what_only_training_knows_is_refused(command, asked):
    outcome = command("evaluate", "model=gemma3_tiny", asked)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{asked} has no meaning here" in outcome.err


@pytest.mark.parametrize("asked", [["model=gemma3_1b"], ["+experiment=quick_test"], ["generation.temperature=1.0"]])
def test_what_a_run_has_its_own_of_is_refused(command, asked):
    outcome = command("evaluate", "run=somewhere", *asked)
    assert outcome.code == 2
    assert f"{asked[0]}: a run is evaluated as it was trained; only run, step" in outcome.err


@pytest.mark.usefixtures("hardly_optimized")
def test_what_the_test_split_needs_can_be_asked_for(command, trained, tmp_path):
    """It is read for the first time when the run is over."""
    (tmp_path / "data").mkdir()
    row = '{"question": "Ann has 1 coins.", "answer": "1"}\n'
    (tmp_path / "data" / "train.jsonl").write_text(row)
    (tmp_path / "data" / "test.jsonl").write_text(row + '{"question": "Ann has 1 coins.", "answer": null}\n')
    config = tmp_path / trained / "config.yaml"
    saved = config.read_text().replace("source: arithmetic", "source: table").replace("path: null", "path: data")
    _checksum, _, values = saved.partition("\n")
    config.write_text(values.replace("max_prompt_length: ", "max_prompt_length: 1 # "))
    outcome = command("evaluate", f"run={trained}", *GREEDY)
    assert outcome.code == 2
    assert "test.jsonl, line 2: the field 'answer' is empty.\nMend the row, or skip such rows" in outcome.err
    outcome = command("evaluate", f"run={trained}", *GREEDY, "data.on_bad_row=skip")
    assert outcome.code == 2
    assert "all 1 prompts exceed generation.max_prompt_length=1; raise it" in outcome.err
    asked = ["data.on_bad_row=skip", "generation.max_prompt_length=64"]
    assert command("evaluate", f"run={trained}", *GREEDY, *asked).code == 0
    assert read_records(tmp_path / trained / "evals.jsonl")[-1]["n"] == 1


def write_problems(path, split):
    """As many as the run's own evaluation asks at once, so that its programs serve."""
    problems = arithmetic.generate(8, seed=42, split=split)
    rows = [{"question": problem.question, "answer": str(problem.answer)} for problem in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_another_set_is_named_in_the_record_and_counts_in_no_verdict(command, trained, tmp_path):
    """All of a file is asked, as none of it is the run's own; what the run was trained on is told."""
    run = tmp_path / trained
    before = contents(run)
    for name, split in (("other", "test"), ("seen", "train")):
        write_problems(tmp_path / f"{name}.jsonl", split)
        outcome = command("evaluate", f"run={trained}", *GREEDY, "data=jsonl", f"data.path={name}.jsonl")
        assert outcome.code == 0, outcome.err
        assert f"warning: {name}.jsonl is not the run's own set, arithmetic" in outcome.out
        assert ("of 8 questions are among those that the run was trained on" in outcome.out) is (name == "seen")
        record = read_records(run / "evals.jsonl")[-1]
        assert (record["set"], record["split"], record["step"], record["n"]) == (f"{name}.jsonl", "test", 2, 8)
        assert record.keys() >= {"accuracy", "partial_accuracy", "format_accuracy", "lenient_accuracy"}
    assert contents(run) == before
    assert b"test/other.jsonl/accuracy" in b"".join(path.read_bytes() for path in (run / "tensorboard").iterdir())


def test_the_runs_own_set_by_its_name_is_its_own(command, trained, tmp_path):
    outcome = command("evaluate", f"run={trained}", *GREEDY, "data=arithmetic")
    assert outcome.code == 0, outcome.err
    assert "warning" not in outcome.out
    assert "set" not in read_records(tmp_path / trained / "evals.jsonl")[-1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["data.path=other.jsonl"], "would not be read, as data=arithmetic is generated; data=jsonl reads"),
        (["data=jsonl", "data.path=gone.jsonl"], "data.path=gone.jsonl: there is no such file"),
        (["data=jsonl", "data.path=empty.jsonl"], "data.path=empty.jsonl has no row to test with."),
        (["data.num_examples=3"], "evaluation.num_examples counts what is evaluated"),
        (["data.system_prompt=So"], "data.system_prompt=So: a run is asked as it was trained"),
        (["data.enable_thinking=true"], "data.enable_thinking=true: a run is asked as it was trained"),
    ],
)
def test_a_set_that_cannot_be_evaluated_is_refused(command, trained, tmp_path, asked, said):
    (tmp_path / "empty.jsonl").touch()
    outcome = command("evaluate", f"run={trained}", *GREEDY, *asked)
    assert (outcome.code, said in outcome.err) == (2, True), outcome.err
    assert "This is what" not in outcome.err, "config.yaml names another"


def test_a_run_whose_weights_or_data_have_moved_says_where_to_write_the_new_place(command, write_run, tmp_path):
    for verb in ("evaluate", "export"):
        for moved in ("model__weights", "data__path"):
            write_run(folder := tmp_path / verb / moved, **{moved: "./gone"}, data__source="table")
            if (verb, moved) != ("export", "data__path"):  # which needs no data
                outcome = command(verb, f"run={folder}")
                assert outcome.code == 2
                said = f"This is what {folder / 'config.yaml'} names; if it was moved, write its new path there."
                assert "./gone: there is no such" in outcome.err
                assert said in outcome.err


def test_a_step_of_no_run_is_refused(command):
    outcome = command("evaluate", "model=gemma3_tiny", "step=7")
    assert (outcome.code, "give the folder of a run" in outcome.err) == (2, True)


@pytest.mark.parametrize("folder", ["nowhere", ""])
def test_a_folder_that_is_no_run_is_refused(command, folder, tmp_path):
    outcome = command("evaluate", f"run={folder}")
    assert outcome.code == 2
    assert f"there is no {tmp_path / folder / 'config.yaml'}" in outcome.err


@pytest.mark.usefixtures("hardly_optimized")
def test_a_schedule_free_run_is_evaluated_at_its_average(command, tmp_path):
    """x = (y - (1 - beta1) z) / beta1, where y is what is trained and z takes the steps."""
    free = ["optimizer=schedule_free_adamw", "optimizer.learning_rate=1e-5", "training.num_batches=4"]
    assert command("train", *TRAIN, *free, *SMALL, "hydra.run.dir=run").code == 0
    cfg = loading.saved_config("run", "run")
    model = loading.load_model(cfg)
    learnt, step = loading.load_trained("run", cfg, model)
    fresh = init_state(loading.new_trainable(cfg, model), "schedule_free_adamw")
    state, _ = Checkpoints(tmp_path / "run" / "checkpoints", 1).restore(fresh)
    assert step == 4
    trained, iterate = state.trainable.b["q_proj"], state.optimizer[1].z.b["q_proj"]
    assert np.abs(trained - learnt.b["q_proj"]).max() > 1e-7
    np.testing.assert_allclose(learnt.b["q_proj"], (trained - 0.1 * iterate) / 0.9, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("truth", ["12", "Paris", "(2, 3)", "9:45"])
def test_a_right_answer_is_leniently_right_too(truth):
    completion = f"<reasoning>so</reasoning><answer>{truth}</answer>"
    record = grade([Example("q", truth, (1,))], [[completion]])
    assert record["accuracy"] == record["lenient_accuracy"] == 1.0


def test_the_last_number_is_enough_to_be_leniently_right():
    record = grade([Example("q", "12", (1,))], [["so it is 12"]])
    assert (record["accuracy"], record["lenient_accuracy"]) == (0.0, 1.0)


@pytest.mark.parametrize("truth", ["9:45", "(9, 3)", r"9\pi"])
def test_a_truth_that_is_no_single_number_is_not_met_by_one(truth):
    assert grade([Example("q", truth, (1,))], [["so it is 9"]])["lenient_accuracy"] == 0.0


def test_each_measure_counts_what_it_says():
    """Right; near, and well formed; near, and not well formed; far off; no answer at all."""
    formed = "<reasoning>so</reasoning><answer>{}</answer>"
    given = [formed.format("100"), formed.format("109"), "<answer>91</answer>", formed.format("111"), ""]
    record = grade([Example("q", "100", (1,))] * 5, [[text] for text in given])
    shares = {"accuracy": 0.2, "partial_accuracy": 0.6, "format_accuracy": 0.6, "lenient_accuracy": 0.2}
    assert record == {"n": 5, **shares}


def test_the_answer_given_most_often_is_the_majoritys():
    formed = "<reasoning>so</reasoning><answer>{}</answer>"
    answers = [["7", "8", "7", "9"], ["8", "8", "7", "8"], ["8", "7", "9", "1"]]
    record = grade([Example("q", "7", (1,))] * 3, [[formed.format(answer) for answer in one] for one in answers])
    assert record["majority_accuracy"] == pytest.approx(1 / 3), "of equals the earliest counts"
    assert record["pass@1"] == record["accuracy"] == pytest.approx(4 / 12)
    assert record["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)
    assert record["pass@4"] == 1


def test_a_scorer_of_the_data_says_what_is_solved(command, tmp_path):
    half = "def half(prompt, completion, answer, row):\n    return 1 if int(row['answer']) % 2 else 0.5\n"
    (tmp_path / "mine.py").write_text(half)
    outcome = command("evaluate", "model=gemma3_tiny", *SMALL, "data.scorer=mine.half", "hydra.run.dir=odd")
    assert outcome.code == 0, outcome.err
    (record,) = read_records(tmp_path / "odd" / "evals.jsonl")
    assert 0 < record["accuracy"] < 1
    assert record["partial_accuracy"] == (1 + record["accuracy"]) / 2
    assert command("train", *TRAIN, *SMALL, "training.num_batches=1", "data.scorer=mine.half", "hydra.run.dir=run").code == 0
    assert read_records(tmp_path / "run" / "evals.jsonl")[-1]["partial_accuracy"] > 0.5
    refused = command("evaluate", "model=gemma3_tiny", *SMALL, "data.scorer=mine.none")
    assert (refused.code, "data.scorer=mine.none" in refused.err) == (2, True)


def test_what_does_not_keep_to_the_format_has_no_vote():
    """A majority of eight is never more than one of the eight."""
    given = ["44+35 <answer>79</answer>"] * 7 + ["<reasoning>so</reasoning><answer>78</answer>"]
    record = grade([Example("q", "79", (1,))], [given])
    assert record["majority_accuracy"] == record["pass@8"] == 0
    record = grade([Example("q", "79", (1,))], [[text.replace("78", "79") for text in given]])
    assert record["majority_accuracy"] == 1


def test_an_answer_written_in_several_ways_is_one_answer():
    given = ("7", "7", "18", "$18.00", "18 apples")
    record = grade([Example("q", "18", (1,))], [[f"<reasoning>so</reasoning><answer>{one}</answer>" for one in given]])
    assert record["majority_accuracy"] == 1
