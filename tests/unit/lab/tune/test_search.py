from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.sweep.sweep_folder import write_index
from agent_tunix.lab.tune import search
from agent_tunix.lab.tune.search import measure_pace, run_finalists
from agent_tunix.lab.tune.stages import RATE

OWN, BETTER, WORSE, LOST = ({RATE: rate} for rate in (1e-5, 3e-5, 3e-6, 1e-4))
ENDS = {1e-5: 0.90, 3e-5: 0.92, 3e-6: 0.89, 1e-4: 0.5}


def ended(share: float) -> Accuracy:
    return Accuracy(40, share, 200)


def session(finalists: int, seeds: int) -> Any:
    """A search whose stages are done; a setting ends with every seed as it did before."""

    def trial(stage: str, number: int, settings: dict) -> Any:
        return SimpleNamespace(measured=lambda step: ended(ENDS[settings[RATE]]))

    tune = SimpleNamespace(finalists=finalists, seeds=seeds)
    found = [(settings, ended(ENDS[settings[RATE]])) for settings in (WORSE, OWN, LOST, BETTER)]
    trained: list[int] = []
    return SimpleNamespace(
        cfg=SimpleNamespace(seed=42, tune=tune),
        end=40,
        record={"stages": []},
        ended=lambda: found,
        trial=trial,
        train=lambda trials, until: trained.append(len(trials)),
        say=lambda text: None,
        write=lambda: None,
        trained=trained,
    )


def test_the_best_settings_and_the_best_of_those_that_noise_does_not_tell_from_them_are_finalists():
    s = session(finalists=2, seeds=3)
    best = run_finalists(s, OWN)
    assert s.trained == [6], "two settings with three seeds each"
    assert (best.settings, list(best.tied)) == (OWN, [BETTER]), "the first is kept unless another is better beyond noise"
    assert [accuracy.share for accuracy in best.accuracies] == [0.9] * 3


@pytest.mark.parametrize(("at_once", "seconds"), [(1, 1.5), (2, 0.75), (4, 0.375)])
def test_an_update_takes_a_candidate_its_share_of_what_it_takes_those_trained_with_it(
    tmp_path, monkeypatch, at_once, seconds
):
    """Four candidates of which memory holds some at once: the seconds of each are those of all that are."""
    folder = tmp_path / search.PACE
    trials = [SimpleNamespace(job=SimpleNamespace(folder=folder / str(number))) for number in range(4)]

    def run(_, until: int) -> None:
        for number in range(4):
            part = range(number - number % at_once, number - number % at_once + at_once)
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            records = [{"step": step, "time/rollout": 1.0, "time/update": 0.5} for step in range(1, until + 1)]
            (folder / str(number) / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            write_index(folder, dict.fromkeys("0123", ()), "fused", set(map(str, part)))

    rates = SimpleNamespace(key=RATE, values=[1e-6, 3e-6, 1e-5, 3e-5])
    monkeypatch.setattr(search, "stages", lambda *_: [rates])
    s: Any = SimpleNamespace(
        cfg=None, end=40, folder=tmp_path, run=run, trial=lambda stage, number, settings: trials[number]
    )
    assert measure_pace(s, OWN, 1).update == seconds


def test_with_one_seed_there_is_nothing_more_to_train():
    s = session(finalists=2, seeds=1)
    best = run_finalists(s, OWN)
    assert (best.settings, best.tied, s.trained) == (OWN, [WORSE, BETTER], [])
