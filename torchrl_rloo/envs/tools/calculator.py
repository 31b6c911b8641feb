"""Calculator tool: exact arithmetic, with a bounded cost for any expression."""

from __future__ import annotations

import ast
import operator
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction

from torchrl_rloo.envs.tools.tool import Tool, ToolError

_MAX_CHARS = 1000
_MAX_BITS = 10_000  # of a numerator or denominator: about 3000 digits, within Python's limit for printing an integer
_DIGITS = 15  # significant digits of a rounded result, or more if its integer part is longer

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SYNTAX = "numbers with + - * / // % ** and parentheses"


class _Calculator(Tool):
    """Tool with a handwritten schema: deriving it from a function would import transformers."""

    def __init__(self) -> None:
        expression = {"type": "string", "description": f"{_SYNTAX}, such as (47+5)*38/2"}
        parameters = {"type": "object", "properties": {"expression": expression}, "required": ["expression"]}
        super().__init__("calculator", "Evaluates an arithmetic expression exactly.", parameters)

    def call(self, state: None, /, expression: str) -> str:
        """Return the value of an expression as text.

        Integers are exact, and finite decimals of up to 30 digits. Other values are rounded to about 15 digits.
        """
        if len(expression) > _MAX_CHARS:
            raise ToolError(f"the expression has {len(expression)} characters; the limit is {_MAX_CHARS}")
        source = expression.strip()
        try:
            return _format(_evaluate(ast.parse(source, mode="eval").body, source))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            raise ToolError(f'"{source[:80]}" is not a valid expression: use {_SYNTAX}') from None


calculator = _Calculator()


def _evaluate(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _parse_number(ast.get_source_segment(source, node), node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand, source)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, source), _evaluate(node.right, source)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATIONS:
            return _check_size(Fraction(_OPERATIONS[type(node.op)](left, right)))
    raise ToolError(f"unsupported expression: use only {_SYNTAX}")


def _parse_number(text: str, value: int | float) -> Fraction:
    """Return the exact value of a literal's text, not of the nearest float."""
    if isinstance(value, int):
        return _check_size(Fraction(value))
    try:
        number = Decimal(text.replace("_", ""))
    except InvalidOperation:
        raise ToolError(f"{text[:80]} is not a number") from None
    # Check the exponent before Fraction expands it
    if abs(number.adjusted()) > _MAX_BITS // 4:
        raise ToolError("the number is too large or too small")
    return _check_size(Fraction(number))


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ToolError("exponents must be whole numbers")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > 2 * _MAX_BITS:
        raise ToolError("the number is too large or too small")
    if bits <= 1:  # powers of 0, 1 and -1 depend only on the exponent's parity and sign
        exponent = exponent if exponent == 0 else (2 - exponent % 2) * (1 if exponent > 0 else -1)
    return _check_size(Fraction(base ** int(exponent)))


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ToolError("the number is too large or too small")
    return value


def _format(value: Fraction) -> str:
    """Write integers and short finite decimals in full, and round the others after the decimal point."""
    if value.denominator == 1:
        return str(value.numerator)
    # A decimal is finite if its denominator has no prime factor but 2 and 5
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    exact = Context(prec=2 * _DIGITS)
    decimal = exact.divide(Decimal(value.numerator), Decimal(value.denominator))
    if rest != 1 or Fraction(decimal) != value:
        # Rounding must not turn digits before the decimal point into zeros
        integer_digits = decimal.adjusted() + 1
        decimal = Context(prec=integer_digits if _DIGITS < integer_digits <= 2 * _DIGITS else _DIGITS).plus(decimal)
    return format(decimal.normalize(exact), "f" if -_DIGITS <= decimal.adjusted() < 2 * _DIGITS else "e")
