"""Countdown: exact evaluation of expressions that must use each number once."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.countdown import Countdown, evaluate_expression


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        (" (1 + 2) * 3 ", 9, [1, 2, 3]),
        ("7/3", Fraction(7, 3), [7, 3]),
        ("-5 + 8", 3, [5, 8]),
        ("2 × 3 ÷ 4", Fraction(3, 2), [2, 3, 4]),
        ("3 x 5 = 15", 15, [3, 5]),
        (r"2 \times 3 \cdot 4", 24, [2, 3, 4]),
        ("**(3 + 5)\uff0a3**", 24, [3, 5, 3]),
        ("{(3+5)} * 3.", 24, [3, 5, 3]),
    ],
)
def test_values(text, value, numbers):
    assert evaluate_expression(text) == (value, numbers)


@pytest.mark.parametrize(
    "text", ["", "1/0", "2**9", "9**9**9**9", "__import__('os')", "1.5+2", "a+1", "(1+2", "1 2", "1" * 201, "(" * 150]
)
def test_what_is_no_expression(text):
    assert evaluate_expression(text) is None


@given(st.text())
def test_any_text_is_survived(text):
    evaluate_expression(text)
    assert Countdown()(["?"], [f"<answer>{text}</answer>"], [[1]], nums=[[1, 2]], target=[3])[0] in (0.0, 1.0)


def test_values_are_python_s_own_over_random_expressions():
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.randrange(1, 50) for _ in range(4)]
        a, b, c, d = numbers
        x, y, z = rng.choices("+-*/", k=3)
        text = rng.choice([f"{a}{x}{b}{y}{c}{z}{d}", f"({a}{x}{b}){y}({c}{z}{d})", f"{a}{x}({b}{y}({c}{z}{d}))"])
        try:
            expected = eval(
                "".join(f"Fraction({p})" if p.isdigit() else p for p in _parts(text)), {"Fraction": Fraction}
            )
        except ZeroDivisionError:
            assert evaluate_expression(text) is None
        else:
            assert evaluate_expression(text) == (expected, numbers)


def _parts(text):
    return ["".join(group) for _, group in itertools.groupby(text, key=lambda c: c if not c.isdigit() else "digit")]


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>(3+5)*3</answer>", 1.0),
        ("<answer>1</answer> no: <answer>(5+3)*3 = 24</answer>", 1.0),
        (r"so \boxed{3*(3+5)}", 1.0),
        ([{"role": "assistant", "content": "<answer>3*5+3*3</answer>"}], 0.1),  # right value, one number too many
        ("<answer>3*5</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>33-5-4</answer>", 0.1),
        ("<answer>maybe</answer>", 0.0),
        ("(3+5)*3", 0.0),
        ("<answer>(3+5)*3", 0.0),
    ],
)
def test_scores(completion, score):
    assert Countdown(format_score=0.1)(["?"], [completion], [[1]], nums=[[3, 3, 5]], target=[24]) == [score]


def test_errors_and_abstentions():
    assert Countdown()(["?"], ["x"], [[1]], nums=[None], target=[None]) == [None]
    with pytest.raises(KeyError, match="requires column 'nums'"):
        Countdown()(["?"], ["x"], [[1]], numbers=[[1]], target=[1])
    with pytest.raises(ValueError, match="format_score=1"):
        Countdown(format_score=1.0)
