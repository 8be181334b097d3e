"""The configuration as a table: every key, the shipped value where it is another, and what differs between candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agent_tunix.config.commands import UNREADABLE, composed_leaves, value_text
from agent_tunix.config.load import leaves
from agent_tunix.lab.doctor.records import RunRecords

UNSET = "not set"


@dataclasses.dataclass(frozen=True)
class Setting:
    key: str
    value: str
    shipped: str | None  # the shipped value, where it differs
    varied: bool  # between the candidates


def settings(runs: Sequence[RunRecords]) -> list[Setting]:
    tables = [leaves(run.config) if run.config else {} for run in runs]
    shipped = _shipped()
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = list(dict.fromkeys(value_text(table[key]) if key in table else UNSET for table in tables))
        default = value_text(shipped[key]) if key in shipped else UNSET
        as_shipped = values == [default] or (default == UNSET and values == ["null"]) or not shipped
        rows.append(Setting(key, ", ".join(values), None if as_shipped else default, len(values) > 1))
    return rows


def _shipped() -> dict[str, object]:
    """The defaults; where even the shipped files do not compose there are none, and nothing is marked."""
    try:
        return composed_leaves()
    except UNREADABLE:
        return {}
