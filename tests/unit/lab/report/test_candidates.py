from __future__ import annotations

import pytest

from agent_tunix.lab.doctor.sweep import RATE
from agent_tunix.lab.report.candidates import swept_key


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ([], None),
        ([{}], None),
        ([{"seed": 1, RATE: 1e-5}, {"seed": 2, RATE: 1e-6}], RATE),
        ([{"name": "a", "seed": 1}, {"name": "b", "seed": 2}], "seed"),
        ([{"name": "a", "rank": None}, {"name": "b", "rank": 2}], "name"),
    ],
)
def test_a_sweep_is_about_its_rate_or_else_about_numbers_or_else_about_whatever_is_first(settings, key):
    assert swept_key(settings) == key
