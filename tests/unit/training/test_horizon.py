"""How many updates a run makes, at which rates, and when it is evaluated and saved."""

from __future__ import annotations

import json

import pytest

from agent_tunix.config.load import validate
from agent_tunix.config.schema import Config
from agent_tunix.errors import UserError
from agent_tunix.lab.plan import plan
from agent_tunix.training import loop
from agent_tunix.training.horizon import Plan, make_plan


@pytest.fixture
def planned(config):
    """The demo's plan, 16 prompts a batch, with some `section__key` set."""

    def plan(examples: int = 4096, **values) -> Plan:
        tree = json.loads(json.dumps(config))
        for name, value in values.items():
            section, key = name.split("__")
            tree[section][key] = value
        return make_plan(validate(tree, Config), examples)

    return plan


def test_updates_are_batches_times_iterations_and_a_worked_answer_is_learnt_once(planned):
    several = {"training__num_epochs": 2, "grpo__num_iterations": 3}
    assert (planned(**several).total_batches, planned(**several).total_steps) == (80, 240)
    assert planned(**several, training__method="supervised").total_steps == 80


def test_an_epoch_has_no_more_batches_than_the_data(planned):
    assert [planned(examples).batches_per_epoch for examples in (16, 31, 32, 4096)] == [1, 1, 2, 40]
    assert planned(4096, training__num_batches=None).batches_per_epoch == 256


def test_steps_that_are_given_win_over_ratio_and_length(planned):
    plan = planned(scheduler__total_steps=20)
    assert (plan.warmup_steps, plan.total_steps) == (2, 40)
    assert plan.schedule(20) == plan.schedule(40) == 1e-7
    plan = planned(scheduler__warmup_steps=8)
    assert (plan.schedule(4), plan.schedule(8)) == (pytest.approx(5e-6), 1e-5)


@pytest.mark.parametrize(
    ("interval", "iterations", "steps"), [(5, 1, [5, 10]), (4, 2, [4, 8]), (5, 2, [6, 10]), (1, 3, [3, 6, 9]), (None, 1, [])]
)
def test_an_interval_is_due_at_the_end_of_the_batch_that_reaches_or_passes_it(interval, iterations, steps):
    ends = range(iterations, 11, iterations)
    assert [step for step in ends if loop._due(interval, step, iterations)] == steps


def test_a_warm_up_longer_than_what_it_is_for_is_refused_and_that_is_named(planned):
    with pytest.raises(UserError, match=r"Warm-up of 41 updates is longer than the run of 40"):
        planned(scheduler__warmup_steps=41)
    with pytest.raises(UserError, match=r"Warm-up of 10 updates is longer than scheduler\.total_steps=3"):
        planned(scheduler__warmup_steps=10, scheduler__total_steps=3)


def test_a_warm_up_that_leaves_no_room_for_the_decay_is_refused(planned):
    decay = {"scheduler__scheduler_name": "wsd", "scheduler__decay_ratio": 0.5}
    assert planned(**decay, scheduler__warmup_steps=20).schedule(20) == 1e-5
    with pytest.raises(UserError, match=r"warmup_steps=21 and scheduler\.decay_ratio=0\.5 are more than all 40 updates"):
        planned(**decay, scheduler__warmup_steps=21)


def test_a_plan_names_updates_that_there_are(planned):
    for ratio, end in ((0.1, 4), (0.0, 1)):
        named = ["first (update 1)", f"end of warm-up (update {end})", "middle (update 20)", "last (update 40)"]
        assert list(plan._landmarks(planned(optimizer__warmup_ratio=ratio))) == named


def test_more_cycles_than_updates_are_refused(planned):
    cycles = {"scheduler__scheduler_name": "cosine_restarts", "scheduler__num_cycles": 37}
    with pytest.raises(UserError, match=r"scheduler\.num_cycles=37: after warm-up there are only 36 updates"):
        planned(**cycles)
    assert planned(**cycles | {"scheduler__num_cycles": 36}).schedule(40) == 1e-7
