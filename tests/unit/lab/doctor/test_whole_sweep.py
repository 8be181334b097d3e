"""What is said of a sweep as a whole."""

from __future__ import annotations

import dataclasses

import pytest
from made_up_runs import FLAT_REWARD, changed, run_of

from agent_tunix.lab.doctor.sweep import examine_sweep


def sweep_of(config, rates_and_ends) -> dict:
    runs = {}
    for name, (rate, end, kl) in enumerate(rates_and_ends):
        own = changed(config, optimizer__learning_rate=rate)
        learns = {} if end > 0.5 else FLAT_REWARD
        runs[str(name)] = run_of(own, accuracies=(0.4, end), kl=kl, **learns)
    return runs


@pytest.mark.parametrize(
    ("jobs", "best", "illness", "grid"),
    [
        ([(1e-7, 0.4, 1e-7), (1e-6, 0.41, 1e-5)], "1", "all rates too low", "3e-06,1e-05,3e-05"),
        ([(0.05, 0.4, 1e-7), (0.5, 0.41, 1e-5)], "1", "all rates too low", "1"),
        ([(1e-4, 0.1, 2.0), (1e-3, 0.0, 3.0)], "0", "all rates too high", "3.3e-06,1e-05,3.3e-05"),
        ([(1e-7, 0.4, 1e-7), (1e-6, 0.41, 1e-5), (1e-4, 0.1, 2.0)], "1", "good rates stepped over", "3.2e-06,1e-05,3.2e-05"),
        ([(1e-6, 0.6, 0.1), (1e-5, 0.95, 0.1)], "1", "best at the edge of the grid", "1e-05,3e-05,0.0001"),
        ([(0.03, 0.6, 0.1), (0.3, 0.95, 0.1)], "1", "best at the edge of the grid", "0.3,0.9,1"),
        ([(1e-5, 0.95, 0.1), (1e-4, 0.1, 2.0)], "0", "best at the edge of the grid", "1e-06,3.3e-06,1e-05,3.2e-05"),
        ([(1e-6, 0.6, 0.1), (1e-5, 0.95, 0.1), (1e-4, 0.1, 2.0)], "1", "refine", "3.2e-06,1e-05,3.2e-05"),
        ([(1e-6, 0.6, 0.1), (1e-5, 0.95, 0.1), (3e-5, 0.5, 0.1)], "1", "refine", "3.2e-06,1e-05,1.7e-05"),
    ],
)
def test_a_sweep_is_judged_as_a_whole(config, jobs, best, illness, grid):
    report = examine_sweep(sweep_of(config, jobs))
    assert report.best == best
    assert [finding.illness for finding in report.findings] == [illness]
    assert report.findings[0].remedy.endswith(f"optimizer.learning_rate={grid}")
    assert "--multirun" in report.findings[0].remedy


def test_where_rates_are_near_each_other_warm_up_is_next(config):
    """As in the reference; to halve such steps again and again would never end."""
    report = examine_sweep(sweep_of(config, [(1e-6, 0.6, 0.1), (3e-6, 0.95, 0.1), (1e-5, 0.6, 0.1)]))
    (finding,) = report.findings
    assert finding.illness == "warm-up is next"
    assert finding.remedy.endswith("optimizer.warmup_ratio=0.05,0.1,0.2 optimizer.learning_rate=3e-06")


def test_nothing_lies_between_a_rate_and_itself(config):
    """It is too low in one job and ruinous in another, which differ in more than the rate."""
    report = examine_sweep(sweep_of(config, [(1e-6, 0.4, 1e-7), (1e-5, 0.41, 1e-5), (1e-5, 0.1, 2.0)]))
    assert "good rates stepped over" not in [finding.illness for finding in report.findings]


def test_files_of_a_group_are_told_apart_by_their_names(config):
    files = {"adamw": (1e-5, 0.01), "conservative": (1e-6, 0.05), "lion": (1e-6, 0.03)}
    runs = {
        str(i): dataclasses.replace(
            run_of(changed(config, optimizer__learning_rate=rate, optimizer__weight_decay=decay, grpo__beta=i / 10)),
            given=["+experiment=quick_test", f"optimizer={name}", f"grpo.beta={i / 10}"],
        )
        for i, (name, (rate, decay)) in enumerate(files.items())
    }
    assert [job.label for job in examine_sweep(runs).jobs] == [
        "optimizer=adamw learning_rate=1e-05 beta=0.0",
        "optimizer=conservative learning_rate=1e-06 beta=0.1",
        "optimizer=lion learning_rate=1e-06 beta=0.2",
    ]


def test_candidates_are_not_told_apart_by_what_a_search_lowered_with_their_rate(config):
    rates = {"0": (3e-8, 3e-9), "1": (3e-7, 1e-7), "2": (3e-6, 1e-7)}
    runs = {
        name: dataclasses.replace(
            run_of(changed(config, optimizer__learning_rate=rate, scheduler__lr_min=least)),
            given=[f"optimizer.learning_rate={rate}", *(["scheduler.lr_min=3e-09"] if least < 1e-7 else [])],
        )
        for name, (rate, least) in rates.items()
    }
    assert [job.label for job in examine_sweep(runs).jobs] == [f"learning_rate={rate:g}" for rate, _ in rates.values()]


def test_rates_of_several_algorithms_are_not_one_grid(config):
    """Each has its own; the best job's are looked at, where it has several."""
    jobs = [("adamw", 1e-6, 0.6), ("adamw", 1e-5, 0.95), ("adamw", 1e-4, 0.5), ("lion", 1e-6, 0.94), ("lion", 1e-7, 0.6)]
    runs = {
        str(name): run_of(
            changed(config, optimizer__learning_rate=rate, optimizer__optimizer_name=algorithm), accuracies=(0.4, end)
        )
        for name, (algorithm, rate, end) in enumerate(jobs)
    }
    assert examine_sweep({name: runs[name] for name in "13"}).findings == []
    (finding,) = examine_sweep(runs).findings
    assert (finding.illness, finding.evidence) == ("refine", "the best rate, 1e-05, lies inside the grid")


def test_what_a_tenth_of_a_rate_did_does_not_count_for_that_rate(config):
    """Job 1 ended best, after it was rolled back; where all were, all rates are too high."""
    runs = sweep_of(config, [(1e-5, 0.6, 0.1), (1e-4, 0.95, 0.1)])
    rescued = {name: dataclasses.replace(run, summary={**run.summary, "rollbacks": [{}]}) for name, run in runs.items()}
    report = examine_sweep({"0": runs["0"], "1": rescued["1"]})
    assert (report.best, report.tied) == ("0", [])
    assert (report.jobs[1].accuracy, report.jobs[1].illnesses) == (None, {"diverging"})
    report = examine_sweep(rescued)
    assert (report.best, report.findings[0].illness) == (None, "all rates too high")


def test_the_next_sweep_is_one_of_the_best_job_and_is_accepted(config):
    """Job 1 is the best, by its weight decay too; a rate below lr_min would be refused."""
    jobs = [(1e-6, 0.5, 0.1, 0.0), (1e-7, 0.95, 0.1, 0.05)]
    runs = {
        str(name): run_of(
            changed(config, optimizer__learning_rate=rate, optimizer__weight_decay=decay), accuracies=(0.4, end), kl=kl
        )
        for name, (rate, end, kl, decay) in enumerate(jobs)
    }
    (finding,) = examine_sweep(runs).findings
    assert finding.remedy.endswith(
        "optimizer.weight_decay=0.05 scheduler.lr_min=1e-09 optimizer.learning_rate=1e-08,3.3e-08,1e-07"
    )


def test_a_best_rate_at_the_edge_that_ties_with_one_inside_is_said_to_be_there(config):
    report = examine_sweep(sweep_of(config, [(1e-6, 0.55, 0.1), (1e-5, 0.94, 0.1), (3e-5, 0.95, 0.1)]))
    (finding,) = report.findings
    assert finding.evidence == (
        "the best rate, 3e-05, is at the edge of the grid from 1e-06 to 3e-05, but noise does not tell it from 1e-05"
    )
    assert finding.remedy.endswith("optimizer.learning_rate=1.7e-05,3e-05,9e-05")


def test_a_job_whose_configuration_is_lost_is_no_rate_to_compare_with(config):
    runs = sweep_of(config, [(1e-6, 0.55, 0.1), (2e-6, 0.94, 0.1), (3e-5, 0.95, 0.1)])
    runs["1"] = dataclasses.replace(runs["1"], config={})
    report = examine_sweep(runs)
    assert report.tied == ["1"]
    (finding,) = report.findings
    assert finding.illness == "best at the edge of the grid"


def test_candidates_within_noise_of_each_other_are_said_to_be(config):
    report = examine_sweep(sweep_of(config, [(1e-6, 0.90, 0.1), (1e-5, 0.92, 0.1), (1e-4, 0.91, 0.1)]))
    (finding,) = report.findings
    assert finding.illness == "no difference within noise"
    assert sorted(report.tied) == ["0", "2"]
    assert "evaluation.num_examples=800" in finding.remedy


def test_no_more_generated_problems_are_advised_than_there_are(config):
    runs = {
        str(name): run_of(changed(config, optimizer__learning_rate=rate), accuracies=(0.4, 0.9), n=2000)
        for name, rate in enumerate((1e-6, 1e-5))
    }
    (finding,) = examine_sweep(runs).findings
    assert finding.illness == "no difference within noise"
    assert "evaluation.num_examples=5760" in finding.remedy


@pytest.mark.parametrize("cut", ["a job interrupted", "a job not begun"])
def test_a_grid_is_not_judged_before_all_of_it_has_ended(config, cut):
    runs = sweep_of(config, [(1e-6, 0.6, 0.1), (1e-5, 0.95, 0.1)])
    waiting = ["2"] if cut == "a job not begun" else []
    if not waiting:
        runs["0"] = dataclasses.replace(runs["0"], summary={**runs["0"].summary, "status": "interrupted"})
    report = examine_sweep(runs, dict.fromkeys(waiting, ()))
    assert (report.best, report.findings, report.others, report.ended) == ("1", [], waiting, False)
    assert [job.ended for job in report.jobs] == [bool(waiting), True]


def test_what_a_job_was_before_its_first_update_is_not_what_it_came_to(config):
    runs = sweep_of(config, [(1e-6, 0.6, 0.1), (1e-5, 0.95, 0.1)])
    begun = {name: dataclasses.replace(run, evals=[r for r in run.evals if r["step"] == 0]) for name, run in runs.items()}
    assert all(run.accuracies() for run in begun.values())
    report = examine_sweep(begun)
    assert (report.best, [job.accuracy for job in report.jobs]) == (None, [None, None])


def test_the_next_sweep_does_not_keep_to_the_seed_of_the_best_job(config):
    """Where seeds were swept too; that of a sweep with one is kept."""
    for seeds, kept in (((1, 2), False), ((7, 7), True)):
        runs = {
            str(n): run_of({**changed(config, optimizer__learning_rate=rate), "seed": seed}, accuracies=(0.4, end), kl=0.1)
            for n, (rate, end, seed) in enumerate(zip((1e-6, 1e-5), (0.6, 0.95), seeds, strict=True))
        }
        (finding,) = examine_sweep(runs).findings
        assert (f"seed={seeds[1]}" in finding.remedy) is kept
