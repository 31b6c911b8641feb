from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards import boxed_accuracy, last_boxed


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
