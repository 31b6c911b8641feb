"""Countdown reward: an arithmetic expression must use the given numbers and evaluate to a target."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from torchrl_rloo.rewards.matching import last_boxed
from torchrl_rloo.rewards.protocol import RowReward

_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_EXPRESSION = re.compile(r"[0-9+\-*/(). ]{1,200}")
_SIGNS = {  # spellings of the signs
    "*": "\\times \\cdot \\ast * \u00d7 \u00b7 \u22c5 \u2217 \u2022 \u2715 \u2a2f \uff0a x X",
    "/": "\\div \u00f7 \u2215 \u2044",
    "-": "\u2212 \u2013 \u2014 \ufe63 \uff0d \u2010 \u2011",
    "+": "\uff0b \ufe62",
    "(": "{ \\left( \\bigl( [ \\left[ \uff08",
    ")": "} \\right) \\bigr) ] \\right] \uff09",
    " ": "\\, \\; \\! \\: \\( \\) \\[ \\] $ `",
}
_SPELLINGS = {spelling: sign for sign, spellings in _SIGNS.items() for spelling in spellings.split()}
_SPELLINGS |= dict.fromkeys(("\\ ", "\n", "\r", "\t", "\u00a0", "\u2009", "\u202f"), " ")
_SPELLED = re.compile("|".join(re.escape(s) for s in sorted(_SPELLINGS, key=len, reverse=True)))
_MAX_CHARS = 1000  # before signs are unified
_FRACTION = re.compile(r"\\[dt]?frac\s?\{([^{}]*)\}\s?\{([^{}]*)\}")


def evaluate_expression(text: str) -> tuple[Fraction, list[int]] | None:
    """Evaluate an expression of whole numbers and ``+ - * / ( )`` exactly.

    A right-hand side (``= 24``) is ignored, as are math delimiters and line breaks. ``x``, ``×``, ``·``, ``÷``, ``−``,
    other spellings of signs in Unicode, and LaTeX's ``\\times``, ``\\cdot``, ``\\div``, ``\\frac{}{}`` are operators.

    Returns:
        ``(value, numbers)``, or None if the text is not an expression, has more than 200 characters or divides by 0.

    Example:
        >>> evaluate_expression("(3 + 5) * 3 = 24")
        (Fraction(24, 1), [3, 5, 3])
    """
    text = text.split("=")[0]
    if len(text) > _MAX_CHARS:
        return None
    text = _SPELLED.sub(lambda found: _SPELLINGS[found[0]], _FRACTION.sub(r"((\1)/(\2))", text))
    text = text.strip(" *").removesuffix(".").strip(" *")  # bold text, and the end of a sentence
    if not _EXPRESSION.fullmatch(text):
        return None
    numbers: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")


class Countdown(RowReward):
    """Reward of 1.0 where the expression of a completion uses each number exactly once and equals the target.

    The expression is in the last ``<answer>...</answer>``, else in the last ``\\boxed{}``.

    Source: the task of TinyZero (Pan et al. 2025), after the numbers round of the TV show Countdown.

    Args:
        format_score: score of a valid but wrong expression (TinyZero: 0.1). Without an expression the score is 0.0.
        numbers_column: dataset column of numbers, lists of whole numbers or None, which abstains.
        target_column: dataset column of targets.

    Raises:
        ValueError: unless ``0 <= format_score < 1``.

    Example:
        >>> texts = ["<answer>(3+5)*3</answer>", "<answer>3+5</answer>", "24"]
        >>> Countdown(format_score=0.1)(["?"] * 3, texts, [[1]] * 3, nums=[[3, 3, 5]] * 3, target=[24] * 3)
        [1.0, 0.1, 0.0]
    """

    __name__ = "countdown"

    def __init__(self, *, format_score: float = 0.0, numbers_column: str = "nums", target_column: str = "target"):
        if not 0 <= format_score < 1:
            raise ValueError(f"format_score={format_score} must be in [0, 1): a solution scores 1")
        self.format_score, self.numbers_column, self.target_column = format_score, numbers_column, target_column
        self.reads = (numbers_column, target_column)

    def score(self, text: str, numbers: Sequence[int] | None, target: int) -> float | None:
        """Return 1.0, ``format_score``, 0.0, or None where the numbers are None."""
        if numbers is None:
            return None
        tagged = _ANSWER.findall(text)
        expression = tagged[-1] if tagged else last_boxed(text)
        found = None if expression is None else evaluate_expression(expression)
        if found is None:
            return 0.0
        value, used = found
        right = value == target and Counter(used) == Counter(int(n) for n in numbers)
        return 1.0 if right else self.format_score
