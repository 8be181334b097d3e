"""Successive halving: the budget holds whatever the candidates do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.tune.halving import Bracket, Price, kept, lengths, longest, rungs, stage_cost, whole_cost
from agent_tunix.lab.tune.selection import Result, survivors

SHARES = st.one_of(st.none(), st.floats(0, 1))


@given(batches=st.integers(1, 500), iterations=st.integers(1, 4))
def test_rungs_rise_to_the_end_and_lie_between_batches(batches, iterations):
    places = rungs(batches, iterations)
    assert places == sorted(set(places))
    assert places[-1] == batches * iterations
    assert places[0] > 0
    assert all(place % iterations == 0 for place in places)


def test_each_rung_is_twice_as_far_as_the_one_before():
    assert rungs(40, 1) == [10, 20, 40]
    assert rungs(8, 2) == [4, 8, 16]
    assert rungs(1, 1) == [1]


@pytest.mark.parametrize(
    ("candidates", "sizes"), [(1, [1, 1, 1]), (2, [2, 2, 2]), (3, [3, 2, 2]), (4, [4, 2, 2]), (9, [9, 5, 3])]
)
def test_half_goes_on_and_never_less_than_two(candidates, sizes):
    assert [kept(candidates, rung) for rung in range(3)] == sizes


@given(data=st.data(), candidates=st.integers(1, 9), trained=st.integers(0, 1), batches=st.integers(1, 100))
def test_a_stage_never_costs_more_than_was_reckoned(data, candidates, trained, batches):
    """Whatever the accuracies are, and whether or not the candidate that was trained before is kept."""
    places, price = rungs(batches, 1), Price(update=1.0, rung=3.0)
    trained = min(trained, candidates)
    alive, spent = [float(value) for value in range(candidates)], 0.0
    for rung, place in enumerate(places):
        way = place - (places[rung - 1] if rung else 0)
        spent += sum(price.update * way + price.rung for value in alive if value >= trained)
        results = [
            Result(value, None if (share := data.draw(SHARES)) is None else Accuracy(place, share, 200)) for value in alive
        ]
        alive = [result.value for result in survivors(results, 0.0, kept(candidates, rung + 1))]
    assert spent <= stage_cost(Bracket(candidates, trained), places, price) + 1e-9


@pytest.mark.parametrize(("trained", "fresh"), [(0, (4, 2, 2)), (1, (3, 2, 2)), (3, (1, 1, 1))])
def test_no_more_is_reckoned_than_a_stage_can_cost(trained, fresh):
    """Where those that were trained before are dropped first, so that as many fresh ones go on as can."""
    ways = (10 + 3.0, 10 + 3.0, 20 + 3.0)
    most = sum(count * way for count, way in zip(fresh, ways, strict=True))
    assert stage_cost(Bracket(4, trained), [10, 20, 40], Price(update=1.0, rung=3.0)) == most


@given(budget=st.integers(1, 5000), whole=st.integers(1, 300), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_the_longest_runs_that_the_budget_allows_are_taken(budget, whole, sizes):
    def cost(batches: int) -> float:
        return whole_cost([Bracket(size) for size in sizes], rungs(batches, 1), 4, Price())

    possible = lengths(whole, 1)
    found = longest(budget, possible, cost)
    if found is None:
        assert cost(min(possible)) > budget
    else:
        assert cost(found) <= budget
        assert found == max(possible) or cost(found + 1) > budget


@given(per_epoch=st.integers(1, 60), epochs=st.integers(1, 5))
def test_a_shortened_run_is_part_of_an_epoch_or_whole_epochs(per_epoch, epochs):
    found = lengths(per_epoch, epochs)
    assert found == sorted(set(found))
    assert found[-1] == per_epoch * epochs
    assert all(batches <= per_epoch or batches % per_epoch == 0 for batches in found)
    assert found[0] >= min(8, per_epoch * epochs)
