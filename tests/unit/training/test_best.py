from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_tunix.config.load import config_text
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError
from agent_tunix.training.best import best_kept, best_of, step_of, stopped_early


@pytest.fixture
def run(config, tmp_path):
    """A run with four evaluations, of which the two best are equal, and the checkpoints of some of their steps."""

    def made(saved, metric="lenient_accuracy") -> tuple[str, Config]:
        numbers = {0: 0.9, 4: 0.2, 8: 0.5, 12: 0.5, 16: 0.3}
        other = {"split": "test", "step": 4, "accuracy": 1.0, "lenient_accuracy": 1.0}
        own = [{"step": s, "split": "validation", "accuracy": 1 - n, "lenient_accuracy": n} for s, n in numbers.items()]
        (tmp_path / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [other, *own]))
        for step in saved:
            (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        cfg = Config.model_validate(config | {"training": config["training"] | {"keep_best": metric}})
        (tmp_path / "config.yaml").write_text(config_text(cfg))
        return str(tmp_path), cfg

    return made


def test_the_best_is_the_earliest_among_equals_and_what_was_not_measured_is_passed_over():
    evals = [{"step": step, "accuracy": share} for step, share in ((0, 0.1), (4, None), (8, 0.7), (12, 0.7))]
    assert best_of(evals, "accuracy") == evals[2]
    assert best_of(evals, "sampled_accuracy") is None


@pytest.mark.parametrize(("saved", "found"), [((4, 8, 12, 16), 8), ((4, 12), 12), ((0, 4, 16), 16), ((7, 4), 4)])
def test_the_best_step_is_one_that_has_a_checkpoint_and_was_evaluated(run, saved, found):
    """By the run's own number, and among those that training has made."""
    assert step_of(*run(saved), "best", "step=best") == found


def test_without_a_number_of_its_own_a_run_is_judged_by_accuracy(run):
    assert step_of(*run((4, 8, 16), metric=None), "best", "step=best") == 4


def test_steps_by_number_are_left_as_they_are(run):
    assert [step_of(*run(()), step, "step") for step in (None, 0, 7)] == [None, 0, 7]


@pytest.mark.parametrize(("saved", "said"), [((0, 3, 7), "the steps kept are 0, 3, 7"), ((), "none is kept")])
def test_where_no_checkpoint_was_evaluated_there_is_no_best(run, saved, said):
    with pytest.raises(UserError, match=f"training.init_step=best: .* evaluated by lenient_accuracy; {said}"):
        step_of(*run(saved), "best", "training.init_step=best")


def test_the_close_of_a_run_names_its_best_step_and_whether_it_was_better_before(run):
    folder, cfg = run((8, 16))
    said = best_kept(cfg, Path(folder))
    assert said == "Best step:  8, held-out lenient accuracy 50.0%; before training it was 90.0%; step=best stands for it"


@pytest.mark.parametrize(
    ("metric", "patience", "step", "stops"),
    [
        ("lenient_accuracy", 4, 16, True),  # it was best before training, and four evaluations were not better
        ("lenient_accuracy", 5, 16, False),
        ("lenient_accuracy", 1, 18, False),  # a step that was not evaluated
        ("accuracy", 3, 16, True),  # best at step 4, and none of the three since was better
        ("accuracy", 4, 16, False),
        ("accuracy", None, 16, False),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_a_new_best(run, metric, patience, step, stops):
    folder, cfg = run((), metric)
    cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"early_stopping": patience})})
    best = {"lenient_accuracy": 0, "accuracy": 4}[metric]
    expected = {"step": 16, "best_step": best, "metric": metric} if stops else None
    assert stopped_early(cfg, Path(folder), step) == expected
