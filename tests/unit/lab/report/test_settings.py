"""The configuration is shown whole, with what is not as shipped and what differs between candidates marked."""

from __future__ import annotations

from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.report.settings import settings


def test_values_that_are_not_as_shipped_and_values_that_vary_are_marked(write_run, tmp_path):
    runs = [
        doctor.read(write_run(tmp_path / name, optimizer__learning_rate=rate, optimizer__eps=1e-6))
        for name, rate in (("a", 1e-5), ("b", 1e-4))
    ]
    rows = {row.key: row for row in settings(runs)}
    assert rows["optimizer.learning_rate"].varied
    assert rows["optimizer.learning_rate"].value == "1e-05, 0.0001"
    assert rows["optimizer.eps"].shipped == "1e-08"
    assert not rows["optimizer.eps"].varied
    assert rows["optimizer.weight_decay"].shipped is None
    assert rows["optimizer.weight_decay"].value == "0.01"


def test_no_run_has_no_settings():
    assert settings([]) == []
