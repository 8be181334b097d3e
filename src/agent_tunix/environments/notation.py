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
POWER = r"10 ?\^ ?(?:\{([-+]?[0-9]{1,3})\}|([-+]?[0-9]{1,3}))"
Replacement = str | Callable[[re.Match[str]], str]
# In this order, what is written in several ways becomes what is written in one.
REWRITTEN: list[tuple[str, Replacement]] = [
    (r"\\(?:text|mathrm|mbox|textbf|mathbf) ?\{([^{}]*)\}", r" \1 "),
    (r"\\(?:left|right)(?![a-zA-Z])|\\[!,()\[\]]", ""),
    (r"(?<=\\sqrt) ?([0-9])(?![0-9])", r"{\1}"),
    (r"(?<=[0-9])(?=\\[dt]?frac|[¼-¾⅐-⅞])", " "),  # of a mixed number
    # What is added up above or below the line of a fraction keeps together.
    (r"(\\[dt]?frac ?)\{([^{}]+[-+][^{}]*)\}", r"\1{(\2)}"),
    (r"(\\[dt]?frac ?(?:\{[^{}]*\}|[0-9]) ?)\{([^{}]+[-+][^{}]*)\}", r"\1{(\2)}"),
    (r"\\[dt]?frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))", r"\1\2/\3\4"),  # \frac12 is LaTeX too
    (r"\\([$%])", r"\1"),
    ("[¼-¾⅐-⅞]", lambda sign: unicodedata.normalize("NFKC", sign[0]).replace("⁄", "/")),
    (r"(?<=[0-9])[\u00a0\u2009\u202f](?=[0-9]{3}(?![0-9]))", ""),  # a plain space may stand between two numbers
    (r"\{,\}", ","),
    (r"\^ ?\{? ?\\circ ?\}?|°", " degrees"),
    (rf"(?<=[0-9]) ?(?:\\times|\\cdot|[×·*x]) ?{POWER}", r"e\1\2"),
    (r">=|\\geq?(?![a-z])", "≥"),
    (r"<=|\\leq?(?![a-z])", "≤"),
    (r"[-=]>|→|\\(?:right|Right)arrow", "="),  # what stands behind it is stated
    (rf"(?i:\bnegative) +(?={CURRENCY}? ?[0-9.])", "-"),
    # A minus apart from its number, but neither one that subtracts nor one that begins the line of a list.
    (rf"\A *- *(?={CURRENCY}? ?[({{]?[0-9.,/]+[)}}]?\Z)", "-"),
    (rf"(?<=[=(\[{{]) *- +(?={CURRENCY}? ?[0-9.])", "-"),
    (rf"(?:\A|(?<=[=(\[{{:])) *(?i:minus) +(?={CURRENCY}? ?[0-9.])", " -"),
    (rf"(?<![\w)\]}}])(?<![\w)\]}}] )-({CURRENCY}|[({{]) ?(?=[0-9.])", r"\1 -"),
]
RULES = [(re.compile(pattern), replacement) for pattern, replacement in REWRITTEN]
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
ZEROS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
NUMBER = re.compile(  # the exponent of a unit, as in m^2, is none
    rf"(?<![\w.])(?<![a-zA-Z]\^)(?P<sign>-?)[$€£]?(?P<sign2>-?)(?:(?P<whole>[0-9]+)\s+(?=[0-9]+/[0-9]))?"
    rf"(?P<number>{DIGITS})(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}})(?![\w]))?(?:\s?/\s?(?P<divisor>[0-9]+(?:\.[0-9]+)?))?"
    rf"(?:\s(?P<zeros>(?i:{'|'.join(ZEROS)}))(?![\w])(?! (?:and )?[0-9]))?"
)
# What makes a number a part of an expression: a function or an operator before it; an operator or a variable after it.
# What may as well be a sentence, a list, a rate or a table is not taken for one.
BEFORE = re.compile(
    r"(?:\b(?:sqrt(?:\[[0-9]+\])?|log|ln|sin|cos|tan)|[√^_×÷±]) ?[({]?\Z"
    r"|(?:[\d)}π]|\b[a-z]|pi)[-+/]\Z|\b[xyzn] [-+/] \Z"
    r"|(?:(?<![</])\b[a-z]|[\d)}]) ?[<>≤≥] ?\Z"
)
AFTER = re.compile(
    r"\^(?!\{?(?:th|st|nd|rd)\b)|_(?=[\d{])|[²³]| ?[×÷·√π±]"
    r"| ?[<>≤≥] ?(?:\d|[a-z]\b(?!>))| ?\* ?\(?[\d\\]|\*[a-z]\b| x ?\d"
    r"| ?[-+] ?[$€£]?\(?[\d\\.]|[-+][a-z]\b| [-+] [xyzn]\b| ?/ ?\(?[\d\\]"
    r"| ?\\(?:times|cdot|div|pi|sqrt|pm)| ?(?:pi|sqrt)\b"
    r"|[xyznik](?=\s*(?:\Z|[-\^+*=<>≤≥)\],.]))"
)
WHOLE = re.compile(r"\([^()\[\]]*\]|\[[^()\[\]]*\)|\|[^|\s]+\|")  # an interval that is half open; an absolute value
FACTORIAL = re.compile(r"[0-9]+!")
SPELLING = re.compile(r" ?(?:\\cdot|·|\*) ?|(?<=[-+/^_<>≤≥=(\[{,]) +| +(?=[-+/^_<>≤≥=)\]},])|[\\$]")

remembered = functools.lru_cache(1024)  # a truth is compared with all completions of its group, by several measures


@remembered
def plain(text: str) -> str:
    """LaTeX's and Unicode's ways to write a number, in ASCII; the content of the last box, where there is one."""
    text = unboxed(text.translate(WIDE).translate(DASHES))
    for pattern, replacement in RULES:
        text = pattern.sub(replacement, text)
    return text


def unboxed(text: str) -> str:
    """The content of the last box, where there is one."""
    boxes = BOXED.findall(text)
    return boxes[-1] if boxes else text


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
def in_expression(text: str) -> bool:
    """Whether the first number of a plain text is part of an expression, and so is not what the text states."""
    first = NUMBER.search(text)
    if first is None:
        return False
    by_zero = first["divisor"] is not None and not _exact(first["divisor"])
    beside = BEFORE.search(text, 0, first.start()) or AFTER.match(text, first.end())
    return bool(beside) or by_zero or WHOLE.fullmatch(text.strip(" $.")) is not None


@remembered
def spelt(text: str) -> str:
    """A plain text in which expressions that are the same are written alike."""
    text = SPELLING.sub("", text.casefold()).replace("{", "(").replace("}", ")")
    text = NUMBER.sub(
        lambda match: f"{(of := value(match)).numerator:o}/{of.denominator:o}", text
    )  # long ones have no decimals
    return re.sub(r"(?<!\w)\(([0-9/]+)\)|(?<=sqrt)\(([0-9/]+)\)", r"\1\2", text).replace(" pi", "pi").strip(" .")


def unit(text: str) -> str:
    """The words that stand beside the first number."""
    return " ".join(re.findall(r"[^\W\d]+", NUMBER.sub("", text, count=1).casefold()))


def _exact(digits: str) -> Fraction:
    return Fraction(Decimal(digits))  # int refuses very long ones
