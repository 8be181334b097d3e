"""Who is kept: by accuracy, and only as far as noise allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.lab.doctor.records import Accuracy
from agent_tunix.lab.tune.selection import Result, best_finalist, choose, ranked, standings, survivors, tied

COUNTS = st.dictionaries(st.sampled_from([1e-7, 1e-6, 1e-5, 1e-4, 1e-3]), st.none() | st.integers(0, 200), min_size=1)


def results(counts: dict[float, int | None], n: int = 200) -> list[Result]:
    return [Result(value, None if right is None else Accuracy(10, right / n, n)) for value, right in counts.items()]


def seeds(*shares: float, n: int = 200) -> list[Accuracy]:
    return [Accuracy(40, share, n) for share in shares]


@given(counts=COUNTS, order=st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(counts, order):
    found = results(counts)
    shuffled = order.sample(found, len(found))
    assert ranked(found, 1e-5) == ranked(shuffled, 1e-5)
    assert survivors(found, 1e-5, 2) == survivors(shuffled, 1e-5, 2)
    assert choose(found, 1e-5) == choose(shuffled, 1e-5)


@given(counts=COUNTS, most=st.integers(1, 5))
def test_survivors_are_measured_few_and_never_worse_than_those_that_are_dropped(counts, most):
    found = results(counts)
    measured = [r for r in found if r.accuracy]
    kept = survivors(found, 1e-5, most)
    assert min(2, most, len(measured)) <= len(kept) <= most
    assert all(r.accuracy for r in kept)
    ruled = [r for r in kept if r.value != 1e-5]
    for dropped in (r for r in measured if r not in kept):
        assert all(r.accuracy.share >= dropped.accuracy.share for r in ruled)


@given(counts=COUNTS)
def test_the_incumbent_is_kept_unless_another_is_better_beyond_noise(counts):
    found = results(counts)
    chosen, own = choose(found, 1e-5), counts.get(1e-5)
    measured = [r.accuracy for r in found if r.accuracy]
    if not measured:
        assert chosen is None
    elif own is not None and all(tied(a, Accuracy(10, own / 200, 200)) or a.share < own / 200 for a in measured):
        assert chosen == 1e-5
    else:
        assert counts[chosen] == max(right for right in counts.values() if right is not None)


def test_a_known_sweep_has_its_known_answer():
    ends = results({1e-7: 75, 1e-6: 107, 1e-5: 193, 1e-4: 3})
    assert choose(ends, 1e-7) == 1e-5
    assert [r.value for r in survivors(ends, 1e-5, 2)] == [1e-5, 1e-6]


def test_equals_give_way_to_the_value_nearer_to_the_incumbent():
    assert [r.value for r in ranked(results({1e-7: 50, 1e-6: 50, 3e-5: 50, 1e-3: 50}), 1e-5)] == [3e-5, 1e-6, 1e-3, 1e-7]
    assert [r.value for r in ranked(results({0.0: 50, 0.1: 50, 0.2: 50}), 0.05)] == [0.1, 0.2, 0.0]


def test_of_two_values_as_near_the_higher_goes_on_where_nothing_has_moved():
    assert [r.value for r in survivors(results({3e-4: 50, 1e-3: 50, 3e-3: 50}), 1e-3, 2)] == [1e-3, 3e-3]


def test_standings_compare_each_value_where_both_were_last():
    history = [results({1e-6: 80, 1e-5: 120, 1e-4: 10, 1e-3: None}), results({1e-6: 185, 1e-5: 190})]
    found = {one.value: one for one in standings(history, 1e-5)}
    assert {value: one.tied for value, one in found.items()} == {1e-6: True, 1e-4: False, 1e-3: False}
    assert found[1e-6].chosen.share == 0.95
    assert found[1e-4].chosen.share == 0.6


def test_the_first_finalist_is_kept_unless_another_is_better_beyond_noise():
    own = seeds(0.80, 0.82, 0.81)
    assert best_finalist([own]) == 0
    assert best_finalist([own, seeds(0.82, 0.83, 0.82)]) == 0
    assert best_finalist([own, seeds(0.60, 0.62, 0.61), seeds(0.95, 0.97, 0.96)]) == 2
    assert best_finalist([own, seeds(0.99, 0.99, 0.40)]) == 0
