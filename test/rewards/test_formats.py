from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.formats import RegexFormat, think_format

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


def matches(texts, *args, **settings):
    return RegexFormat(*args, **settings)(["?"] * len(texts), texts, [[1]] * len(texts))


def test_regex_format():
    texts = ["<a>1</a>", "<a>1\n2</a>", "x<a>1</a>", "<A>1</A>", [{"role": "assistant", "content": "<a></a>"}], []]
    assert matches(texts, "<a>.*</a>") == [1, 1, 0, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", search=True) == [1, 1, 1, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", flags="") == [1, 0, 0, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", flags="si") == [1, 1, 0, 1, 1, 0]
    assert matches(texts, "(?i)<a>.*</a>") == [1, 1, 0, 1, 1, 0]


@given(PIECES)
def test_regex_format_matches_a_text_as_itself_alone(text):
    reward = pickle.loads(pickle.dumps(RegexFormat(re.escape(text))))
    assert reward(["?"] * 2, [text, text + "!"], [[1]] * 2) == [1, 0]


@pytest.mark.parametrize("pattern", ["(", "*", "[a", None, 3])
def test_patterns_that_are_none(pattern):
    with pytest.raises(ValueError, match="must be a valid regular expression"):
        RegexFormat(pattern)


def test_flags_that_are_none():
    with pytest.raises(ValueError, match="unknown flag 'q'"):
        RegexFormat("a", flags="sq")
