from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from agent_tunix.config.load import validate
from agent_tunix.config.schema import Config
from agent_tunix.lab.tune.closing import at_the_edge, best_yaml
from agent_tunix.lab.tune.stages import RATE, possible

COARSE = [1e-6, 1e-5]


def session(rates: list[float], coarse: int = len(COARSE), gained: bool = True) -> Any:
    """What of a search says how far it has looked."""
    trials = [SimpleNamespace(settings={RATE: rate}) for rate in rates]
    record = {"gained": gained, "stages": [{"no_difference": True}]}
    return SimpleNamespace(trials=trials, record=record, cfg=SimpleNamespace(tune=SimpleNamespace(rates=coarse)))


@pytest.mark.parametrize("best", [1e-6, 3e-5])
def test_a_best_rate_beyond_which_none_was_tried_is_at_the_edge(best):
    said = at_the_edge(session([*COARSE, 3e-6, 3e-5]), {RATE: best})
    assert "1e-06 to 3e-05" in said
    assert "tune.rates=4" in said


def test_more_rates_than_a_search_takes_are_not_advised():
    assert at_the_edge(session(COARSE, coarse=7), {RATE: 1e-5}).endswith(": tune.rates=9 looks further.")
    assert at_the_edge(session(COARSE, coarse=8), {RATE: 1e-5}).endswith("what was tried, 1e-06 to 1e-05.")


def test_a_best_coarse_rate_beyond_which_a_fine_one_was_tried_is_not():
    assert at_the_edge(session([*COARSE, 3e-6, 3e-5]), {RATE: 1e-5}) == ""


def test_where_no_rate_did_anything_it_is_said_how_to_look_further():
    said = at_the_edge(session([*COARSE, 3e-6, 3e-5], gained=False), {RATE: 1e-5})
    assert said == "No rate from 1e-06 to 3e-05 moved the accuracy: tune.rates=4 looks further."


def test_a_rate_below_lr_min_is_written_with_one_that_it_goes_with(config):
    base = validate(config, Config)
    s: Any = SimpleNamespace(base=base, cfg=base, record={"verdict": "So it is."})
    for rate, schedule in ((1e-8, {"lr_min": 1e-9}), (1e-5, None)):
        written = OmegaConf.create(best_yaml(s, possible(base, {RATE: rate})))
        assert (written.optimizer.learning_rate, written.get("scheduler")) == (rate, schedule)


def test_what_the_schedule_has_of_its_own_is_written_as_it_is_in_the_whole_run(config):
    """Not as it was shortened for candidates, and no more than differs from the file of its name."""
    own = {"scheduler_name": "wsd", "warmup_steps": 20, "total_steps": None, "lr_min": 1e-7, "decay_ratio": 0.5}
    whole, short = (validate({**config, "scheduler": own | {"warmup_steps": n}}, Config) for n in (20, 2))
    s: Any = SimpleNamespace(base=short, cfg=whole, record={"verdict": "So it is."})
    written = OmegaConf.create(best_yaml(s, possible(short, {RATE: 1e-5})))
    assert written.scheduler == {"warmup_steps": 20, "decay_ratio": 0.5}
