"""A calculator as a tool, for questions whose numbers are too large for the model alone.

user        Ann has 412 pears. Ann finds 385 more. How many pears does Ann have?
assistant   <calculator>412+385</calculator>
tool        797
assistant   <reasoning>412+385=797</reasoning><answer>797</answer>
"""

from __future__ import annotations

import math
import random
import re

from agent_tunix.environments.base import Environment

EXPRESSION = re.compile(r"-?[0-9]{1,18}([-+*][0-9]{1,18}){0,20}")  # so short that no product takes long
TERM = re.compile(r"([-+]?)([0-9*]+)")


class Calculator(Environment):
    """`shuffled` is the control: what is computed has other digits, so calling it is of no use."""

    def __init__(self, shuffled: bool = False) -> None:
        self._shuffled = shuffled
        self.tools = [self.calculator]

    def calculator(self, expression: str) -> str:
        """Adds, subtracts and multiplies whole numbers.

        Args:
            expression: What to compute, as 412+385 or 3*40-7.
        """
        return calculated(_of_other_digits(expression) if self._shuffled else expression)


def calculated(expression: str) -> str:
    """The value of an expression, or the word error."""
    text = expression.replace(" ", "")
    if EXPRESSION.fullmatch(text) is None:
        return "error"
    terms = [(-1 if sign == "-" else 1, map(int, factors.split("*"))) for sign, factors in TERM.findall(text)]
    return str(sum(sign * math.prod(factors) for sign, factors in terms))


def _of_other_digits(expression: str) -> str:
    """The same for the same expression, so that the episodes of a group hear the same."""
    draw = random.Random(expression)
    return re.sub("[0-9]", lambda _: str(draw.randint(1, 9)), expression)
