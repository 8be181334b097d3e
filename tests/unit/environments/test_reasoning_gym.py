from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from agent_tunix.config.load import config_folder
from agent_tunix.config.schema import DataSection
from agent_tunix.environments.reasoning_gym import rows, score
from agent_tunix.errors import UserError

pytest.importorskip("reasoning_gym", reason="reasoning-gym comes with the extra `reasoning-gym`")


def data(**keys) -> DataSection:
    shipped = (OmegaConf.load(config_folder() / "data" / f"{name}.yaml") for name in ("jsonl", "reasoning_gym"))
    section = {key: value for file in shipped for key, value in file.items() if key != "defaults"}
    return DataSection.model_validate({**OmegaConf.to_container(OmegaConf.create(section)), **keys})


def questions(data, split, count=30, seed=1, without=()):
    return [row.question for row in rows(data, split, count, seed, without)]


def test_problems_follow_from_split_and_seed_and_no_question_comes_twice():
    gcd = data(task="gcd")
    assert questions(gcd, "train") == questions(gcd, "train")
    assert questions(gcd, "train")[:10] == questions(gcd, "train", count=10)
    splits = [questions(gcd, "train"), questions(gcd, "train", seed=2), questions(gcd, "validation"), questions(gcd, "test")]
    assert len({question for split in splits for question in split}) == 4 * 30
    assert questions(gcd, "test") == questions(gcd, "test", seed=2), "held-out problems are those of every run"


def test_what_is_held_out_is_not_trained_on_and_a_small_task_ends():
    coins = data(task="coin_flip", settings={"min_trials": 3, "max_trials": 3})
    held_out = questions(coins, "validation", count=3)
    trained_on = questions(coins, "train", count=1000, without=held_out)
    assert 0 < len(trained_on) < 1000
    assert len(set(trained_on)) == len(trained_on)
    assert not set(trained_on) & set(held_out)


@pytest.mark.parametrize("task", ["chain_sum", "word_sorting", "countdown", "prime_factorization"])
def test_the_tasks_own_scorer_is_the_reward(task):
    for row in rows(data(task=task), "train", 5, 1):
        assert score("", f"<reasoning>so</reasoning><answer>{row.answer}</answer>", row.answer, row.fields) == 1
        assert score("", f"<answer>{row.answer} or not</answer>", row.answer, row.fields) < 1
        assert score("", row.answer, row.answer, row.fields) == 0, "no answer block"


def test_another_solution_than_the_one_that_is_noted_counts_too():
    """As 1 + 2 for 2 + 1."""
    (row,) = rows(data(task="countdown", settings={"min_numbers": 2, "max_numbers": 2, "operators": ["+"]}), "train", 1, 1)
    first, second = row.fields["metadata"]["numbers"]
    for written in (f"{first} + {second}", f"{second} + {first}"):
        assert score("", f"<answer>{written}</answer>", row.answer, row.fields) == 1


def test_levels_are_those_of_the_tasks_curriculum():
    def digits(level):
        asked = " ".join(questions(data(task="chain_sum", level=level), "train"))
        return max(len(word) for word in asked.split() if word.isdigit())

    assert digits(3) > digits(0)
    both = data(task="chain_sum", level=0, settings={"min_terms": 5, "max_terms": 5})
    assert all(question.count("+") + question.count(" - ") == 4 for question in questions(both, "train"))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task": "chain_sums"}, "did you mean chain_sum?"),
        ({"task": "gcd", "settings": {"min_numbers": 9, "max_numbers": 2}}, "refuses it"),
        ({"task": "gcd", "settings": {"numbers": 2}}, "numbers"),
        ({"task": "gcd", "settings": {"seed": 2}}, "data.settings.seed follows from the split"),
        ({"task": "gcd", "level": 99}, "the levels of gcd go from 0 to"),
        ({"task": "acre", "level": 1}, "no levels for acre"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_said(keys, said):
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        rows(data(**keys), "train", 3, 1)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task": None}, "needs a task"),
        ({"source": "table", "task": "gcd"}, "has no task"),
        ({"path": "x"}, "would not be read"),
    ],
)
def test_a_task_goes_with_its_source(keys, said):
    with pytest.raises(ValueError, match=said):
        data(**keys)
