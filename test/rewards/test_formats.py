from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.formats import think_format

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", " ", "<THINK>", "think>"]), max_size=6).map(
    "".join
)


@given(PIECES)
def test_think_format_is_one_opening_at_the_start_and_a_closing(text):
    tags = re.findall("</?think>", text)
    expected = text[:7] == "<think>" and tags.count("<think>") == 1 and "</think>" in tags
    assert think_format(["?"], [text], [[1]]) == [expected]


def test_the_last_assistant_message_is_judged():
    good, bad = ({"role": "assistant", "content": text} for text in ("<think></think>7", "7"))
    assert think_format(["?"] * 3, [[bad, good], [good, bad], []], [[1]] * 3) == [1, 0, 0]
