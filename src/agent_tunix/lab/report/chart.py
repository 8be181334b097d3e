"""What a chart of the report is made of: series of points, their colours, and how many points a page can bear.

The page draws from these records; nothing here knows of HTML.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

Point = Sequence[float]  # x, y; and where the noise of y is known, the lower and the upper end of its 95 % interval
MOST_POINTS = 1000  # in one series: more than a screen is wide
PAGE_POINTS = 50_000  # in all series of a page, about 1 MB of text
LONG, STRETCHES = 200, 80  # points from which a noisy line is hard to read, and of how many its trend is made

# Colour-blind safe, as pairs for light and dark pages. Values on a scale go from dark to bright, names get hues.
HUES = (
    ("#0068a8", "#56b4e9"),
    ("#c44e00", "#ff944d"),
    ("#007f5f", "#35c99b"),
    ("#98428f", "#dd9fd6"),
    ("#806000", "#e6c229"),
    ("#4a4a4a", "#c8c8c8"),
)
SCALES = (
    ("#40105e", "#2f559f", "#117680", "#4a8a22", "#ce7b10"),
    ("#9a86f0", "#5aa5f5", "#3fc9b8", "#a5d84a", "#ffc94d"),
)

Colour = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, or a row of single points. `id` is what a legend switches: candidates share it between charts."""

    id: str
    name: str
    points: Sequence[Point]
    colour: Colour
    dash: int = 0  # the pattern of its line; 0: whole
    hollow: Sequence[float] = ()  # x of points that are not final
    notes: Sequence[str] = ()  # one for each point, for its tooltip; of these, one without an interval is a single seed
    colours: Sequence[Colour] = ()  # one for each point, where points are candidates
    trend: Sequence[Point] = ()  # means of stretches, for a long line that scatters


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something at one place of an axis, with its name."""

    at: float
    name: str


@dataclasses.dataclass(frozen=True)
class Chart:
    id: str
    title: str
    note: str  # what it shows and how to read it, for a person who was not there
    series: Sequence[Series]
    x_label: str = "update"
    percent: bool = False
    noisy: bool = False  # scatters from batch to batch, so that a long line gets its trend
    log_x: bool = False  # drawn so at first; there is a switch
    log_x_switch: bool = False
    log_y: bool = False
    log_y_switch: bool = False
    categories: Sequence[str] = ()  # names of the places 0, 1, 2 ... on the x axis
    levels: Sequence[Mark] = ()  # horizontal lines
    marks: Sequence[Mark] = ()  # vertical lines
    band: Sequence[float] = ()  # a range of x
    crosses: Sequence[Mark] = ()  # where there is no value, and why


def hue(index: int) -> Colour:
    return HUES[index % len(HUES)]


def on_scale(share: float) -> Colour:
    """The colour of a place from 0 to 1 between the least and the greatest value."""
    light, dark = (_between(scale, share) for scale in SCALES)
    return light, dark


def _between(scale: Sequence[str], place: float) -> str:
    """Straight from one colour of the scale to the next."""
    position = min(max(place, 0.0), 1.0) * (len(scale) - 1)
    i = min(int(position), len(scale) - 2)
    channels = (
        round(int(a, 16) + (position - i) * (int(b, 16) - int(a, 16)))
        for a, b in ((scale[i][c : c + 2], scale[i + 1][c : c + 2]) for c in (1, 3, 5))
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def places(values: Sequence[float]) -> list[float]:
    """Where values lie between the least and the greatest, from 0 to 1: by their logarithm where all are positive."""
    scaled = [math.log(value) for value in values] if all(value > 0 for value in values) else list(values)
    low, high = min(scaled), max(scaled)
    return [(value - low) / (high - low) if high > low else 0.5 for value in scaled]


def thin(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most `most` points (4 or more): both ends, and the least and the greatest of each stretch between them."""
    if len(points) <= most:
        return points
    stretches, inner = (most - 2) // 2, range(1, len(points) - 1)
    kept = {0, len(points) - 1}
    for s in range(stretches):
        stretch = inner[s * len(inner) // stretches : (s + 1) * len(inner) // stretches]
        kept |= {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def share_of_page(number_of_series: int) -> int:
    """How many points each series of a page may have."""
    return max(8, min(MOST_POINTS, PAGE_POINTS // max(1, number_of_series)))


def trend_of(points: Sequence[Point], stretches: int) -> list[Point]:
    """The mean of each stretch, at its middle."""
    cuts = [s * len(points) // stretches for s in range(stretches + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(cuts)]
    return [(statistics.fmean(p[0] for p in part), statistics.fmean(p[1] for p in part)) for part in parts]


def thinned(charts: Iterable[Chart], most: int) -> list[Chart]:
    """Charts with thinner lines, and with trends. A series with notes is left as it is: its points are candidates."""

    def thinner(series: Series, noisy: bool) -> Series:
        long = noisy and len(series.points) >= LONG
        trend = trend_of(series.points, min(STRETCHES, most // 4)) if long else ()
        return series if series.notes else dataclasses.replace(series, points=thin(series.points, most), trend=trend)

    return [dataclasses.replace(chart, series=[thinner(series, chart.noisy) for series in chart.series]) for chart in charts]
