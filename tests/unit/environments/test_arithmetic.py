from __future__ import annotations

import itertools
import re

import pytest

from agent_tunix.environments.arithmetic import LEVELS, TEMPLATES, Problem, generate, split_of
from agent_tunix.errors import UserError

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module", params=range(len(LEVELS)))
def level(request):
    return request.param


@pytest.fixture(scope="module")
def problems(level):
    return {split: generate(2000, seed=0, split=split, level=level) for split in SPLITS}


def test_splits_share_no_pair_of_numbers(problems):
    pairs = {split: {(p.a, p.b) for p in some} for split, some in problems.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not pairs[one] & pairs[other]


def test_eighty_percent_of_the_pairs_are_for_training(level):
    numbers = LEVELS[level]
    splits = [split_of(a, b) for a in numbers for b in numbers if b <= a]
    assert 0.75 < splits.count("train") / len(splits) < 0.85
    assert abs(splits.count("test") - splits.count("validation")) < 0.05 * len(splits)


def test_problems_of_a_split_differ_and_cover_all_families(problems):
    for some in problems.values():
        assert len({p.question for p in some}) == len(some)
        assert {p.family for p in some} == set(TEMPLATES)


def test_the_answer_follows_from_the_numbers_in_the_question(problems):
    for p in itertools.chain(*problems.values()):
        first, second = map(int, re.findall(r"\d+", p.question))
        want = {"sum": first + second, "remainder": first - second, "shortfall": second - first}[p.family]
        assert p.answer == want >= 0


@pytest.mark.parametrize(
    ("family", "question", "answer"),
    [
        ("sum", "Ann has 12 pears. Ann finds 7 more. How many pears does Ann have?", 19),
        ("remainder", "Ann has 12 pears. Ann gives away 7. How many pears does Ann have?", 5),
        ("shortfall", "Ann has 7 pears. Ann wants 12. How many more pears does Ann need?", 5),
    ],
)
def test_families(family, question, answer):
    problem = Problem(family, "Ann", "pears", 12, 7)
    assert (problem.question, problem.answer) == (question, answer)


def test_a_seed_decides_the_problems():
    assert generate(50, 1, "train") == generate(50, 1, "train") != generate(50, 2, "train")


def test_a_level_has_its_numbers(problems, level):
    assert {number for some in problems.values() for p in some for number in (p.a, p.b)} <= {*LEVELS[level]}


def test_a_level_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"data.level=2: arithmetic has the levels 0 to 1"):
        generate(1, 0, "train", level=2)


def test_more_problems_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"the test split has \d+: lower evaluation.num_examples"):
        generate(1_000_000, 0, "test")
