r"""How people write numbers, read in one plain notation.

Numbers may carry thousands separators, a currency, a unit, a percent sign or a full stop, and may be fractions, mixed
numbers, LaTeX's \frac, a sign such as ½, powers of ten, or in the wide digits of East Asian texts. A percent sign is read as
a unit: 50% is 50. Numbers are exact, as a float would take two products of twenty digits for one.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
WIDE = {code + 0xFEE0: code for code in range(ord("!"), ord("~") + 1)}  # East Asian texts have ASCII once more
DASHES = dict.fromkeys(map(ord, "−–‐‑"), "-")
CURRENCY = r"(?:[A-Z]{0,3}[$€£¥₹₩₽₺₫₪₦฿]|[A-Z]{3}\b)"
POWER = r"10\s*\^\s*(?:\{\s*([-+]?[0-9]{1,3})\s*\}|([-+]?[0-9]{1,3}))"
Replacement = str | Callable[[re.Match[str]], str]
# In this order, what is written in several ways becomes what is written in one.
REWRITTEN: list[tuple[str, Replacement]] = [
    (r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:left|right|!)|\\,", ""),
    (r"(?<=\\sqrt)\s*([0-9])(?![0-9])", r"{\1}"),
    (r"(?<=[0-9])(?=\\[dt]?frac|[¼-¾⅐-⅞])", " "),  # of a mixed number
    (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))", r"\1\2/\3\4"),  # \frac12 is LaTeX too
    (r"\\([$%])", r"\1"),
    ("[¼-¾⅐-⅞]", lambda sign: unicodedata.normalize("NFKC", sign[0]).replace("⁄", "/")),
    (r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))", ""),  # a plain space may stand between two numbers
    (r"\{,\}", ","),
    (r"\^\s*\{?\s*\\circ\s*\}?|°", " degrees"),
    (rf"(?<=[0-9])\s*(?:\\times|\\cdot|[×·*x])\s*{POWER}", r"e\1\2"),
    (r">=|\\geq?(?![a-z])", "≥"),
    (r"<=|\\leq?(?![a-z])", "≤"),
    (r"[-=]>|→|\\(?:right|Right)arrow", "="),  # what stands behind it is stated
    (rf"(?i:\bnegative)\s+(?={CURRENCY}?\s?[0-9.])", "-"),
    # A minus apart from its number, but not one that subtracts: at the beginning, or after what opens something.
    (rf"(?:^|(?<=[=(\[{{,:;]))\s*(?:-|(?i:minus)\b)\s*(?={CURRENCY}?\s?[({{]?[0-9.])", " -"),
    (rf"(?<![\w)\]}}])(?<![\w)\]}}]\s)-\s?({CURRENCY}|[({{])\s?(?=[0-9.])", r"\1 -"),
]
RULES = [(re.compile(pattern), replacement) for pattern, replacement in REWRITTEN]
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
ZEROS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NUMBER = re.compile(  # the exponent of a unit, as in m^2, is none
    rf"(?<![\w.])(?<![a-zA-Z]\^)(?P<sign>-?)[$€£]?(?P<sign2>-?)(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<number>{DIGITS})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![\w]))?(?:\s?/\s?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
    rf"(?:\s(?P<zeros>(?i:{'|'.join(ZEROS)}))(?![\w]))?"
)
# What makes a number a part of an expression: a function or an operator before it; an operator or a variable after it.
BEFORE = re.compile(
    r"(?:\b(?:sqrt(?:\[[0-9]+\])?|log|ln|sin|cos|tan)|[√<>≤≥|±^_×÷])[\s({]*\Z"
    r"|(?:[\d)}π]|\b[a-z]|pi)\s*[-+/]\s*\Z"
)
AFTER = re.compile(
    r"\s*(?:[\^_×÷·√π<>≤≥±|]|\*\s?[\d(\\a-z]|[-+/]\s?(?:[\d(\\.]|[a-z]\b))"
    r"|\s*(?:\\(?:times|cdot|div|pi|sqrt|pm)|(?:pi|sqrt)\b)"
    r"|[bdeikopqruxyz](?![a-zA-Z])"
)
WHOLE = re.compile(r"\(.*\]|\[.*\)|[0-9]+!")  # an interval that is half open; a factorial
SPELLING = re.compile(r"[\s\\{}*·]|cdot|times")

remembered = functools.lru_cache(1024)  # a truth is compared with all completions of its group, by several measures


@remembered
def plain(text: str) -> str:
    """LaTeX's and Unicode's ways to write a number, in ASCII; the content of the last box, where there is one."""
    text = text.translate(WIDE).translate(DASHES)
    boxes = BOXED.findall(text)
    text = boxes[-1] if boxes else text
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text


@remembered
def values(text: str) -> tuple[Fraction, ...]:
    """The numbers of a plain text."""
    return tuple(map(value, NUMBER.finditer(text)))


def value(match: re.Match[str]) -> Fraction:
    number = _exact(f"{match['number'].replace(',', '')}e{match['exponent'] or 0}")
    if match["divisor"] and (divisor := _exact(match["divisor"])):
        number /= divisor
    number = (number + _exact(match["whole"] or "0")) * 10 ** ZEROS.get((match["zeros"] or "").lower(), 0)
    return -number if match["sign"] or match["sign2"] else number


@remembered
def shape(text: str) -> str:
    """How an expression is written, with a mark for each number; nothing where the first number stands by itself."""
    first = NUMBER.search(text)
    if first is None:
        return ""
    by_zero = first["divisor"] is not None and not _exact(first["divisor"])
    part_of_one = BEFORE.search(text, 0, first.start()) or AFTER.match(text, first.end()) or by_zero
    if not part_of_one and not WHOLE.fullmatch(text.strip()):
        return ""
    return SPELLING.sub("", NUMBER.sub("#", text).casefold()).rstrip(".")


def unit(text: str) -> str:
    """The words that stand beside the first number."""
    return " ".join(re.findall(r"[^\W\d]+", NUMBER.sub("", text, count=1).casefold()))


def _exact(digits: str) -> Fraction:
    return Fraction(Decimal(digits))  # int refuses very long ones
