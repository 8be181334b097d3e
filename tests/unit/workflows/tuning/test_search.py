from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agent_tunix.workflows.diagnosis.records import Accuracy
from agent_tunix.workflows.tuning.search import run_finalists
from agent_tunix.workflows.tuning.stages import RATE

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


def test_with_one_seed_there_is_nothing_more_to_train():
    s = session(finalists=2, seeds=1)
    best = run_finalists(s, OWN)
    assert (best.settings, best.tied, s.trained) == (OWN, [WORSE, BETTER], [])
