"""The calculator: exact arithmetic, which costs nothing however large the numbers that are asked for."""

from __future__ import annotations

import ast
import operator
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction

from torchrl_rloo.envs.tools.tool import Tool, ToolError

_MOST_CHARS = 1000
_MOST_BITS = 10_000  # of a numerator or denominator: some 3000 digits, fewer than Python refuses to write
_DIGITS = 15  # of results that have no end, at least

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FORM = "numbers with + - * / // % ** and parentheses"


class _Calculator(Tool):
    """The schema is written out: deriving it from a function would import transformers."""

    def __init__(self) -> None:
        expression = {"type": "string", "description": f"{_FORM}, such as (47+5)*38/2"}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        super().__init__("calculator", "Works out an arithmetic expression exactly.", parameters)

    def call(self, state: None, /, expression: str) -> str:
        """Return the exact value of an expression as text."""
        if len(expression) > _MOST_CHARS:
            raise ToolError(f"the expression has {len(expression)} characters, more than {_MOST_CHARS}")
        source = expression.strip()
        try:
            return _written(_value(ast.parse(source, mode="eval").body, source))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ToolError(f'"{source[:80]}" is no expression of {_FORM}') from None


calculator = _Calculator()


def _value(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _number(ast.get_source_segment(source, node), node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, source)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, source), _value(node.right, source)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATIONS:
            return _bounded(Fraction(_OPERATIONS[type(node.op)](left, right)))
    raise ToolError(f"only {_FORM} can be worked out")


def _number(text: str, value: int | float) -> Fraction:
    """A literal as it is written, not as the nearest float; its size is looked at before it is worked out."""
    if isinstance(value, int):
        return _bounded(Fraction(value))
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:
        raise ToolError(f"{text[:80]} is no number") from None
    if abs(number.adjusted()) > _MOST_BITS // 4:
        raise ToolError("the number is too large or too small")
    return _bounded(Fraction(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("only whole exponents can be worked out")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > 2 * _MOST_BITS:
        raise ToolError("the number is too large or too small")
    if bits <= 1:  # 0, 1 and -1, to whatever power
        exponent = exponent if exponent == 0 else (2 - exponent % 2) * (1 if exponent > 0 else -1)
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise ToolError("the number is too large or too small")
    return value


def _written(value: Fraction) -> str:
    """An integer or a decimal fraction in full; one that has no end, or is very long, rounded after its point."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    exact = Context(prec=2 * _DIGITS)
    written = exact.divide(Decimal(value.numerator), Decimal(value.denominator))
    if rest != 1 or Fraction(written) != value:
        whole = written.adjusted() + 1  # digits before the point, which rounding must not make zeros
        written = Context(prec=whole if _DIGITS < whole <= 2 * _DIGITS else _DIGITS).plus(written)
    return format(written.normalize(exact), "f" if -_DIGITS <= written.adjusted() < 2 * _DIGITS else "e")
