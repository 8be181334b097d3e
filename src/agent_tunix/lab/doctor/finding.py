"""What a diagnosis says."""

from __future__ import annotations

import dataclasses
import enum


class Severity(enum.StrEnum):
    GRAVE = "grave"  # the run is ruined
    SERIOUS = "serious"  # it does not learn as it should
    MILD = "mild"  # worth knowing; the run is not ill


@dataclasses.dataclass(frozen=True)
class Finding:
    """An illness, what shows it, and the command to try."""

    illness: str
    severity: Severity
    evidence: str
    remedy: str


def unless(excused: bool) -> Severity:
    """Serious, unless the run does well all the same."""
    return Severity.MILD if excused else Severity.SERIOUS
