"""`data.solve_rate`: measured once, by the sampler, before a run; the run goes on by its own record of it."""

from __future__ import annotations

import contextlib
import json
import re
import shutil

import pytest
from same_runs import RUN, assert_same_run, records

from agent_tunix.engine import cache_folder
from agent_tunix.training import solve_rates
from agent_tunix.training.run_folder import RunFolder

LONG_RUNS = True
SOLVABLE = [*RUN, "data.num_examples=32", "data.solve_rate=[0.01,0.99]", "data.solve_attempts=4"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "of_user", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("agent_tunix.training.loading._cache", lambda notice: None)
    return tmp_path / "cache"


def test_a_run_on_what_its_policy_can_learn_is_planned_made_and_gone_on_with(command, cache, tmp_path, monkeypatch):
    asked = "how many problems data.solve_rate keeps is known only when the run starts"
    assert asked in command("plan", *SOLVABLE, "hydra.run.dir=plan").out.replace("\n", " ")
    outcome = command("train", *SOLVABLE, "hydra.run.dir=straight")
    assert outcome.code == 0, outcome.err
    straight, run = tmp_path / "straight", tmp_path / "run"
    rates = records(straight, "solve_rates.jsonl")
    kept = {rate["question"] for rate in rates if 0 < rate["solved"] < 4}
    assert f"{len(kept)} of {len(rates)} training problems are kept" in outcome.out
    assert 2 <= len(kept) < len(rates), "the tiny model solves some always"
    assert {sample["prompt"] for sample in records(straight, "samples.jsonl")} <= kept
    steps = len(records(straight, "metrics.jsonl"))
    planned = command("plan", *SOLVABLE, "hydra.run.dir=plan").out
    assert asked not in planned.replace("\n", " ")
    assert re.search(rf"updates\s+│\s+{steps}\b", planned)

    def deadly(folder, record) -> None:
        write(folder, record)
        if record["step"] == 5:
            raise RuntimeError("killed")

    def asked_again(*_):
        raise AssertionError("measured again")

    write = RunFolder.metrics
    monkeypatch.setattr(solve_rates, "answers_to", asked_again)  # the cache has it
    with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
        patch.setattr(RunFolder, "metrics", deadly)
        assert command("train", *SOLVABLE, "hydra.run.dir=run").code != 0
    shutil.rmtree(cache)
    assert command("train", "training.resume=run").code == 0
    assert_same_run(run, straight, step=steps)
    assert (run / "solve_rates.jsonl").read_text() == (straight / "solve_rates.jsonl").read_text()
    changed = {
        "data.solve_rate=null": "began with other training examples",
        "data.solve_attempts=8": "does not hold 8 attempts",
    }
    for change, said in changed.items():
        outcome = command("train", "training.resume=run", "training.num_epochs=2", change)
        assert outcome.code == 2
        assert said in outcome.err
    (run / "solve_rates.jsonl").write_text(json.dumps({"question": "?"}))
    outcome = command("train", "training.resume=run")
    assert (outcome.code, "solve_rates.jsonl" in outcome.err) == (2, True)
