r"""Reading an answer out of a completion.

The strict answer is what stands between the answer tags of a well-formed completion; the lenient one is the last number
anywhere, or what \boxed{} holds. Much of what reinforcement learning gains is format, so both are reported.

Of several numbers in a sentence the first counts, so that nothing is gained by naming more. A number that is part of an
expression, as in 2^10, 3x or \sqrt{3}, is not its value. Expressions are the same if they are written alike, or if
Math-Verify says so, where it is installed. Numbers are read by hand, as that is 40 times as fast, knows units, and gives an
older run's answers the verdict that they had.
"""

from __future__ import annotations

import re
from fractions import Fraction

from agent_tunix.environments.notation import (
    FACTORIAL,
    NUMBER,
    in_expression,
    plain,
    remembered,
    spelt,
    unboxed,
    unit,
    values,
)
from agent_tunix.environments.symbolic import same_expression
from agent_tunix.models.chat import ANSWER, REASONING

_FORMAT = re.compile(
    rf"\s*{REASONING[0]}(?P<reasoning>.+?){REASONING[1]}\s*{ANSWER[0]}(?P<answer>.+?){ANSWER[1]}\s*", re.DOTALL
)


def well_formed(completion: str) -> bool:
    """One reasoning block, then one answer block, nothing else."""
    tags_once = all(completion.count(tag) == 1 for tag in REASONING + ANSWER)
    return tags_once and _FORMAT.fullmatch(completion) is not None


def tagged_answer(completion: str) -> str | None:
    """The text of the first answer block, whatever stands around it."""
    _, _, block = completion.partition(ANSWER[0])
    end = block.find(ANSWER[1])
    return block[:end].strip() if end > 0 else None  # one that holds nothing is none


def first_number(text: str) -> Fraction | None:
    """The number that an answer states: in its box, after its last equals sign, or the first one."""
    stated = values(_statement(text))
    return stated[0] if stated else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or the one in its last box."""
    found = values(plain(text))
    return found[-1] if found else None


def only_number(text: str) -> Fraction | None:
    """The number that a truth is; None where it is an expression, several numbers or words alone."""
    stated = values(_statement(text))
    return stated[0] if len(stated) == 1 and not _expression(text) else None


def same_answer(found: str, truth: str) -> bool:
    """Whether an answer states the truth: the same words, the same number with no other unit, or an equal expression."""
    if _words(found) == _words(truth):
        return True
    if not same_numbers(found, truth):
        return only_number(truth) is None and same_expression(unboxed(found), unboxed(truth))
    wanted = "" if _expression(truth) else unit(plain(truth))
    return not wanted or unit(plain(found)) in ("", wanted)


def same_numbers(found: str, truth: str) -> bool:
    """Whether an answer states the truth's number; where that has several, as (2, 3) or 9:45 has, all in their order."""
    if _expression(truth):
        return _holds(spelt(plain(found)), spelt(_statement(truth)))
    wanted, stated = values(_statement(truth)), values(_statement(found))
    if in_expression(_statement(found)):
        return False
    stated = stated[:1] if len(wanted) == 1 else stated
    return bool(wanted) and len(stated) == len(wanted) and all(map(same_number, stated, wanted))


def same_number(found: Fraction | None, truth: Fraction | None) -> bool:
    """Equal up to the rounding of a decimal fraction: to a millionth, or to a thousandth part of what is small itself."""
    return found is not None and truth is not None and abs(found - truth) <= min(Fraction(1, 10**6), abs(truth) / 1000)


def near(found: Fraction | None, truth: Fraction | None) -> bool:
    """Within ten percent of the truth: what the evaluation calls partially right."""
    return found is not None and truth is not None and abs(found - truth) <= abs(truth) / 10


@remembered
def _statement(text: str) -> str:
    """What an answer says at last: behind its last equals sign that a number by itself follows, or any number; or all."""
    parts = [part for part in plain(text).split("=") if NUMBER.search(part)]
    return next((part for part in reversed(parts) if not in_expression(part)), parts[-1] if parts else plain(text))


def _expression(truth: str) -> bool:
    """Whether a truth is an expression. In an answer a sign that follows a number may as well be an exclamation."""
    return in_expression(_statement(truth)) or FACTORIAL.fullmatch(truth.strip()) is not None


def _holds(text: str, expression: str) -> bool:
    """Whether a text has an expression in it that is not part of a longer one."""
    return re.search(rf"(?<![\w^_+*/(.-]){re.escape(expression)}(?![\w^_*/(]|[-+][\w(])", text) is not None


def _words(text: str) -> str:
    return " ".join(plain(text).casefold().split()).rstrip(".")
