"""Each symptom on records made up for the purpose, and what is said of a run that shows it."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest
from hydra import compose, initialize_config_dir
from made_up_runs import FLAT_REWARD, changed, run_of

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.environments.rewards import REWARD_FAULT
from agent_tunix.lab.doctor import grpo, optimizer
from agent_tunix.lab.doctor.examination import EXPLAINS, diagnose, early_warnings, examine
from agent_tunix.lab.doctor.finding import Severity
from agent_tunix.lab.doctor.records import RunRecords, difference, trend
from agent_tunix.lab.doctor.signs import reversals

ILL = {
    "diverging": {"loss": lambda step: None if step > 20 else 0.0, "accuracies": (0.4, 0.4), **FLAT_REWARD},
    "policy collapse": {"accuracies": (0.4, 0.1), **FLAT_REWARD},
    "not learning": {"accuracies": (0.4, 0.4), "kl": 1e-6, **FLAT_REWARD},
    "oscillating": {"accuracies": (0.4, 0.9, 0.4, 0.9, 0.6), **FLAT_REWARD},
    "gain lost again": {"accuracies": (0.4, 0.8, 0.5)},
    "slow convergence": {"accuracies": (0.4, 0.5, 0.6), "kl": 2e-3},
    "task too hard": {"accuracies": (0.04, 0.043), "groups__zero_variance": 0.75, **FLAT_REWARD},
    "no signal": {"accuracies": (0.4, 0.4), "groups__zero_variance": 1.0, **FLAT_REWARD},
    "rewards never positive": {"accuracies": (0.4, 0.4), "reward__mean": -1.0},
    "most groups thrown away": {"accuracies": (0.4, 0.4), "groups__discarded": 200, **FLAT_REWARD},
    "answers truncated": {"accuracies": (0.0, 0.0), "completion__truncated": 0.9, "reward__mean": 0.1},
    "format learnt but not arithmetic": {
        "accuracies": (0.4, 0.41),
        "reward__format_exact": lambda step: 0.6 + 0.4 * step / 24 + 0.01 * (-1) ** step,
    },
    "entropy collapse": {
        "accuracies": (0.4, 0.4),
        "entropy": lambda step: 0.5 * 0.7**step,
        "groups__zero_variance": 0.8,
        **FLAT_REWARD,
    },
    "KL runaway": {"accuracies": (0.4, 0.4), "kl": lambda step: step / 10, **FLAT_REWARD},
    "completions are noise": {"accuracies": (0.0, 0.0), "entropy": 3.5, **FLAT_REWARD},
    "sampler/trainer mismatch": {"accuracies": (0.4, 0.4), "mismatch__kl": 0.05, **FLAT_REWARD},
    "clipping on every step": {"accuracies": (0.4, 0.4), "clip_fraction": 0.3, **FLAT_REWARD},
    "warm-up as long as the run": {"accuracies": (0.4, 0.4), "lr": lambda step: 1e-5 * step / 24, **FLAT_REWARD},
    "batches dropped": {"update_survival": lambda step: 0.0 if step % 2 else 1.0},
    "rate spent early": {"accuracies": (0.4, 0.4), "lr": lambda step: 1e-5 if step < 4 else 1e-8, **FLAT_REWARD},
    "updates that do not survive": {"accuracies": (0.4, 0.4), "update_survival": 0.01, **FLAT_REWARD},
    "reward against accuracy": {"accuracies": (0.6, 0.2)},
    "tool never called": {"accuracies": (0.4, 0.4), "episode__calling": 0.0, **FLAT_REWARD},
    "calls that cannot be read": {
        "accuracies": (0.4, 0.4),
        "episode__calling": 0.8,
        "calls__malformed": 0.6,
        **FLAT_REWARD,
    },
    "the same call again": {"accuracies": (0.4, 0.4), "episode__repeating": 0.5, **FLAT_REWARD},
    "episodes cut": {
        "accuracies": (0.4, 0.4),
        "episode__cut": 0.8,
        "episode__turns": 7.5,
        "completion__truncated": 0.8,
        **FLAT_REWARD,
    },
    "environment fails": {"accuracies": (0.4, 0.4), "episode__failed": 0.5, **FLAT_REWARD},
    "paid for calling": {"accuracies": (0.4, 0.4), "episode__calling": lambda step: step / 24},
    "overfitting": {"accuracies": (0.4, 0.42), "reward__answer": lambda step: 0.4 + 0.6 * step / 24},
}


@pytest.mark.parametrize("illness", ILL)
def test_each_illness_comes_first_where_it_is_the_only_one(illness, config):
    own = changed(config, **OF_RUNS[illness]) if illness == "batches dropped" else config
    report = examine(run_of(own, **ILL[illness]))
    assert report.verdict == "ill"
    assert report.findings[0].illness == illness


OF_RUNS = {  # what a run has set that can have such an illness
    "sampler/trainer mismatch": {"model__dtype": "bfloat16"},
    "clipping on every step": {"grpo__num_iterations": 2},
    "completions are noise": {"training__init_from": "runs/ruined"},
    "batches dropped": {"training__on_divergence": "ignore"},
    "rate spent early": {"scheduler__total_steps": 5},
    "warm-up as long as the run": {"scheduler__warmup_steps": 24},
}


@pytest.mark.parametrize("illness", ILL)
def test_every_remedy_is_a_command_that_is_accepted_and_changes_something(illness, config):
    own = changed(config, **OF_RUNS.get(illness, {}))
    findings = diagnose(run_of(own, **ILL[illness]))
    assert findings[0].illness == illness
    for finding in findings:
        overrides = shlex.split(finding.remedy.partition(" +experiment")[2])
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            composed = compose("config", [f"+experiment{overrides[0]}", *(f"++{o}" for o in overrides[1:])])
        assert validate(composed, Config) != validate(own, Config)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_numbers_that_are_none_are_seen_however_they_were_written(config, value):
    run = run_of(config, loss=lambda step: value if step == 5 else 0.0)
    assert "loss is not finite at step 5" in optimizer.diverging(run).evidence


def test_updates_that_were_never_computed_are_dropped_too(config):
    """Where a reward was no number there is no line; where the rate is zero, nothing was dropped."""
    ignoring = changed(config, training__on_divergence="ignore")
    run = run_of(ignoring, update_survival=lambda step: float(step > 1), lr=lambda step: 1e-5 * (step > 1))
    assert optimizer.dropped(run) is None
    lost = optimizer.dropped(dataclasses.replace(run, metrics=run.metrics[:-2]))
    assert lost.evidence.startswith("2 of 24 updates were dropped, as numbers were out of hand;")
    assert lost.severity == Severity.MILD
    assert optimizer.dropped(dataclasses.replace(run, config=config, metrics=run.metrics[:-2])) is None


def test_updates_that_were_dropped_have_not_rounded_away(config):
    """Half of them, the last ones: a higher rate is the last thing such a run needs."""
    ignoring = changed(config, training__on_divergence="ignore")
    run = run_of(ignoring, update_survival=lambda step: 1.0 if step <= 12 else 0.0)
    assert optimizer.lost_updates(run) is None
    assert (run.dropped, run.reached) == (12, 24)
    assert optimizer.lost_updates(dataclasses.replace(run, config=config)) is not None


def test_a_run_without_kl_is_examined_all_the_same(config):
    run = run_of(config, accuracies=(0.4, 0.5, 0.6))
    for record in run.metrics:
        del record["kl"]
    assert "slow convergence" not in [finding.illness for finding in diagnose(run)]


def test_a_policy_that_runs_away_is_not_told_of_small_groups(config):
    own = changed(config, grpo__num_generations=4)
    findings = diagnose(run_of(own, steps=60, accuracies=(0.4, 0.4), kl=lambda step: step / 20, **FLAT_REWARD))
    assert "not learning" not in [finding.illness for finding in findings]


def test_clipping_matters_where_steps_grow_with_the_gradient(config):
    still = run_of(changed(config, optimizer__optimizer_name="sgd"), **ILL["not learning"])
    found = optimizer.clipped_gradients(still)
    assert found.severity == Severity.SERIOUS
    assert "Adam" not in found.evidence


def test_what_a_run_has_already_is_not_advised(config):
    """Its ratios are clipped in the only update of a batch, its base is in float32, its clipping is loose already."""
    clipped = grpo.clipped_ratios(run_of(config, **ILL["clipping on every step"]))
    assert "sampler and trainer disagree" in clipped.evidence
    for finding in (clipped, grpo.mismatch(run_of(config, **ILL["sampler/trainer mismatch"]))):
        assert finding.remedy.startswith("JAX_DEFAULT_MATMUL_PRECISION=highest ")
        assert finding.remedy.endswith(" +experiment=quick_test")
    loose = changed(config, optimizer__max_grad_norm=1.0)
    still = diagnose(run_of(loose, **ILL["not learning"]))[-1]
    assert (still.illness, "optimizer.max_grad_norm=10.0" in still.remedy) == ("gradients clipped on every step", True)
    slow = changed(config, optimizer__warmup_ratio=0.3)
    assert "warmup_ratio=0.3" in diagnose(run_of(slow, **ILL["oscillating"]))[0].remedy


def test_what_would_not_help_is_not_all_that_is_advised(config):
    """A schedule that falls from the first step has no total to forget, and one of many steps is why warm-up is long."""
    falling = changed(config, scheduler__scheduler_name="inverse_sqrt", optimizer__warmup_ratio=0.0)
    assert "optimizer.warmup_ratio=0.1" in optimizer.spent_rate(run_of(falling, **ILL["rate spent early"])).remedy
    long = changed(config, scheduler__total_steps=1000, optimizer__warmup_ratio=0.1)
    assert "scheduler.total_steps=null" in optimizer.long_warmup(run_of(long, **ILL["warm-up as long as the run"])).remedy
    examples = {4096: 8192, 8192: 16384, 10**9: 10**9}
    for given, advised in examples.items():
        own = changed(config, data__num_examples=given, optimizer__weight_decay=0.05, training__num_epochs=1)
        remedy = grpo.overfitting(run_of(own, **ILL["overfitting"])).remedy
        assert f"data.num_examples={advised}" in remedy
        assert "optimizer.weight_decay=0.1" in remedy


def test_a_rate_that_the_guard_has_cut_is_not_laid_to_the_schedule(config):
    """After two rollbacks it is a hundredth."""
    cut = {"summary": {"status": "completed", "rollbacks": [{"step": 3}, {"step": 5}]}, **ILL["rate spent early"]}
    assert [finding.illness for finding in diagnose(run_of(config, **cut))] == ["diverging"]


@pytest.mark.parametrize(
    "summary",
    [
        {"status": "diverged", "fault": f"{REWARD_FAULT} 'mine' returned nan"},
        {"status": "completed", "rollbacks": [{"step": 8, "reason": f"{REWARD_FAULT} 'mine' returned nan"}]},
        {"status": "failed", "fault": "full", "rollbacks": [{"step": 8, "reason": f"{REWARD_FAULT} 'mine' returned nan"}]},
    ],
)
def test_a_reward_that_is_no_number_is_not_laid_to_the_rate(config, summary):
    finding = diagnose(run_of(config, accuracies=(0.4, 0.4), summary=summary))[0]
    assert finding.illness == "diverging"
    assert "'mine' returned nan" in finding.evidence
    assert "rate" not in finding.evidence + finding.remedy
    mixed = {**summary, "fault": "the loss is nan", "status": "diverged"}
    assert "learning rate is too high" in diagnose(run_of(config, accuracies=(0.4, 0.4), summary=mixed))[0].evidence


def test_a_warm_up_that_is_advised_is_the_one_that_counts(config):
    swings = ILL["oscillating"]
    given = diagnose(run_of(changed(config, scheduler__warmup_steps=1), **swings))[0]
    assert "scheduler.warmup_steps=null" in given.remedy
    assert "scheduler.warmup_steps=1" not in given.remedy
    wsd = changed(config, scheduler__scheduler_name="wsd", scheduler__decay_ratio=0.9)
    assert "scheduler.decay_ratio=0.8" in diagnose(run_of(wsd, **swings))[0].remedy


def test_only_data_with_worked_answers_is_to_be_learnt_from_them(config):
    never_right = {"accuracies": (0.0, 0.0), "groups__zero_variance": 1.0, "reward__mean": 0.0, "reward__answer": 0.0}
    assert "training.method=supervised" in diagnose(run_of(config, **never_right))[0].remedy
    bare = changed(config, data__source="table", data__path="rows.jsonl", data__answer_pattern=None)
    assert "grpo.num_generations=16" in diagnose(run_of(bare, **never_right))[0].remedy


def test_a_healthy_run_has_no_findings(config):
    report = examine(run_of(config))
    assert (report.verdict, report.findings) == ("healthy", [])
    assert "40.0% -> 80.0%" in report.vitals["held-out accuracy"]
    assert "near zero by construction" in report.judged_by


def test_a_gradient_clipped_on_every_step_does_not_make_a_run_ill(config):
    assert diagnose(run_of(config, grad_norm=50.0)) == []


def test_groups_without_variance_are_no_illness_once_the_task_is_solved(config):
    run = run_of(config, accuracies=(0.95, 0.96), groups__zero_variance=1.0, reward__mean=1.2)
    report = examine(run)
    assert report.verdict == "healthy"
    assert [finding.severity for finding in report.findings] == [Severity.MILD]


def test_entropy_that_went_because_the_task_was_learnt_is_no_collapse(config):
    run = run_of(config, accuracies=(0.4, 0.89), entropy=lambda step: 0.3 * 0.9**step, groups__zero_variance=0.75)
    assert diagnose(run) == []


def test_few_steps_or_few_problems_are_no_proof_of_anything(config):
    assert examine(run_of(config, steps=4, accuracies=(0.4, 0.4), reward__mean=0.5)).verdict == "too short"
    rising = [run_of(config, steps, accuracies=(0.4, 0.4)) for steps in (7, 8)]
    assert [examine(run).verdict for run in rising] == ["too short", "healthy"]
    noisy = run_of(config, steps=12, accuracies=(0.4, 0.45), n=30, **FLAT_REWARD)
    assert examine(noisy).verdict == "undecided"


@pytest.mark.parametrize(
    "so_far",
    [{"lr": lambda step: 1e-7 * step, "kl": 1e-5, "accuracies": (0.4, 0.4), **FLAT_REWARD}, ILL["slow convergence"]],
)
def test_a_run_under_way_is_not_blamed_for_what_it_has_not_done_yet(config, so_far):
    assert diagnose(run_of(config, summary={"status": "interrupted"}, **so_far)) == []


def test_a_run_under_way_whose_rate_no_longer_rises_has_had_its_chance(config):
    findings = diagnose(run_of(config, summary={"status": "interrupted"}, **ILL["not learning"]))
    assert findings[0].illness == "not learning"


def test_a_control_is_not_called_ill_for_learning_nothing(config):
    run = run_of(changed(config, grpo__shuffle_advantages=True), accuracies=(0.4, 0.4), kl=1e-6, **FLAT_REWARD)
    assert examine(run).verdict == "healthy"
    assert examine(dataclasses.replace(run, metrics=run.metrics[:2])).verdict == "too short", "as any other run"


@pytest.mark.parametrize(
    ("loss", "accuracies", "illness"),
    [
        (lambda step: 2.0 * 0.95**step, (0.4, 0.8), None),
        (2.0, (0.4, 0.4), "not learning"),
        (lambda step: 2.0 + step, (0.4, 0.4), "diverging"),
        (lambda step: 5.5 if step == 24 else 2.0 * 0.85**step, (0.4, 0.8), None),  # one hard batch
        (lambda step: 2.0 + 2.5 * (step % 2) if step > 1 else 1.5, (0.4, 0.4), "oscillating"),
        (lambda step: 2.0 - 0.005 * step, (0.4, 0.42), "slow convergence"),
    ],
)
def test_a_supervised_run_is_judged_by_its_loss(config, loss, accuracies, illness):
    supervised = changed(config, training__method="supervised")
    run = run_of(supervised, accuracies=accuracies, loss=loss, kl=0.0)
    metrics = [{k: v for k, v in record.items() if "/" not in k} for record in run.metrics]
    findings = diagnose(RunRecords(supervised, metrics, run.evals, run.summary, run.overrides))
    assert [finding.illness for finding in findings][:1] == ([illness] if illness else [])


def test_a_run_the_guard_mended_is_only_told_so(config):
    run = run_of(config, summary={"status": "completed", "rollbacks": [{"step": 3}]})
    assert [finding.severity for finding in diagnose(run)] == [Severity.MILD]
    slow = run_of(config, summary=run.summary, **ILL["slow convergence"])
    assert [finding.illness for finding in diagnose(slow)] == ["slow convergence", "diverging"], "what is mild hides nothing"
    stopped = run_of(config, steps=3, accuracies=(0.4,), summary={"status": "diverged", "steps": 3})
    assert diagnose(stopped)[0].severity == Severity.GRAVE


def test_an_explanation_names_illnesses_that_exist(config):
    named = set(ILL) | {"a control"}
    assert set(EXPLAINS) <= named
    assert {illness for explained in EXPLAINS.values() for illness in explained} <= named


def test_early_warnings_wait_for_a_few_steps_and_leave_a_healthy_run_alone(config):
    assert early_warnings(run_of(config)) == []
    dull = {"accuracies": (0.0,), "groups__zero_variance": 1.0, "reward__mean": 0.0}
    assert early_warnings(run_of(config, steps=3, **dull)) == []
    assert [finding.illness for finding in early_warnings(run_of(config, steps=6, **dull))][:1] == ["task too hard"]
    cut = run_of(config, steps=6, accuracies=(0.0,), completion__truncated=1.0, reward__mean=0.0)
    assert [finding.illness for finding in early_warnings(cut)] == ["answers truncated"]


def test_weights_that_pay_nothing_are_given_back(config):
    nothing = json.loads(json.dumps(config))
    nothing["reward"]["weights"] = dict.fromkeys(config["reward"]["weights"], 0.0)
    run = run_of(nothing, accuracies=(0.4, 0.4), groups__zero_variance=1.0, reward__mean=0.0)
    assert "reward.weights" in " ".join(run.overrides)
    assert "reward.weights" not in grpo.no_signal(run).remedy


def test_noise_is_not_taken_for_change(config):
    run = run_of(config, accuracies=(0.40, 0.45), n=200)
    assert difference(*run.accuracies()).z < 2
    assert trend([0.5]) is None
    assert trend([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).gain == 1.0


@pytest.mark.parametrize(
    ("values", "turns"),
    [([], 0), ([1, 1, 1], 0), ([0, 1, 2, 3], 0), ([0, 2, 0, 2], 2), ([0, 0.5, 0, 0.5], 0), ([2, 0, 2], 1)],
)
def test_reversals(values, turns):
    assert reversals(values, 1.0) == turns


def test_what_is_measured_once_a_batch_is_read_once_a_batch(config):
    twice = changed(config, grpo__num_iterations=2)
    assert len(run_of(twice, steps=6).series("reward/mean")) == 3
    worked = changed(twice, training__method="supervised")
    assert len(run_of(worked, steps=6).series("completion/truncated")) == 6, "a worked answer is learnt once"


def test_a_series_is_read_once_and_not_kept_for_other_records(config):
    run = run_of(config, steps=3)
    assert run.series("kl") is run.series("kl")
    assert dataclasses.replace(run, metrics=run.metrics[:1]).series("kl") == run.series("kl")[:1]


def test_ratios_of_whole_sequences_are_clipped_as_they_should_be_and_a_wider_clip_is_advised_where_most_are(config):
    gspo = changed(config, grpo__objective="gspo", grpo__epsilon=3e-4, grpo__epsilon_high=4e-4)
    assert grpo.clipped_ratios(run_of(gspo, clip_fraction=0.3)) is None
    found = grpo.clipped_ratios(run_of(gspo, clip_fraction=0.8))
    assert "grpo.epsilon=0.0009" in found.remedy
    assert "grpo.epsilon_high=0.0012" in found.remedy
    assert "grpo.epsilon_high=0.0004" in found.evidence


def test_dynamic_sampling_that_throws_most_away_is_told(config):
    resampled = changed(config, grpo__resample_rounds=3, training__micro_batch_size=4, training__batch_size=8)
    assert grpo.discarded(run_of(resampled, groups__discarded=8)) is None
    found = grpo.discarded(run_of(resampled, groups__discarded=30))
    assert "79%" in found.evidence
    assert grpo.discarded(run_of(config)) is None
