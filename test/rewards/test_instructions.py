"""Instruction checks: texts that follow each kind, and texts that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cost import assert_linear
from torchrl_rloo.rewards.instruction_checks import CHECKS, compare
from torchrl_rloo.rewards.instructions import InstructionFollowing

CASES = [  # instruction, arguments, a text that follows it, one that does not
    ("keywords:existence", {"keywords": ["rain", "sun"]}, "Sun after Rain.", "Sun, and raindrops."),
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "at least"}, "So so.", "So soon."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "Eh", "EhE"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz gewöhnlicher Satz.", "This is English."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Yes. No!", "Yes, no..."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "well-known it's", "a b c"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen, more.",
        "Then.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street 1]", "[name] []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. call me", "Bye\nPS"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\nP.P.S more", "Bye\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "no"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na\nSECTIONS\nb",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": 1'),
    ("detectable_format:title", {}, "<<Rain>>\nIt rains.", "<< >> it rains"),
    ("combination:two_responses", {}, "a\n******\nb", "a ****** a"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'All is well. the end."', "The end. Really."),
    ("startend:quotation", {}, '"quoted"', '"half'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "OH NO", "Oh NO"),
    ("change_case:english_capital", {}, "ALL 3!", "ALl"),
    ("change_case:english_lowercase", {}, "all 3!", "aLl"),
    ("punctuation:no_comma", {}, "no; never", "no, never"),
]


def score(text, name, arguments, **settings):
    columns = {"instruction_id_list": [[name]], "kwargs": [[arguments]]}
    return InstructionFollowing(**settings)(["?"], [text], [[1]], **columns)[0]


def test_every_kind_is_here():
    assert {name for name, *_ in CASES} == set(CHECKS) and len(CHECKS) == 25


@pytest.mark.parametrize(
    ("name", "arguments", "right", "wrong"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_kinds(name, arguments, right, wrong):
    filled = arguments | {"unused": None}  # Arrow fills missing keys of mappings with None
    assert score(right, name, filled) == 1.0
    assert score([{"role": "assistant", "content": wrong}], name, filled) == 0.0
    assert score("", name, filled) == score(" \n", name, filled) == 0.0


@given(st.text(), st.sampled_from([c for c in CASES if c[0] != "language:response_language"]))
def test_any_text_is_survived(text, case):
    assert score(text, case[0], case[1]) in (0.0, 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
@pytest.mark.parametrize("piece", ["\n", " ", "\r\n", "*", "[", "<", "P.S"])
def test_time_is_linear_in_the_text(case, piece):
    name, arguments, *_ = case
    if name != "language:response_language":
        assert_linear(lambda n: score("x" + piece * n + "x", name, arguments), 4_000)


def test_all_or_the_share():
    ids = ["punctuation:no_comma", "startend:quotation"]
    columns = {"instruction_id_list": [ids, ids, None], "kwargs": [[{}, None], [{}, {}], None]}
    arguments = (["?"] * 3, ["bare", '"quoted"', "x"], [[1]] * 3)
    assert InstructionFollowing(partial=True)(*arguments, **columns) == [0.5, 1.0, None]
    assert InstructionFollowing()(*arguments, **columns) == [0.0, 1.0, None]


def test_errors():
    with pytest.raises(ValueError, match=r"unknown instruction 'keywords:none'; valid: \['change_case"):
        score("x", "keywords:none", {})
    with pytest.raises(ValueError, match=r"'keywords:existence' with {'keyword': 'a'}: .*keyword"):
        score("x", "keywords:existence", {"keyword": "a"})
    with pytest.raises(ValueError, match="relation='around' must be one of"):
        compare(1, 2, "around")
    with pytest.raises(KeyError, match="requires column 'instruction_id_list'"):
        InstructionFollowing()(["?"], ["x"], [[1]], kwargs=[[]])
    with pytest.raises(ValueError, match="2 instructions .* as many kwargs, got 1"):
        InstructionFollowing()(["?"], ["x"], [[1]], instruction_id_list=[["a", "b"]], kwargs=[[{}]])
