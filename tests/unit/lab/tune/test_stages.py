"""The stages are those of the optimizer reference, around what suits the model."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.errors import UserError
from agent_tunix.lab.tune.config import TuneConfig
from agent_tunix.lab.tune.stages import (
    DECAY,
    LR_MIN,
    RATE,
    WARMUP,
    brackets,
    candidate,
    fine_rate,
    possible,
    shortened,
    stages,
    start,
    training_config,
)
from agent_tunix.training.horizon import make_plan


def configured(*overrides: str) -> TuneConfig:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("tune", list(overrides)), TuneConfig)


def test_on_the_tiny_model_they_are_the_references_own():
    cfg = configured("+experiment=quick_test")
    found = {stage.name: stage for stage in stages(cfg, start(cfg), 400)}
    assert list(found) == ["1-coarse-rate", "2-fine-rate", "3-warm-up", "4-weight-decay"]
    assert found["1-coarse-rate"].values == (1e-7, 1e-6, 1e-5, 1e-4)
    assert found["2-fine-rate"].values == (3e-6, 1e-5, 3e-5)
    assert found["3-warm-up"].values == (0.05, 0.1, 0.2)
    assert found["4-weight-decay"].values == (0.0, 0.01, 0.05)
    assert all(stage.incumbent in stage.values for stage in found.values())


@pytest.mark.parametrize(("model", "middle"), [("270m", 1e-5), ("1b", 3e-6), ("4b", 1e-6)])
def test_the_coarse_grid_centres_on_the_models_guidance(model, middle):
    cfg = configured(f"model=gemma3_{model}")
    low, high = cfg.model.guidance.learning_rate
    assert start(cfg)[RATE] == middle
    assert low <= middle <= high
    assert fine_rate({RATE: 3e-6}).values == (1e-6, 3e-6, 1e-5)


def test_a_short_run_is_also_tried_without_warm_up_and_no_warm_up_twice():
    cfg = configured("+experiment=quick_test")
    assert stages(cfg, start(cfg), 40)[2].values == (0.0, 0.05, 0.1, 0.2)
    assert stages(cfg, start(cfg), 8)[2].values == (0.0, 0.1, 0.2), "0.05 and 0.1 of 8 are both one update"
    own = configured("+experiment=quick_test", "optimizer.warmup_ratio=0.12")
    assert stages(own, start(own), 8)[2].values == (0.0, 0.12, 0.2), "and of those the run's own is tried"


def test_the_runs_own_values_are_among_the_candidates():
    cfg = configured("optimizer.warmup_ratio=0.15", "optimizer.weight_decay=0.02")
    _, _, warm_up, decay = stages(cfg, start(cfg), 400)
    assert (warm_up.incumbent, decay.incumbent) == (0.15, 0.02)
    assert warm_up.values == (0.05, 0.1, 0.15, 0.2)
    assert decay.values == (0.0, 0.01, 0.02, 0.05)


def test_warm_up_that_is_given_in_updates_is_not_tuned():
    cfg = configured("scheduler.warmup_steps=5")
    assert [stage.key for stage in stages(cfg, start(cfg), 400)] == [RATE, RATE, DECAY]
    assert len(brackets(cfg, 400)) == 3


def test_only_the_first_stage_trains_its_incumbent():
    cfg = configured("+experiment=quick_test")
    assert [(b.candidates, b.trained) for b in brackets(cfg, 40)] == [(4, 0), (3, 1), (4, 1), (3, 1)]


def test_a_candidate_differs_from_the_run_in_its_settings_alone():
    cfg = configured("+experiment=quick_test")
    base = training_config(cfg)
    found = candidate(base, {RATE: 3e-6, WARMUP: 0.2, DECAY: 0.05})
    assert (found.optimizer.learning_rate, found.optimizer.warmup_ratio, found.optimizer.weight_decay) == (3e-6, 0.2, 0.05)
    again = candidate(found, start(cfg))
    assert again == base
    assert candidate(base, {**start(cfg), "seed": 7}).seed == 7


def test_a_rate_below_lr_min_takes_it_down_with_it():
    base = training_config(configured("+experiment=quick_test"))
    assert candidate(base, {RATE: 1e-8}).scheduler.lr_min == 1e-9
    assert candidate(base, {RATE: 1e-6}).scheduler.lr_min == base.scheduler.lr_min
    assert LR_MIN == "scheduler.lr_min"


def test_the_users_lr_min_is_that_of_all_candidates_that_can_have_it():
    """Also where the middle of the guidance lies below it: what is told of a search must be what was trained."""
    base = training_config(configured("+experiment=quick_test", "optimizer.learning_rate=3e-5", "scheduler.lr_min=2e-5"))
    assert candidate(base, {RATE: 3e-5}).scheduler.lr_min == 2e-5
    assert possible(base, {RATE: 1e-5}) == {RATE: 1e-5, LR_MIN: 1e-6}


def test_a_shortened_run_is_the_whole_one_in_small():
    cfg = configured(
        "+experiment=quick_test", "training.num_epochs=2", "scheduler.warmup_steps=8", "scheduler.total_steps=80"
    )
    whole = training_config(cfg)
    plan = make_plan(whole, 4096)
    for batches in (10, 40, 80):
        short = make_plan(shortened(whole, plan, batches), 4096)
        assert (short.batches_per_epoch, short.total_batches) == (min(batches, 40), batches)
        assert short.warmup_steps == batches // 10
        peak, last = (max(p.schedule(t) for t in range(1, p.total_steps + 1)) for p in (plan, short))
        assert peak == last
        assert short.schedule(short.total_steps) == plan.schedule(plan.total_steps)


def test_a_warm_up_given_in_updates_is_not_lost_in_a_shortened_run():
    whole = training_config(configured("+experiment=quick_test", "scheduler.warmup_steps=2"))
    assert shortened(whole, make_plan(whole, 4096), 10).scheduler.warmup_steps == 1


@pytest.mark.parametrize("budget", ["soon", "30", "m", "-5m", "0m", "0", "-3", "1.5", "true", "10 minutes"])
def test_a_budget_must_be_a_time_or_a_count(budget):
    with pytest.raises(UserError, match=r"tune\.budget=.*must be a time such as 30m or 2h, or a number of updates"):
        configured(f"tune.budget='{budget}'" if budget == "30" else f"tune.budget={budget}")


@pytest.mark.parametrize(
    ("budget", "seconds"), [("90s", 90.0), ("30m", 1800.0), ("1.5h", 5400.0), ("400", None), ("4e2", None)]
)
def test_a_budget_in_time_is_known_in_seconds(budget, seconds):
    assert configured(f"tune.budget={budget}").tune.seconds == seconds


def test_a_candidate_is_not_saved_by_a_tenth_of_its_rate():
    """A rate of 1e-4 that goes on at 1e-5 would be praised for what another one does."""
    for given, kept in (("rollback", "stop"), ("ignore", "ignore")):
        cfg = configured("+experiment=quick_test", f"training.on_divergence={given}")
        assert training_config(cfg).training.on_divergence == kept
