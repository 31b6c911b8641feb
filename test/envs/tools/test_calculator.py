"""Calculator: exact values, bounded cost, and error messages."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.envs.tools.calculator import calculator
from torchrl_rloo.envs.tools.tool import ToolError

VALUES = """
47*38 = 1786 ; 1 + 2 = 3 ; -(2-5)**3 = 27 ; -2**2 = -4 ; 2**-2 = 0.25 ; 0.1+0.2 = 0.3 ; 7/2 = 3.5 ; 7//2 = 3
-7//2 = -4 ; -7%3 = 2 ; 7.5%2 = 1.5 ; 1/3 = 0.333333333333333 ; 2/3 = 0.666666666666667 ; 1/8 = 0.125 ; 100/4 = 25
1e3 = 1000 ; 1.5e-3 = 0.0015 ; 1**99999999999 = 1 ; (-1)**99999999999 = -1 ; 0**0 = 1 ; 0**99999999999 = 0
1/2**200 = 6.22301527786114e-61 ; 10**40/3 = 3.33333333333333e+39 ; 10**20/3 = 33333333333333333333
10**14/3 = 33333333333333.3 ; 10**30/3 = 333333333333333333333333333333 ; 10**31/3 = 3.33333333333333e+30
"""


def test_values() -> None:
    for case in VALUES.strip().replace("\n", ";").split(";"):
        expression, value = case.split(" = ")
        assert calculator.call(None, expression) == value.strip(), case
    for value in (2**100, 99999999999999999999**2):
        assert calculator.call(None, str(value)) == str(value)


ERRORS = {
    "division by zero": ("1/0", "1%0", "0**-1"),
    "too large": ("9**9**9", "9" * 900 + "**900", "0.5**99999999", "1e999999999", "1e-999999999"),
    "exponents must be whole": ("2**0.5",),
    "only numbers": "x;abs(1);__import__('os');1 if 2 else 3;'a'*3;True;1j;[1];2^3".split(";"),
    "not a valid expression": ("2+", "", "1;2", "1\x002", "\ud800", "(" * 400 + "1" + ")" * 400, "-" * 999 + "1"),
    "1001 characters": ("1" * 1001,),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors(words: str) -> None:
    for expression in ERRORS[words]:
        with pytest.raises(ToolError, match=words):
            calculator.call(None, expression)


numbers = st.integers(-1000, 1000) | st.decimals(-100, 100, places=2, allow_nan=False)
expressions = st.recursive(
    numbers.map(lambda n: f"({n})"),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=10,
)


@given(expressions)
def test_sums_and_products_are_exact(expression: str) -> None:
    exact = eval(re.sub(r"[\d.]+", lambda m: f"F('{m[0]}')", expression), {"F": Fraction})
    value = Fraction(calculator.call(None, expression))
    assert value == exact or abs(value - exact) <= abs(exact) * Fraction(1, 10**14)
    if exact.denominator == 1:
        assert value == exact


@given(st.text(alphabet="0123456789.+-*/%()e ", max_size=60) | st.text(max_size=30))
def test_any_text_raises_at_most_a_tool_error(expression: str) -> None:
    try:
        assert isinstance(calculator.call(None, expression), str)
    except ToolError as error:
        assert len(str(error)) < 200
