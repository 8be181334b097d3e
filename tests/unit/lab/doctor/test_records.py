"""The statistics by which a run is judged."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.lab.doctor.records import Accuracy, RunRecords, difference, read_run, scatter
from agent_tunix.lab.doctor.signs import learnt


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=30))
def test_scatter_is_about_numpys_line_which_takes_two_degrees_of_freedom(values):
    steps = np.arange(len(values))
    residuals = values - np.polyval(np.polyfit(steps, values, 1), steps)
    assert scatter(values) == pytest.approx(np.sqrt((residuals**2).sum() / (len(values) - 2)), abs=1e-6)


@pytest.mark.parametrize(("n", "gained"), [(2, False), (20, True)])
def test_all_of_a_few_problems_after_none_of_them_are_not_certain(n, gained):
    evals = [{"step": step, "n": n, "accuracy": share} for step, share in ((0, 0.0), (9, 1.0))]
    assert learnt(RunRecords({}, evals=evals)) is gained
    assert difference(Accuracy(0, 0.0, n), Accuracy(9, 0.0, n)).error > 0


def test_a_configuration_that_is_written_anew_is_read_anew(tmp_path):
    file = tmp_path / "config.yaml"
    for seed, second in ((1, 1000), (2, 2000)):
        file.write_text(f"seed: {seed}\n")
        os.utime(file, (second, second))  # however coarse the clock of the disk
        assert read_run(tmp_path).config["seed"] == seed
