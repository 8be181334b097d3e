"""A curve, drawn with characters for a terminal and with lines for a picture."""

from __future__ import annotations

from collections.abc import Sequence

ROWS, COLUMNS = 8, 60
WIDTH, HEIGHT, MARGIN = 640, 240, 40


def in_characters(values: Sequence[float], last: int | None = None) -> str:
    """Bars of a height that follows the values, eight rows high, with the greatest value at the top left.

    There is a bar for every update, or for evenly spaced ones. Bars stand on zero, or on the least value if that is below.
    """
    low, top = _ends(values)
    columns = min(COLUMNS, len(values))
    picked = [values[i * (len(values) - 1) // max(columns - 1, 1)] for i in range(columns)]
    eighths = [round(8 * ROWS * (value - low) / (top - low)) for value in picked]
    lines = []
    for row in reversed(range(ROWS)):
        cells = "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, height - 8 * row))] for height in eighths)
        label = f"{top:.1e}" if row == ROWS - 1 else "" if row else f"{low:.1e}" if low else "0"
        lines.append(f"{label:>8} |{cells}")
    return "\n".join(
        [*lines, f"{'':>8} +{'-' * columns}", f"{'':>10}update 1 {f'update {last or len(values)}':>{max(columns - 9, 0)}}"]
    )


def as_svg(values: Sequence[float], title: str, last: int | None = None) -> str:
    """A picture that any browser shows."""
    low, top = _ends(values)
    across, up = (WIDTH - 2 * MARGIN) / max(len(values) - 1, 1), (HEIGHT - 2 * MARGIN) / (top - low)
    points = " ".join(f"{MARGIN + i * across:.1f},{HEIGHT - MARGIN - (v - low) * up:.1f}" for i, v in enumerate(values))
    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    below = f'<text x="4" y="{bottom + 4}">{low:.1e}</text>\n' if low else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<text x="{MARGIN}" y="20">{title}</text>\n'
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{right}" fill="none" stroke="#888"/>\n'
        f'<polyline points="{points}" fill="none" stroke="#2266cc" stroke-width="2"/>\n'
        f'<text x="4" y="{MARGIN + 4}">{top:.1e}</text>\n{below}<text x="{MARGIN}" y="{bottom + 16}">1</text>\n'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">update {last or len(values)}</text>\n</svg>\n'
    )


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """The values at the bottom and at the top of a curve; a reward may be below zero all the way."""
    low, top = min(0.0, *values), max(values)
    return low, top if top > low else low + 1.0
