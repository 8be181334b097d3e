"""What the charts say of the numbers that they show."""

from __future__ import annotations

import dataclasses

import pytest

from agent_tunix.lab.doctor import doctor
from agent_tunix.lab.report.curves import Line, overlaid_charts, run_charts


@pytest.mark.parametrize(
    ("weights", "note"),
    [
        ([{}, {}], "Weight 1 in the reward."),
        ([{"answer": 1.0}, {"answer": 3.0}], "Weight 1, 3 in the reward."),
        ([{"answer": 0.0}, {"answer": 0.0}], "Watched, not trained on."),
    ],
)
def test_a_function_is_shown_with_its_weight_which_is_1_where_none_is_given(write_run, tmp_path, weights, note):
    run = doctor.read(write_run(tmp_path / "run"))
    runs = [dataclasses.replace(run, config={**run.config, "reward": {"weights": given}}) for given in weights]
    charts = overlaid_charts([Line("0", "", ("", ""), False, one) for one in runs])
    assert next(chart for chart in charts if chart.id == "reward/answer").note.startswith(note)
    reward = next(chart for chart in run_charts(runs[0]) if chart.id == "reward")
    assert f"answer, weight {weights[0].get('answer', 1.0):g}" in [series.name for series in reward.series]
