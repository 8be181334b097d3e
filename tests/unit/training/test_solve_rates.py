from __future__ import annotations

import dataclasses
import json
import re

import pytest
from hydra import compose, initialize_config_dir

from agent_tunix.config.load import config_folder, validate
from agent_tunix.config.schema import Config
from agent_tunix.engine import cache_folder
from agent_tunix.errors import UserError
from agent_tunix.training import solve_rates
from agent_tunix.training.play import Answers
from agent_tunix.training.setup import Loaded, Setup, prepare
from agent_tunix.training.solve_rates import FILE, known, on_solvable

ATTEMPTS = 4
SMALL = ["+experiment=quick_test", "data.num_examples=40", "training.micro_batch_size=2", f"data.solve_attempts={ATTEMPTS}"]
LOADED = Loaded()  # the model


def configured(*overrides: str) -> Config:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return validate(compose("config", [*SMALL, "data.solve_rate=[0.25,0.75]", *overrides]), Config)


def prepared(*overrides: str) -> Setup:
    """A run of a process of its own, but for the model."""
    return dataclasses.replace(prepare(configured(*overrides), LOADED, lambda text: None), solved={})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "of_user", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "solve-rates"


@pytest.fixture
def measured(cache, monkeypatch):
    """What was asked of the sampler; of every five problems the first is never solved, and the last always."""

    def answers(engine, policy, playing, examples, asking):
        asked.append((asking.sampling, asking.temperature))
        right, wrong = "<reasoning>so</reasoning>\n<answer>{}</answer>", "<answer>{}</answer>"
        drawn = [(right,) * (i % 5) + (wrong,) * (ATTEMPTS - i % 5) for i in range(len(examples))]
        return Answers([[text.format(one.answer) for text in texts] for one, texts in zip(examples, drawn, strict=True)])

    asked: list = []
    monkeypatch.setattr(solve_rates, "answers_to", answers)
    return asked


def test_a_run_trains_on_what_is_solved_now_and_then(measured):
    """By the accuracy of an evaluation, which wants the format too, of completions that are drawn as in training."""
    whole, said = prepared(), list[str]()
    r = on_solvable(whole, said.append)
    assert r.task.train == [example for i, example in enumerate(whole.task.train) if i % 5 in (1, 2, 3)]
    assert r.plan.total_batches == len(r.task.train) // 2 == len(r.stream.examples) // 2
    assert r.task.validation == whole.task.validation
    lines = [json.loads(line) for line in r.solve_rates.splitlines()]
    assert lines[7] == {"question": whole.task.train[7].question, "solved": 2, "attempts": 4}
    [(sampling, temperature)] = measured
    assert (sampling, temperature) == (dataclasses.replace(r.sampling, num_generations=4), r.cfg.generation.temperature)
    n, kept = len(whole.task.train), len(r.task.train)
    assert said[1].startswith(f"{kept} of {n} training problems are kept, which are solved in a share of 0.25 to 0.75 of 4")


def test_without_bounds_nothing_is_measured(measured):
    whole = prepared("data.solve_rate=null")
    assert on_solvable(whole, print) is whole
    assert measured == []


def test_what_was_measured_is_found_again_by_runs_that_ask_the_same(measured):
    first = on_solvable(prepared(), print)
    again = on_solvable(prepared("optimizer.learning_rate=3e-6", "data.solve_rate=[0.5,1.0]"), print)
    assert len(measured) == 1
    assert again.solve_rates == first.solve_rates
    assert again.task.train != first.task.train


OTHERWISE = ["seed=7", "generation.temperature=0.9", "generation.top_k=5", "data.num_examples=44", "data.solve_attempts=5"]
OTHERWISE += ["model.lora_rank=3", "generation.max_generation_steps=20", "data.system_prompt='How many?'"]


@pytest.mark.parametrize("other", OTHERWISE)
def test_a_run_that_asks_otherwise_measures_anew(measured, monkeypatch, other):
    monkeypatch.setattr(solve_rates, "grade", lambda *given: {"accuracy": 0.5})
    for overrides in ([], [other]):
        on_solvable(prepared(*overrides), lambda text: None)
    assert len(measured) == 2


def test_jobs_of_one_process_measure_once_also_where_there_is_no_cache(measured, monkeypatch):
    def refused(folder) -> None:
        raise UserError("others may write to it")

    monkeypatch.setattr(cache_folder, "open_for_one", refused)
    first, said = prepared(), list[str]()
    kept = [on_solvable(one, said.append).task.train for one in (first, dataclasses.replace(first))]
    assert kept[0] == kept[1]
    assert len(measured) == 1
    assert said[0] == "warning: how often problems are solved is not kept for other runs: others may write to it"


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text.replace("[0, 1, 2", "[0, 1, 3"), lambda text: "[]"]
)
def test_a_damaged_file_of_the_cache_is_measured_anew(measured, cache, damage):
    first = on_solvable(prepared(), print)
    (path,) = cache.iterdir()
    path.write_text(damage(path.read_text()))
    assert on_solvable(prepared(), print).solve_rates == first.solve_rates
    assert len(measured) == 2


def test_fewer_problems_than_a_batch_are_refused_with_what_was_measured(measured):
    r = prepared("data.solve_rate=[0.3,0.4]")
    n = len(r.task.train)
    with pytest.raises(
        UserError, match=re.escape(f"data.solve_rate=[0.3,0.4] keeps 0 of {n} training problems, fewer than")
    ) as told:
        on_solvable(r, print)
    assert "attempts: 0: 8 problems, 1: 7 problems, 2: 7 problems, 3: 7 problems, 4: 7 problems.\n" in str(told.value)


def test_many_attempts_are_told_by_ranges():
    assert solve_rates._distribution([0, 1, 2, 63, 64], 64) == "0 to 5: 3 problems, 60 to 64: 2 problems"


def test_a_run_goes_on_by_its_own_file_whatever_the_cache_says(measured, tmp_path):
    first = on_solvable(prepared(), print)
    (tmp_path / FILE).write_text(first.solve_rates.replace('"solved": 4', '"solved": 2'))
    assert on_solvable(prepared(), print, tmp_path).task.train == first.task.train, "of a folder that holds no run"
    (tmp_path / "config.yaml").touch()
    r = on_solvable(prepared(), print, tmp_path)
    assert len(r.task.train) == len(first.task.train) + 7
    assert len(measured) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.partition("\n")[2],
        lambda text: text.replace('"solved": 3', '"solved": 5'),
        lambda text: text.replace('"attempts": 4', '"attempts": 8'),
        lambda text: "[1]\n",
    ],
)
def test_a_damaged_file_of_a_run_is_refused(measured, tmp_path, damage):
    (tmp_path / FILE).write_text(damage(on_solvable(prepared(), print).solve_rates))
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=FILE):
        on_solvable(prepared(), print, tmp_path)


def test_a_plan_finds_what_was_measured_by_the_names_of_the_model(measured):
    """It reads no weights, so of another model with the same prompts it must know nothing."""
    r = prepared()
    asked = r.cfg, r.task, r.model.tokenizer
    assert known(*asked) is None
    measured_ = on_solvable(r, print)
    assert known(*asked) == [json.loads(line)["solved"] for line in measured_.solve_rates.splitlines()]
    other = r.cfg.model_copy(update={"model": r.cfg.model.model_copy(update={"weights": "another/base"})})
    assert known(other, *asked[1:]) is None
