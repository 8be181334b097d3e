"""Lines are thinned without losing what matters in them, and colours can be told apart from the page."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_tunix.lab.report.chart import (
    HUES,
    PAGE_POINTS,
    SCALES,
    Chart,
    Series,
    hue,
    on_scale,
    places,
    share_of_page,
    thin,
    thinned,
    trend_of,
)

LIGHT, DARK = "#f6f7f9", "#1d2127"  # what the charts of page.css are drawn on


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(4, 80))
def test_a_thin_line_keeps_its_ends_and_its_extremes(values, most):
    points = list(enumerate(values))
    kept = thin(points, most)
    assert len(kept) <= max(most, 0)
    assert [p for p in points if p in kept] == list(kept), "in order, and only what was there"
    if points:
        assert kept[0] == points[0]
        assert kept[-1] == points[-1]
        assert {min(values), max(values)} <= {y for _, y in kept}


@pytest.mark.parametrize("number", [0, 1, 7, 500, 5000])
def test_all_series_together_keep_to_what_a_page_can_bear(number):
    assert number * share_of_page(number) <= PAGE_POINTS
    assert share_of_page(number) >= 8


def test_points_with_notes_are_candidates_and_all_kept():
    points = [(float(i), 0.5) for i in range(50)]
    chart = Chart("a", "A", "", [Series("s", "s", points, hue(0), notes=["n"] * 50), Series("t", "t", points, hue(1))])
    noted, line = thinned([chart], 10)[0].series
    assert len(noted.points) == 50
    assert len(line.points) <= 10


@given(st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=60), st.integers(1, 10))
def test_a_trend_keeps_the_mean_and_stays_within_its_line(values, stretches):
    trend = trend_of(list(enumerate(values)), stretches)
    assert len(trend) == stretches
    assert all(min(values) - 1e-9 <= y <= max(values) + 1e-9 for _, y in trend)
    assert [x for x, _ in trend] == sorted(x for x, _ in trend)
    if len(values) % stretches == 0:
        assert sum(y for _, y in trend) / stretches == pytest.approx(sum(values) / len(values), abs=1e-6)


@pytest.mark.parametrize(("noisy", "number", "has_trend"), [(True, 500, True), (True, 50, False), (False, 500, False)])
def test_only_long_lines_that_scatter_get_a_trend(noisy, number, has_trend):
    points = [(float(i), i % 7 / 7) for i in range(number)]
    (series,) = thinned([Chart("a", "A", "", [Series("s", "s", points, hue(0))], noisy=noisy)], 100)[0].series
    assert bool(series.trend) == has_trend


def test_values_lie_by_their_logarithm_where_all_are_positive():
    assert places([1e-7, 1e-6, 1e-5, 1e-4]) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert places([0, 1, 2]) == pytest.approx([0, 0.5, 1])
    assert places([3.0]) == [0.5]


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("pair", [*HUES, *map(on_scale, (0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1))], ids=str)
def test_every_colour_stands_out_from_its_page(pair):
    assert contrast(pair[0], LIGHT) >= 3
    assert contrast(pair[1], DARK) >= 3


@pytest.mark.parametrize("scale", SCALES, ids=["light", "dark"])
def test_a_scale_grows_brighter_so_that_hue_is_not_needed_to_read_it(scale):
    shades = [luminance(on_scale(i / 20)[SCALES.index(scale)]) for i in range(21)]
    assert all(a < b for a, b in itertools.pairwise(shades))
