r"""Reading an answer out of a completion.

The strict answer is what stands between the answer tags of a well-formed completion; the lenient one is the last number
anywhere, or what \boxed{} holds. Much of what reinforcement learning gains is format, so both are reported.

Numbers may carry thousands separators, a currency, a unit, a percent sign or a full stop, and may be fractions, mixed
numbers, LaTeX's \frac, a sign such as ½, or in the wide digits of East Asian texts. A percent sign is read as a unit:
50% is 50. Numbers are exact, as a float would take two products of twenty digits for one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

from agent_tunix.tasks.prompts import ANSWER, REASONING

_FORMAT = re.compile(
    rf"\s*{REASONING[0]}(?P<reasoning>.+?){REASONING[1]}\s*{ANSWER[0]}(?P<answer>.+?){ANSWER[1]}\s*", re.DOTALL
)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")  # \frac12 is LaTeX too
_WIDE = {code + 0xFEE0: code for code in range(ord("!"), ord("~") + 1)}  # East Asian texts have ASCII once more
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_MIXED = re.compile(r"(?<=[0-9])(?=\\[dt]?frac|[¼-¾⅐-⅞])")
_THIN = re.compile(r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))")  # a plain space may stand between two numbers
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(  # the exponent of a unit, as in m^2, is none
    rf"(?<![\w.])(?<![a-zA-Z]\^)(?P<sign>-?)[$€£]?(?P<sign2>-?)(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<number>{_DIGITS})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![\w]))?(?:\s?/\s?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
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
    stated = _stated(text)
    return stated[0] if stated else None


def last_number(text: str) -> Fraction | None:
    """The last number of a text, or the one in its last box."""
    found = list(_NUMBER.finditer(_plain(text)))
    return _value(found[-1]) if found else None


def same_answer(found: str, truth: str) -> bool:
    """Whether an answer states the truth: the same words, or the same number with no other unit than the truth's."""
    if _words(found) == _words(truth):
        return True
    unit = _unit(truth)
    return same_numbers(found, truth) and (not unit or _unit(found) in ("", unit))


def same_numbers(found: str, truth: str) -> bool:
    """Whether an answer states the truth's number; where that has several, as (2, 3) or 9:45 has, all in their order."""
    wanted = _stated(truth)
    stated = _stated(found)[: None if len(wanted) > 1 else 1]
    return bool(wanted) and len(stated) == len(wanted) and all(map(same_number, stated, wanted))


def same_number(found: Fraction | None, truth: Fraction | None) -> bool:
    """Equal up to the rounding of a decimal fraction: to a millionth, or to a thousandth part of what is small itself."""
    return found is not None and truth is not None and abs(found - truth) <= min(Fraction(1, 10**6), abs(truth) / 1000)


def near(found: Fraction | None, truth: Fraction | None) -> bool:
    """Within ten percent of the truth: what the evaluation calls partially right."""
    return found is not None and truth is not None and abs(found - truth) <= abs(truth) / 10


@functools.lru_cache(1024)  # a truth is compared with all completions of its group, and several measures read one answer
def _plain(text: str) -> str:
    """LaTeX's and Unicode's ways to write a number, in ASCII; the content of the last box, where there is one."""
    text = text.translate(_WIDE)
    boxes = _BOXED.findall(text)
    text = boxes[-1] if boxes else text
    text = _FRACTION.sub(r"\1\2/\3\4", _MIXED.sub(" ", text)).replace("\\$", "$").replace("\\%", "%").replace("−", "-")
    text = _VULGAR.sub(lambda sign: unicodedata.normalize("NFKC", sign[0]), text).replace("⁄", "/")
    return _THIN.sub("", text).replace("\\,", "").replace("{,}", ",").replace("\\!", "")


@functools.lru_cache(1024)
def _stated(text: str) -> tuple[Fraction, ...]:
    """The numbers of an answer after its last equals sign, or all of them where none is there."""
    text = _plain(text)
    after, anywhere = (tuple(map(_value, _NUMBER.finditer(part))) for part in (text.rpartition("=")[2], text))
    return after or anywhere


def _value(match: re.Match[str]) -> Fraction:
    number = _exact(f"{match['number'].replace(',', '')}e{match['exponent'] or 0}")
    if match["divisor"] and (divisor := _exact(match["divisor"])):
        number /= divisor
    number += _exact(match["whole"] or "0")
    return -number if match["sign"] or match["sign2"] else number


def _exact(digits: str) -> Fraction:
    return Fraction(Decimal(digits))  # int refuses very long ones


def _unit(text: str) -> str:
    """The words that stand beside the first number."""
    return " ".join(re.findall(r"[^\W\d]+", _NUMBER.sub("", _plain(text), count=1).casefold()))


def _words(text: str) -> str:
    return " ".join(_plain(text).casefold().split()).rstrip(".")
