from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import hypothesis.strategies as st
from hypothesis import given

from agent_tunix.lab.plan.plot import COLUMNS, as_svg, in_characters

rates = st.lists(st.floats(-1, 1), min_size=1, max_size=300)


@given(rates)
def test_any_curve_can_be_drawn(values):
    lines = in_characters(values).splitlines()
    assert len(lines) == 10
    assert max(map(len, lines)) <= COLUMNS + 30
    ElementTree.fromstring(as_svg(values, "rate"))


def test_the_ends_of_a_short_curve_are_named_apart():
    assert in_characters([1.0] * 4).splitlines()[-1].split() == ["update", "1", "update", "4"]


def test_a_ramp_fills_its_lower_right_half():
    rows = [line.split("|")[1] for line in in_characters([i / 59 for i in range(60)]).splitlines()[:8]]
    assert rows[0].lstrip() != rows[0], "only the end reaches the top"
    assert rows[-1].count("█") > 50


def test_what_rises_below_zero_is_drawn_to_rise():
    *rows, _, _ = in_characters([-1.0, -0.75, -0.5]).splitlines()
    assert rows[0] == "-5.0e-01 |  █"
    assert rows[-1] == "-1.0e+00 | ██"
    points = ElementTree.fromstring(as_svg([-1.0, -0.5], "reward")).find("{*}polyline").get("points")
    assert points == "40.0,200.0 600.0,40.0"
