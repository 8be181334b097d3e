"""`training.keep_best`: the checkpoint of the best evaluation stays, and is found again by `step=best`."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from test_resume import RUN, assert_same_run, records

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
