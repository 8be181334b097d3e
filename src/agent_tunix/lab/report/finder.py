"""The learning-rate finder's part of a report: reward and KL against the rate, and the rate that it suggests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agent_tunix.lab.report.chart import Chart, Mark, Series, hue
from agent_tunix.lab.report.verdict import Verdict
from agent_tunix.training.run_folder import finite, read_object
from agent_tunix.types import Record

CURVES = (
    ("reward", "Reward by learning rate", "Mean reward while the rate is raised step by step. Shaded: the range to try."),
    ("kl", "KL divergence by learning rate", "How far the policy has moved by then, in nats a token."),
)


def finder_sections(folder: Path) -> list[Record]:
    """One section where the finder was run, none elsewhere."""
    found = read_object(folder / "lr_find.json")
    charts = [chart for i in range(len(CURVES)) if (chart := _chart(found, i)).series[0].points]
    text = str(found.get("conclusion") or "")
    return [{"id": "finder", "title": "Learning-rate finder", "text": text, "charts": charts}] if charts else []


def finder_verdict(folder: Path) -> Verdict | None:
    """What a ramp suggests; it is meant to end in collapse, of which the doctor need not warn. None for any other run."""
    found = read_object(folder / "lr_find.json")
    if not found:
        return None
    rate = found.get("suggested")
    lead = f"Suggested learning rate: {rate:g}" if finite(rate) else "No learning rate to suggest"
    return Verdict("good" if finite(rate) else "unsure", lead, str(found.get("conclusion") or ""))


def ramps_verdict(folders: Mapping[str, Path]) -> Verdict | None:
    """What several ramps suggest, by their labels; accuracies at their ends rank nothing. None where no job is a ramp."""
    found = {label: one for label, folder in folders.items() if (one := finder_verdict(folder))}
    if not found:
        return None
    good = any(one.mood == "good" for one in found.values())
    told = "; ".join(f"{label}: {one.lead.removeprefix('Suggested learning rate: ')}" for label, one in found.items())
    return Verdict("good" if good else "unsure", f"{len(found)} ramps of lr-find", f"Suggested learning rates: {told}.")


def _chart(found: Record, i: int) -> Chart:
    key, title, note = CURVES[i]
    rates, values = (column if isinstance(column, list) else [] for column in (found.get("rates"), found.get(key)))
    points = [(float(x), float(y)) for x, y in zip(rates, values, strict=False) if finite(x) and finite(y) and x > 0]
    suggested, band = found.get("suggested"), found.get("range")
    rate = float(suggested) if isinstance(suggested, int | float) and finite(suggested) else 0.0
    shaded = band if isinstance(band, list) and len(band) == 2 and all(finite(end) and end > 0 for end in band) else ()
    return Chart(
        f"finder-{key}",
        title,
        note,
        [Series(f"finder {key}", title, points, hue(i))],
        x_label="learning rate",
        log_x=True,
        log_y_switch=key == "kl",
        marks=[Mark(rate, f"suggested {rate:g}")] if rate > 0 else [],
        band=shaded,
    )
