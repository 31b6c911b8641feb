from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cost import assert_linear
from torchrl_rloo.rewards.matching import ExactMatch, NumericMatch, boxed_accuracy, find_number, last_boxed

PIECES = st.lists(
    st.sampled_from(
        [
            *"0123456789",
            *".,-+/%$^_={}()\\ \n",
            r"\boxed{",
            r"\frac",
            r"\times 10^",
            "####",
            "10",
            "e",
            "\u2212",
            "x",
            "٣",
        ]
    ),
    max_size=14,
).map("".join)
WHERE = ("boxed", "####", "text")


def score(reward, completion, gold):
    return reward(["?"], [completion], [[1]], answer=[gold])[0]


def number(text: str, where=WHERE):
    """Return the value found, None without one, "never" for one that is always wrong."""
    found = find_number(text, where)
    return found if found is None else "never" if found.value is None else found.value


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "So 72 clips.": 72,
        "1,234": 1234,
        "1,00,000": 100000,
        r"\boxed{1{,}234}": 1234,
        r"1\,234": 1234,
        "1_000": 1000,
        "1\u202f000": 1000,
        "3,5": 5,
        "-5": -5,
        "(\u22125)": -5,
        "+5": 5,
        "10-5": 5,
        "x = - 5": -5,
        r"\boxed{- 5}": -5,
        "3.": 3,
        ".5": Fraction(1, 2),
        "-0.25": Fraction(-1, 4),
        "3/4": Fraction(3, 4),
        r"-\frac{3}{4}": Fraction(-3, 4),
        r"\dfrac{3}{4}": Fraction(3, 4),
        r"\frac12": Fraction(1, 2),
        "1 3/4": Fraction(7, 4),
        r"-1\frac{3}{4}": Fraction(-7, 4),
        "-(3/4)": Fraction(-3, 4),
        r"x = - \left(\frac{3}{4}\right)": Fraction(-3, 4),
        "-(-1 3/4)": Fraction(7, 4),
        "+(-.5)": Fraction(-1, 2),
        r"0.\overline{3}": Fraction(1, 3),
        r"-1,234.5\bar{6}": Fraction(-370370, 300),
        "0.(36)": Fraction(4, 11),
        "$1,234.50.": Fraction(2469, 2),
        "-$5": -5,
        "$-5$": -5,
        "£3.20": Fraction(16, 5),
        "1.5e3": 1500,
        "2E-2": Fraction(1, 50),
        r"1.5 \times 10^{3}": 1500,
        "6 x 10^2": 600,
        "10^{-2}": Fraction(1, 100),
        r"12 \text{ cm}^2": 12,
        r"120^\circ": 120,
        r"\boxed{x_1 = 5}": 5,
        r"\boxed{\text{5}}": 5,
        "3rd": 3,
        r"\boxed{no} 7": 7,
        r"\boxed{5} or 7": 5,
        "#### 42 (= 6 * 7)": 42,
        "####\n42": 42,
        "#### 1\n#### 2": 2,
        "2^10": "never",
        r"\boxed{3\sqrt{2}}": "never",
        r"\boxed{3\pi}": "never",
        r"\boxed{5i}": "never",
        r"\boxed{\sqrt{5}}": "never",
        r"\boxed{\pi + 3}": "never",
        r"\boxed{\frac{x}{3}}": "never",
        "1/0": "never",
        "1e999999999": "never",
        r"\boxed{2 + 3}": "never",
        r"\boxed{1, 2}": "never",
        "x2 y_3 v1.2.3": None,
        "none": None,
        "": None,
        "٣": None,
    }.items(),
)
def test_numbers(text, value):
    assert number(text) == value


@settings(deadline=None, max_examples=100)
@given(PIECES | st.text(max_size=40), PIECES | st.text(max_size=40))
def test_no_text_raises_and_scores_are_zero_or_one(text, gold):
    assert score(NumericMatch(), text, gold) in (None, 0, 1)
    for where in (["text"], ["boxed"], ["last_line"], ["####"]):
        assert score(ExactMatch(where=where, ignore_case=True, ignore_punctuation=True), text, gold) in (0, 1)
    if isinstance(number(gold), Fraction) and "%" not in gold:
        assert score(NumericMatch(), gold, gold) == 1
    assert score(ExactMatch(), text, text) == 1


@given(
    st.integers(),
    st.sampled_from(["{}", "The answer is {}.", r"\boxed{{{}}}", "1 or 2\n#### {} apples", "\\boxed{{\\${}}}"]),
)
def test_integers_are_right_only_for_themselves(n, form):
    for written in (str(n), f"{n:,}", f"{n}.0", f"{n}/1", f"{2 * n}/2"):
        assert number(form.format(written)) == n
    assert score(NumericMatch(), form.format(n), n) == score(NumericMatch(), form.format(n), str(n)) == 1
    assert score(NumericMatch(), form.format(n + 1), n) == 0


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**12), max_value=10**12))
def test_decimals_are_exact(value):
    assert number(f"{value:f}") == Fraction(value)
    assert score(NumericMatch(), f"{value:f}", value) == 1
    assert score(NumericMatch(), f"{value + Decimal('0.000001'):f}", str(value)) == 0


@pytest.mark.parametrize(
    "big", ["1" * 10**5, "1," * 10**4, "11," * 10**4, "1e" + "9" * 10**5, "1/" * 10**4 + "0" * 10**4]
)
def test_hostile_numbers_are_fast_and_wrong(big):
    for text in (big, rf"\boxed{{{big}}}", f"#### {big}"):
        assert score(NumericMatch(), text, 7) == 0
    assert score(NumericMatch(), "7", "1" * 10**5) is None
    assert score(NumericMatch(), "7", 10**5000) == 0


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.sampled_from([r"\boxed{", "1", "^{", "a_{", r"\frac", "-", "$", " ", "= - ", ",", "."]),
        min_size=1,
        max_size=3,
    )
)
def test_time_is_linear_in_the_text(pieces):
    assert_linear(lambda n: find_number("".join(pieces) * n, WHERE), 1_000)


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("50%", "50%", 1), ("50%", 50, 1), ("50%", 0.5, 1), ("50", "50%", 1), ("0.5", "50%", 1), (r"50\%", "0.5", 1),
        ("0.5%", "50%", 0), ("5%", "50%", 0), ("5", 0.5, 0),
    ],
)  # fmt: skip
def test_percentages(text, gold, right):
    assert score(NumericMatch(), text, gold) == right


def test_tolerances():
    assert score(NumericMatch(), "0.333", "1/3") == 0
    assert score(NumericMatch(rel_tol=0.01), "0.333", "1/3") == 1
    assert score(NumericMatch(rel_tol=0.01), "-101", -100) == 1
    assert score(NumericMatch(rel_tol=0.01), "-102", -100) == 0
    assert score(NumericMatch(abs_tol=0.5), "0.5", 0) == 1
    assert score(NumericMatch(rel_tol=0.5), "0.5", 0) == 0
    assert score(NumericMatch(), "0.1", 0.1) == 1  # as written, not as stored


def test_golds():
    solution = "She sold 48/2 = <<48/2=24>>24 clips in May, so <<48+24=72>>72 in all.\n#### 1,072"
    assert [score(NumericMatch(), r"\boxed{1072}", gold) for gold in (solution, 1072, 1072.0, "1,072 clips")] == [1] * 4
    assert [score(NumericMatch(), "7", gold) for gold in (None, "seven", "", math.nan, math.inf, "1/0")] == [None] * 6
    for gold in (True, [7], {}):
        with pytest.raises(TypeError, match=r"must be a number, a string or None"):
            score(NumericMatch(), "7", gold)


def test_where_is_tried_in_order():
    text = "boxed \\boxed{1}\n#### 2\nAnswer: 3\nlast 4 5"
    expected = {"boxed": 1, "####": 2, "Answer:": 3, "last_line": 5, "text": 5}
    for place, value in expected.items():
        assert number(text, [place]) == number(text, [place, "text"]) == number(text, ["nowhere", place]) == value
    assert number("7", ["boxed", "####"]) is None
    assert score(NumericMatch(where=["####"]), "7", 7) == 0


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({}, [1, 0, 0, 0]),
        ({"ignore_case": True}, [1, 1, 0, 0]),
        ({"ignore_punctuation": True}, [1, 0, 1, 0]),
        ({"ignore_case": True, "ignore_punctuation": True}, [1, 1, 1, 0]),
    ],
)
def test_exact_match_normalises(settings, right):
    texts = [" New\n\tYork ", "new york", "New York!", "NewYork"]
    assert [score(ExactMatch(**settings), text, "New York") for text in texts] == right


def test_exact_match_of_unicode_and_of_several_golds():
    assert score(ExactMatch(), "Cafe\u0301", "Caf\u00e9") == 1
    assert [score(ExactMatch(), text, ["USA", "United States"]) for text in ("USA", "United States", "UK")] == [1, 1, 0]
    assert score(ExactMatch(), "x", []) == 0 and score(ExactMatch(), "x", None) is None
    with pytest.raises(TypeError, match="answer=7 must be a string, a list of strings or None"):
        score(ExactMatch(), "7", 7)


@pytest.mark.parametrize(
    ("where", "text", "right"),
    [
        (["boxed"], r"Lyon or \boxed{Paris}", 1),
        (["boxed"], "Paris", 0),
        (["boxed", "text"], "Paris", 1),
        (["boxed", "text"], r"Paris \boxed{Lyon}", 0),
        (["Answer:"], "Answer: Lyon. Answer: Paris\nI am sure.", 1),
        (["Answer:"], "Answer:\n\n  Paris", 1),
        (["Answer:"], "Paris", 0),
        (["Answer:"], "Answer:", 0),
        (["</think>"], "<think>Lyon?</think>\nParis\n", 1),
        (["last_line"], "I think:\nParis\n\n", 1),
        (["last_line"], "", 0),
    ],
)
def test_where_an_exact_match_stands(where, text, right):
    assert score(ExactMatch(where=where), text, "Paris") == right


@pytest.mark.parametrize("kind", [ExactMatch, NumericMatch])
def test_messages_columns_and_settings(kind):
    talk = [{"role": "assistant", "content": "7"}, {"role": "user", "content": "8"}]
    assert kind()(["?"] * 3, [talk, [], "7"], [[1]] * 3, answer=["7"] * 3) == [1, 0, 1]
    assert kind("gold")(["?"], ["7"], [[1]], gold=["7"], answer=["8"]) == [1]
    with pytest.raises(KeyError, match="requires column 'gold'; the rows have"):
        kind(column="gold")(["?"], ["7"], [[1]], answer=["7"])
    for arguments, named in (
        ({"column": ""}, "column=''"),
        ({"where": "text"}, "where='text'"),
        ({"where": []}, "where="),
    ):
        with pytest.raises(ValueError, match=re.escape(named)):
            kind(**arguments)


@pytest.mark.parametrize("settings", [{"rel_tol": -1}, {"abs_tol": math.inf}, {"rel_tol": math.nan}], ids=str)
def test_tolerances_out_of_range(settings):
    with pytest.raises(ValueError, match="must be finite and not negative"):
        NumericMatch(**settings)


def slow_last_boxed(text: str) -> str | None:
    """Search in quadratic time: from the last opening to the first, count braces until they balance."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[begin:end].strip()
    return None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{85}", "85"),
        (r"\boxed{1} no, \boxed{ 2 } done", "2"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}}", r"\text{a {b} c}"),
        (r"\boxed{outer \boxed{inner}}", "inner"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{1 and \boxed{2}", "2"),
        (r"} \boxed{3} } {", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{a{b}", None),
        (r"It is $\boxed 85$.", "85"),
        (r"\boxed -1,234.5, or so", "-1,234.5"),
        (r"\boxed {8}", "8"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed{1} or $-\boxed \sqrt{2}$", r"\sqrt{2}"),
        (r"\boxed{1 \boxed 2}", "2"),
        (r"\boxed{1}, with \boxed as asked, or \boxed I see", "1"),
        (r"\boxed{1}, not \boxed 7x, \boxed 7.5^2 or \boxed\pi^2", "1"),
        ("boxed{4}", None),
        ("The answer is 85", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", " ", "7", "\\frac", "boxed{"]), max_size=24).map("".join))
def test_last_boxed_equals_a_slow_reference(text):
    assert last_boxed(text) == slow_last_boxed(text)


def test_match_is_exact_and_none_abstains():
    completions = [r"\boxed{85}", r"\boxed{ 85 }", r"\boxed{085}", r"\boxed{85.0}", "85", r"\boxed{85}"]
    answer = ["85"] * 5 + [None]
    assert boxed_accuracy(["p"] * 6, completions, answer=answer) == [1.0, 1.0, 0.0, 0.0, 0.0, None]


def test_no_box_never_matches_an_empty_answer():
    assert boxed_accuracy(["p", "p"], ["", r"\boxed{}"], answer=["", ""]) == [0.0, 1.0]


def test_the_last_assistant_message_is_judged():
    def says(*turns):
        return [{"role": role, "content": content} for role, content in turns]

    right, wrong = r"\boxed{6}", r"\boxed{7}"
    completions = [
        says(("assistant", right)),
        says(("assistant", wrong), ("tool", "6"), ("assistant", right)),
        says(("assistant", right), ("tool", "6"), ("assistant", wrong)),
        says(("assistant", wrong), ("tool", right)),
        says(("assistant", right), ("assistant", None)),
        [],
    ]
    prompts = [says(("user", right))] * len(completions)
    rewards = boxed_accuracy(prompts, completions, answer=["6"] * len(completions), completion_ids=[[1]] * 6)
    assert rewards == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("lengths", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_length_mismatch_is_an_error(lengths):
    prompts, completions, answer = (["x"] * n for n in lengths)
    with pytest.raises(ValueError, match="must have equal lengths"):
        boxed_accuracy(prompts, completions, answer=answer)


def test_an_answer_that_can_never_match_is_an_error():
    with pytest.raises(TypeError, match="85"):
        boxed_accuracy(["p"], [r"\boxed{85}"], answer=[85])
