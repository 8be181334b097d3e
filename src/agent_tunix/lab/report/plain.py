"""From the report's records to JSON that any parser takes, small enough for one page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from agent_tunix.lab.report.chart import share_of_page, thinned
from agent_tunix.lab.report.samples import shortened
from agent_tunix.types import Record

PAGE_TEXT = 400_000  # characters of completions on a page
LONGEST_TEXT = 4000  # of one


def bounded(page: Record) -> Record:
    """The same page with fewer points and shorter texts, where there are more than it can bear."""
    sections = page["sections"]
    most = share_of_page(sum(len(chart.series) for section in sections for chart in section["charts"]))
    shown = [column for section in sections for one in section.get("samples", ()) for column in one["columns"]]
    texts = sum(2 + sum(2 if one.turns else 1 for one in column.completions) for column in shown)
    longest = min(LONGEST_TEXT, PAGE_TEXT // max(1, texts))
    return page | {
        "sections": [
            section
            | {"charts": thinned(section["charts"], most)}
            | {"samples": [one | {"columns": shortened(one["columns"], longest)} for one in section.get("samples", ())]}
            for section in sections
        ]
    }


def plain(value: Any) -> Any:
    """Strict JSON: records as objects, numbers of six digits, null for what is not finite, text for the rest."""
    if dataclasses.is_dataclass(value):
        return plain(vars(value))
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)
