"""`training.keep_best` and `training.early_stopping`: what becomes of a run by its best evaluation.

The checkpoint of the best stays and is found again by `step=best`; without a new best a run stops.
"""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from same_runs import RUN, assert_same_run, records

from agent_tunix.config.load import read_saved
from agent_tunix.training import loop as train_workflow
from agent_tunix.training.run_folder import RunFolder

LONG_RUNS = True
OPTIONS = [*RUN, "training.eval_every_n_steps=2", "training.max_checkpoints_to_keep=1"]
OPTIONS += ["training.keep_best=lenient_accuracy"]
BY_STEP = {0: 0.1, 2: 0.3, 4: 0.6, 6: 0.6, 8: 0.2, 10: 0.5, 12: 0.4}  # 4 is the best, and the earliest among equals
GREEDY = ["evaluation.num_examples=8", "inference_config=greedy"]


def saved(run) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.fixture
def evaluated(monkeypatch):
    """Evaluations say what they are told to, so that it is known which of them is the best."""

    def as_told(folder, record) -> None:
        write(folder, record | {"lenient_accuracy": BY_STEP[record["step"]]} if record["split"] == "validation" else record)

    write = RunFolder.evaluation
    monkeypatch.setattr(RunFolder, "evaluation", as_told)


@pytest.fixture
def killed(command, monkeypatch):
    """A command that ends as a step is written down, without another checkpoint, as a kill does."""

    def at(step: int, *arguments: str) -> None:
        def deadly(folder, record) -> None:
            write(folder, record)
            if record["step"] == step:
                raise RuntimeError("killed")

        write = RunFolder.metrics
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            patch.setattr(RunFolder, "metrics", deadly)
            assert command("train", *arguments).code != 0

    return at


@pytest.mark.usefixtures("evaluated")
def test_the_best_is_kept_through_kills_and_serves_every_verb(command, killed, tmp_path):
    outcome = command("train", *OPTIONS, "hydra.run.dir=straight")
    assert outcome.code == 0, outcome.err
    straight = tmp_path / "straight"
    assert saved(straight) == [4, 12]
    assert json.loads((straight / "summary.json").read_text())["best_eval"]["step"] == 4
    assert "Best step:  4, held-out lenient accuracy 60.0%" in outcome.out
    killed(3, *OPTIONS, "hydra.run.dir=run")  # after the best so far was saved, at a step that no interval has made due
    assert saved(tmp_path / "run") == [2]
    for step in (7, 11):
        killed(step, "training.resume=run")
    assert saved(tmp_path / "run") == [4, 8]
    assert command("train", "training.resume=run").code == 0
    assert_same_run(tmp_path / "run", straight)
    assert saved(tmp_path / "run") == saved(straight)

    assert command("evaluate", "run=run", "step=best", *GREEDY).code == 0
    assert records(tmp_path / "run", "evals.jsonl")[-1]["step"] == 4
    assert command("export", "run=run", "step=best").code == 0
    assert (tmp_path / "run" / "exports" / "peft-4").is_dir()
    following = [*RUN, "training.init_from=run", "training.init_step=best", "training.num_batches=1", "hydra.run.dir=next"]
    assert command("train", *following).code == 0
    assert read_saved(tmp_path / "next" / "config.yaml")["training"]["init_step"] == 4
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "12")
    outcome = command("evaluate", "run=run", "step=best", *GREEDY)
    assert outcome.code == 2
    assert "step=best: no checkpoint of run is of a step" in outcome.err


@pytest.mark.usefixtures("evaluated")
def test_a_rollback_goes_to_the_best_where_that_was_saved_last(command, tmp_path, monkeypatch):
    """Records of later steps are dropped with it, so that none of them counts as the best."""

    def once(stats, max_kl):
        seen.append(stats)
        return "made up" if len(seen) == 9 else None  # in the first update of the fifth batch

    seen: list = []
    monkeypatch.setattr(train_workflow, "fault_of", once)
    rollback = ["training.on_divergence=rollback", "training.save_interval_steps=100", "hydra.run.dir=run"]
    outcome = command("train", *OPTIONS, *rollback)
    assert outcome.code == 0, outcome.err
    assert "made up; back to step 4, without that batch" in outcome.out
    assert [record["step"] for record in records(tmp_path / "run", "evals.jsonl")] == [0, 2, 4, 6, 8, 10, 12]
    assert saved(tmp_path / "run") == [4, 12]


@pytest.mark.usefixtures("evaluated")
def test_a_run_stops_where_it_is_not_getting_better_and_goes_on_if_it_is_told_to(command, killed, tmp_path):
    outcome = command("train", *OPTIONS, "training.early_stopping=3", "hydra.run.dir=straight")
    assert outcome.code == 0, outcome.err
    told = "Stopped early at step 10 of 12: 3 evaluations in a row have not had a better lenient accuracy than step 4."
    assert told in outcome.out
    straight, run = tmp_path / "straight", tmp_path / "run"
    summary = json.loads((straight / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["final_eval"]["step"]) == ("completed", 10, 10)
    assert summary["stopped_early"] == {"step": 10, "best_step": 4, "metric": "lenient_accuracy"}
    assert saved(straight) == [4, 10]
    assert (
        "It stopped early, as lenient accuracy had not been better since update 4." in (straight / "report.html").read_text()
    )
    killed(9, *OPTIONS, "training.early_stopping=3", "hydra.run.dir=run")
    assert command("train", "training.resume=run").code == 0
    assert_same_run(run, straight, step=10)
    assert saved(run) == [4, 10]

    outcome = command("train", "training.resume=run")
    assert (outcome.code, told in outcome.out) == (0, True), outcome.err
    assert_same_run(run, straight, step=10)
    before = (run / "config.yaml").read_text()
    for change in ("optimizer.learning_rate=1e-6", "training.early_stopping=2"):
        outcome = command("train", "training.resume=run", change)
        assert outcome.code == 2
        assert "run has stopped early, at step 10, so other values would change nothing" in outcome.err
    assert (run / "config.yaml").read_text() == before
    assert command("train", "training.resume=run", "training.early_stopping=4").code == 0
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["stopped_early"]) == ("completed", 12, None)
