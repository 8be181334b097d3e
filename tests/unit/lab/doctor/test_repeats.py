"""Jobs that differ in nothing but their seed are one candidate, which is judged by their mean."""

from __future__ import annotations

import dataclasses
import json
import statistics

import pytest
from made_up_runs import FLAT_REWARD, changed, run_of
from rich.console import Console

from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.doctor.sweep import examine_sweep

LUCKY = {1e-6: (0.50, 0.55, 0.60), 1e-5: (0.80, 0.82, 0.84), 1e-4: (0.95, 0.30, 0.40)}  # job 6 is the best of all


def repeated(config, ends_by_rate, first_seeds=None, **metrics) -> dict:
    """Jobs of some rates, each with seeds from 0 on; None for a seed that diverged."""
    runs = {}
    for rate, ends in ends_by_rate.items():
        for seed, end in enumerate(ends, start=(first_seeds or {}).get(rate, 0)):
            own = {**changed(config, optimizer__learning_rate=rate), "seed": seed}
            summary = {"status": "diverged"} if end is None else None
            runs[str(len(runs))] = run_of(own, accuracies=(0.4, end or 0.0), summary=summary, **metrics)
    return runs


def said(runs, capsys, tmp_path, others=None) -> str:
    doctor.show(tmp_path, examine_sweep(runs, others), Console(width=500))
    return capsys.readouterr().out


def test_the_best_is_the_candidate_of_the_highest_mean_and_not_the_luckiest_job(config):
    """By hand: of 1e-6 the differences are .30, .27, .24, which is .27 +- .07; of 1e-4 they are -.15, .52, .44."""
    report = examine_sweep(repeated(config, LUCKY))
    assert [one.jobs for one in report.candidates] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"]]
    assert [one.accuracy.middle for one in report.candidates] == pytest.approx([0.55, 0.82, 0.55])
    assert (report.best, report.tied) == ("3", ["6"])


def test_the_doctor_names_the_candidate_and_its_seeds(config, capsys, tmp_path):
    best = "Best: learning_rate=1e-05 (mean 82.0% over 3 seeds: jobs 3, 4, 5)"
    runs = repeated(config, LUCKY)
    assert f"\n{best}; within noise of it: learning_rate=0.0001 (jobs 6, 7, 8)\n" in said(runs, capsys, tmp_path)
    assert "Best so far: learning_rate=1e-05" in said(runs, capsys, tmp_path, {"9": ["seed=3"]})


def test_seeds_alone_have_a_mean_and_no_best(config, capsys, tmp_path):
    """Of .52, .61, .70 the deviation is .09, and Student's factor 4.303: .61 +- .2236."""
    runs = repeated(config, {1e-5: (0.52, 0.61, 0.70)})
    report = examine_sweep(runs)
    assert (report.best, report.tied, report.findings) == (None, [], [])
    text = said(runs, capsys, tmp_path)
    assert "\n3 seeds: 61.0% (38.6 to 83.4). A better seed is luck.\n" in text
    assert "Best" not in text


def test_a_candidate_of_which_a_seed_diverged_is_not_the_best(config, capsys, tmp_path):
    ends = {1e-6: (0.60, 0.62, 0.64), 1e-5: (0.95, 0.96, None)}
    runs = repeated(config, ends)
    assert examine_sweep(runs).best == "0"
    assert "\nlearning_rate=1e-05 is not ranked: job 5 diverged.\n" in said(runs, capsys, tmp_path)
    rescued = repeated(config, {**ends, 1e-5: (0.95, 0.96, 0.97)})
    assert examine_sweep(rescued).best == "3"
    rescued["4"] = dataclasses.replace(rescued["4"], summary={"status": "completed", "rollbacks": [{}]})
    assert examine_sweep(rescued).best == "0"
    assert "There is no mean over the seeds: job 1 diverged." in said(
        repeated(config, {1e-5: (0.9, None)}), capsys, tmp_path
    )


@pytest.mark.parametrize(
    ("low", "high", "first_seed", "tied"),
    [
        ((0.30, 0.60, 0.80), (0.40, 0.70, 0.90), 0, False),  # .1 with each seed, however far apart the seeds are
        ((0.30, 0.60, 0.80), (0.40, 0.70, 0.90), 1, True),  # seeds 1 and 2 are shared: .6 - .4 and .8 - .7, against it
        ((0.30, 0.60, 0.80), (0.40, 0.70, 0.90), 7, True),  # .57 +- .63 and .67 +- .63
        ((0.50, 0.51, 0.52), (0.94, 0.95, 0.96), 7, False),  # .51 +- .07 and .95 +- .04
    ],
)
def test_candidates_are_compared_seed_by_seed_where_they_share_seeds(config, low, high, first_seed, tied):
    report = examine_sweep(repeated(config, {1e-6: low, 1e-5: high}, {1e-5: first_seed}))
    assert (report.best, report.tied) == ("3", ["0"] if tied else [])


def test_a_candidate_is_judged_by_the_seeds_that_were_evaluated(config):
    runs = repeated(config, {1e-6: (0.5, 0.6), 1e-5: (0.9, 0.7)})
    runs["3"] = dataclasses.replace(runs["3"], evals=[], summary={})
    one = examine_sweep(runs).candidates[1]
    assert (one.measured, one.accuracy.middle, one.not_ranked) == (["2"], 0.9, None)


def test_the_next_sweep_keeps_all_seeds(config):
    (finding,) = examine_sweep(repeated(config, LUCKY)).findings
    assert finding.illness == "refine"
    assert " seed=0,1,2 " in finding.remedy
    assert finding.remedy.count("seed=") == 1


def test_a_grid_is_judged_by_candidates(config):
    """Means are within noise of each other, and so are the candidates, though single jobs are far apart."""
    (finding,) = examine_sweep(repeated(config, {1e-6: (0.6, 0.9), 1e-5: (0.9, 0.62)})).findings
    assert finding.illness == "no difference within noise"
    within = "from 1e-06 to 1e-05 all candidates end within noise of each other"
    assert finding.evidence == f"{within}, on 200 problems and 2 seeds"
    assert " seed=0,1,2,3 " in finding.remedy, "twice as many tell more than more problems do"
    assert "num_examples" not in finding.remedy


def test_a_rate_is_too_high_if_one_seed_is_ruined_and_too_low_if_all_are_flat(config):
    ruined = repeated(config, {1e-5: (0.9, None), 1e-4: (None, None)})
    (finding,) = examine_sweep(ruined).findings
    assert finding.illness == "all rates too high"
    assert finding.evidence == "every candidate from 1e-05 to 0.0001 diverges or collapses with one seed or more"
    flat = repeated(config, {1e-7: (0.4, 0.4)}, kl=1e-7, **FLAT_REWARD)
    (finding,) = examine_sweep({**{str(int(name) + 4): run for name, run in flat.items()}, **ruined}).findings
    assert finding.illness == "good rates stepped over"
    learns = repeated(config, {1e-7: (0.4, 0.8)})["1"]
    assert not examine_sweep({"4": flat["0"], "5": learns, **ruined}).candidates[0].illnesses


def test_a_seed_that_is_swept_along_with_its_value_makes_no_repeats(config, capsys, tmp_path):
    runs = repeated(config, {1e-6: (0.6,), 1e-5: (0.95,)}, {1e-5: 1})
    report = examine_sweep(runs)
    assert (report.best, report.repeated) == ("1", False)
    assert "\nBest: job 1  learning_rate=1e-05 seed=1  (95.0%)\n" in said(runs, capsys, tmp_path)


def test_candidates_are_told_as_json_with_their_means(config, tmp_path):
    told = json.loads(json.dumps(doctor.as_json(tmp_path, examine_sweep(repeated(config, LUCKY)))))["candidates"][1]
    assert (told["jobs"], told["seeds"]) == (["3", "4", "5"], [0, 1, 2])
    assert told["accuracy"]["middle"] == pytest.approx(statistics.fmean(LUCKY[1e-5]))


@pytest.mark.parametrize("seed", [None, "x", [1]])
def test_a_job_whose_seed_is_not_known_repeats_none(config, seed):
    runs = repeated(config, {1e-5: (0.5, 0.6, 0.7)})
    runs["2"] = dataclasses.replace(runs["2"], config={**runs["2"].config, "seed": seed})
    assert [one.jobs for one in examine_sweep(runs).candidates] == [["0", "1"], ["2"]]
