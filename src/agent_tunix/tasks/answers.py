"""Reading an answer out of a completion.

The strict answer is what stands between the answer tags of a well-formed completion; the lenient one is the last number
anywhere. Numbers may carry thousands separators, a currency, a percent sign or a full stop.
"""

from __future__ import annotations

import math
import re

from agent_tunix.tasks.prompts import ANSWER, REASONING

_FORMAT = re.compile(
    r"^\s*"
    + REASONING[0]
    + r"(?P<reasoning>.+?)"
    + REASONING[1]
    + r"\s*"
    + ANSWER[0]
    + r"(?P<answer>.+?)"
    + ANSWER[1]
    + r"\s*$",
    re.DOTALL,
)
_TAGGED = re.compile(ANSWER[0] + r"(.+?)" + ANSWER[1], re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])-?\$?\.\d+")


def well_formed(completion: str) -> bool:
    """One reasoning block, then one answer block, nothing else."""
    tags_once = all(completion.count(tag) == 1 for tag in REASONING + ANSWER)
    return tags_once and _FORMAT.match(completion) is not None


def tagged_answer(completion: str) -> str | None:
    """The text of the first answer block, whatever stands around it."""
    match = _TAGGED.search(completion)
    return match.group(1).strip() if match else None


def first_number(text: str) -> float | None:
    match = _NUMBER.search(text)
    return _value(match.group()) if match else None


def last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("$", ""))


def same_number(found: float | None, truth: float | None) -> bool:
    """Equal up to the rounding of a decimal fraction."""
    return found is not None and truth is not None and math.isclose(found, truth, rel_tol=1e-12, abs_tol=1e-6)


def near(found: float | None, truth: float | None) -> bool:
    """Within ten percent of the truth: what the evaluation calls partially right."""
    return found is not None and truth is not None and abs(found - truth) <= 0.1 * abs(truth)
