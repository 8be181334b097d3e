from __future__ import annotations

import pytest

from agent_tunix import cli


@pytest.mark.parametrize(
    ("own", "worth"),
    [
        ({}, 0.5),
        ({"status": "interrupted"}, 0.5),
        ({"status": "diverged"}, 0.0),
        ({"rollbacks": [{"step": 3}]}, 0.0),
        ({"final_eval": None}, 0.0),
    ],
    ids=str,
)
def test_a_run_that_diverged_is_worth_nothing_to_a_search_even_where_it_went_on_at_another_rate(own, worth):
    assert cli._accuracy({"status": "completed", "final_eval": {"accuracy": 0.5}, "rollbacks": [], **own}) == worth
