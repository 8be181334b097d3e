"""What is just short of an illness is none, and what is just beyond it is one; which remedy is chosen among several."""

from __future__ import annotations

import dataclasses
import json

import pytest
from made_up_runs import FLAT_REWARD, changed, run_of

from agent_tunix.lab.doctor import grpo, optimizer, remedies
from agent_tunix.lab.doctor.examination import diagnose, early_warnings
from agent_tunix.lab.doctor.records import RunRecords
from agent_tunix.lab.doctor.signs import fall_below_start, learnt

STEPS = 24


def peak_at(step: int) -> dict:
    return {"lr": lambda now: 1e-5 * min(now, step) / step}


def rising(key: str, by: float) -> dict:
    return {key: lambda step: 0.5 + by * step / STEPS + 0.002 * (-1) ** step}


FLAT = {"accuracies": (0.04, 0.043), "groups__zero_variance": 0.75}  # as real runs were
COLD = {"entropy": lambda step: 0.5 * 0.7**step}
NEAR = [  # the illness, what is just short of it and what is just beyond
    (optimizer.long_warmup, peak_at(15), peak_at(18)),
    (optimizer.collapsed, rising("reward__mean", -0.15), rising("reward__mean", -0.25)),
    (grpo.too_hard, {**FLAT, "groups__zero_variance": 0.65}, {**FLAT, "groups__zero_variance": 0.75}),
    (grpo.too_hard, {**FLAT, "accuracies": (0.1, 0.1)}, {**FLAT, "accuracies": (0.09, 0.09)}),
    (grpo.entropy_collapse, {**COLD, "groups__zero_variance": 0.65}, {**COLD, "groups__zero_variance": 0.75}),
    (grpo.overfitting, rising("reward__answer", 0.28), rising("reward__answer", 0.4)),
]


@pytest.mark.parametrize(("illness", "short", "beyond"), NEAR, ids=[illness.__name__ for illness, *_ in NEAR])
def test_an_illness_begins_where_it_is_said_to(config, illness, short, beyond):
    plain = {"accuracies": (0.4, 0.4), **FLAT_REWARD}
    assert illness(run_of(config, STEPS, **plain | short)) is None
    assert illness(run_of(config, STEPS, **plain | beyond)) is not None


@pytest.mark.parametrize(("end", "gained"), [(0.51, False), (0.53, True)])
def test_an_accuracy_has_risen_from_two_and_a_half_standard_errors_on(end, gained):
    evals = [{"step": step, "n": 200, "accuracy": share} for step, share in ((0, 0.4), (9, end))]
    assert learnt(RunRecords({}, evals=evals)) is gained


def test_gradients_that_are_always_clipped_are_told_to_a_run_that_stands_still(config):
    still = run_of(config, accuracies=(0.4, 0.4), kl=1e-6, **FLAT_REWARD)
    assert "gradients clipped on every step" in [finding.illness for finding in diagnose(still)]
    moving = run_of(config, accuracies=(0.4, 0.4), kl=0.05, **FLAT_REWARD)
    assert "gradients clipped on every step" not in [finding.illness for finding in diagnose(moving)]


def test_an_early_warning_goes_by_the_last_steps(config):
    cut = run_of(config, 130, accuracies=(0.0,), completion__truncated=lambda step: float(step > 100), reward__mean=0.1)
    assert [finding.illness for finding in early_warnings(cut)] == ["answers truncated"]
    mended = run_of(config, 130, accuracies=(0.0,), completion__truncated=lambda step: float(step < 60), reward__mean=0.1)
    assert early_warnings(mended) == []


@pytest.mark.parametrize(
    ("brake", "released"),
    [
        ({"grpo__beta": 1.0}, {"grpo.beta": 0.08}),
        ({"optimizer__eps": 1e-3}, {"optimizer.eps": 1e-8}),
        ({"optimizer__weight_decay": 0.5}, {"optimizer.weight_decay": 0.01}),
        ({"optimizer__max_grad_norm": 1e-4}, {"optimizer.max_grad_norm": 0.1}),
        ({}, {}),
    ],
)
def test_what_holds_a_policy_where_it_is_is_let_go_before_the_rate_is_raised(config, brake, released):
    run = RunRecords(changed(config, **brake))
    assert optimizer.brakes(run) == released
    expected = [f"{key}={value}" for key, value in (released or {"optimizer.learning_rate": 1e-4}).items()]
    assert optimizer.faster(run).split()[2:] == expected


@pytest.mark.parametrize(
    ("rate", "lower", "higher"), [(1e-5, 1e-6, 1e-4), (1e-2, 1e-4, 0.1), (1e-9, 1e-10, 1e-7), (0.5, 1e-4, 1.0)]
)
def test_a_rate_that_is_absurd_is_brought_to_what_the_reference_calls_typical(config, rate, lower, higher):
    run = RunRecords(changed(config, optimizer__learning_rate=rate))
    assert remedies.lower_rate(run) == {"optimizer.learning_rate": lower}
    assert remedies.raised_rate(run) == {"optimizer.learning_rate": higher}


def test_a_policy_that_nothing_holds_is_known_by_its_fall_where_kl_is_not_measured(config):
    made = run_of(config, accuracies=(0.4, 0.1), kl=0.0, **FLAT_REWARD)
    loose = dataclasses.replace(made, config=changed(config, grpo__beta=0.0))
    assert "grpo.beta=0.08" in grpo.kl_runaway(loose).remedy
    assert grpo.kl_runaway(made) is None


@pytest.mark.parametrize(("cut", "limit"), [(0.6, 32), (1.0, 64)])
def test_completions_get_twice_the_room_or_four_times_where_nearly_all_are_cut(config, cut, limit):
    run = RunRecords(config, [{"step": step, "completion/truncated": cut} for step in range(1, 9)])
    assert grpo.truncated(run).remedy.endswith(f"generation.max_generation_steps={limit}")


@pytest.mark.parametrize(("n", "end", "falls"), [(10_000, 0.45, False), (10_000, 0.39, True), (50, 0.3, False)])
def test_a_fall_is_one_from_ten_points_and_three_standard_errors_on(n, end, falls):
    evals = [{"step": step, "n": n, "accuracy": share} for step, share in ((0, 0.5), (9, end))]
    assert (fall_below_start(RunRecords({}, evals=evals)) is not None) is falls


def test_ratios_that_were_clipped_for_a_while_are_not_clipped_on_every_step(config):
    """Of two updates from a batch the second may be clipped."""
    twice = changed(config, grpo__num_iterations=2)
    assert grpo.clipped_ratios(run_of(twice, clip_fraction=lambda step: 0.3 if step in (2, 4, 6) else 0.0)) is None
    assert grpo.clipped_ratios(run_of(twice, clip_fraction=lambda step: 0.0 if step % 2 else 0.3)) is not None


def test_what_is_paid_for_falling_has_raised_the_reward_by_falling(config):
    against = json.loads(json.dumps(config))
    against["reward"]["weights"]["format_exact"] = -0.5
    finding = grpo.wrong_reward(run_of(against, accuracies=(0.6, 0.2), **rising("reward__format_exact", -0.4)))
    assert "what rose is format_exact" in finding.evidence
    assert "reward.weights.format_exact=0.0" in finding.remedy


def hard(config: dict, **values) -> RunRecords:
    return run_of(changed(config, **values), groups__zero_variance=0.75, accuracies=(0.04, 0.043), **FLAT_REWARD)


def test_what_helps_a_task_that_is_too_hard_comes_in_its_order(config):
    """What a run has already is not told to it again."""
    first = grpo.too_hard(hard(config, grpo__num_generations=8))
    assert first.evidence.startswith("75% of the groups over 24 batches had no variance in their rewards, as hardly any")
    assert "held-out accuracy 4.3%" in first.evidence
    assert first.evidence.endswith(
        "in this order: grpo.resample_rounds=2; grpo.num_generations=16; training.method=supervised"
    )
    chosen = {"grpo__num_generations": 8, "data__solve_rate": [0.05, 0.95]}
    drawn = chosen | {"grpo__resample_rounds": 2}
    remedies_ = [
        first,
        *(grpo.too_hard(hard(config, **own)) for own in (chosen, drawn, drawn | {"grpo__num_generations": 16})),
    ]
    ends = ["'data.solve_rate=[0.05,0.95]'", "grpo.resample_rounds=2", "grpo.num_generations=16"]
    ends.append("training.method=supervised data.solve_rate=null")
    assert [one.remedy.endswith(end) for one, end in zip(remedies_, ends, strict=True)] == [True] * 4
    unworked = changed(config, data__source="table", grpo__num_generations=16, data__solve_rate=[0.1, 0.9])
    unworked = run_of(changed(unworked, grpo__resample_rounds=1), **FLAT)
    assert grpo.too_hard(unworked).remedy.endswith("grpo.num_generations=32"), "there is nothing to show it how"
    never = grpo.too_hard(run_of(config, **FLAT | {"accuracies": (0.0, 0.0)}))
    assert never.remedy.endswith("training.method=supervised"), "there are no problems to choose"
    assert never.evidence.endswith("what a supervised run has learnt is gone on from by training.init_from")


def test_groups_without_a_spread_are_told_apart_by_why_they_have_none(config):
    """All solved, drawn alike, paid nothing or never measured: none of these is a task that is too hard."""
    alike = {"groups__zero_variance": 1.0, **FLAT_REWARD}
    unpaid = json.loads(json.dumps(config))
    unpaid["reward"]["weights"] = dict.fromkeys(config["reward"]["weights"], 0.0)
    cases = [
        (config, (0.9, 0.95)),
        (config, ()),
        (changed(config, generation__temperature=0.1), (0.0, 0.0)),
        (unpaid, (0.0, 0.0)),
    ]
    for own, accuracies in cases:
        found = [finding.illness for finding in diagnose(run_of(own, accuracies=accuracies, **alike))]
        assert "task too hard" not in found
        assert "no signal" in found
    found = [finding.illness for finding in diagnose(run_of(config, accuracies=(0.0, 0.0), **alike))]
    assert "task too hard" in found
    assert "no signal" not in found
