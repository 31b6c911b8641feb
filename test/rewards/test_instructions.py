"""Instruction checks: texts that follow each kind, and texts that do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_rloo.rewards.instructions import CHECKS, InstructionFollowing, compare

CASES = [  # instruction, arguments, a text that follows it, one that does not
    ("keywords:existence", {"keywords": ["rain", "sun"]}, "Sunny after Rain.", "Sun, and snow."),
    ("keywords:existence", {"keywords": ["sing"]}, "They are singing", "They sin g"),
    ("keywords:existence", {"keywords": ["a.c"]}, "A.C", "abc"),
    ("keywords:frequency", {"keyword": "so", "frequency": 2, "relation": "at least"}, "So soon.", "So on."),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "less than"}, "Cat", "cats cat Cats"),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a Cat"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "less than"}, "Eh", "EhE"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz gewöhnlicher Satz.", "This is English."),
    ("language:response_language", {"language": "fr"}, "12 + 3", "Questo è un testo in italiano."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Yes. No!", "Yes, no..."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "Dr. J. Smith met Mr. Jones at 5 p.m. on Monday.",
        "He met Dr. Smith. Then he left.",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, "好。是。不！", "3.5 is a.b"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        '"Go." "No."',
        "etc. and so on",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***a *** b***", "a *** *** c"),
    ("length_constraints:number_words", {"num_words": 4, "relation": "less than"}, "a b c", "It's well-known"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        "First.\n\nThen, more.",
        "Then.\n\nFirst.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "First.\n\n'Weekend's here",
        "First.\n\n**weekend**",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], []", "[name] [a\nb]"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[[a]", "]a["),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP.S. call me", "Bye\nPS"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "**P.S.** Call", "P.\n\nS. Call"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye. p. s. call", "P S."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye, P.P.S more", "Bye\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "*a\n\n  -c", "**a\n- c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "no"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and ** **"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "* a *", "*a\nb*"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSUBSECTION2\nb",
        "SECTION 1\na\nSECTION  2\nb",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": 1'),
    ("detectable_format:json_format", {}, '```{"a": [1]}```', '``{"a": 1}``'),
    ("detectable_format:title", {}, "<<Rain>>\nIt rains.", "<< >> it rains"),
    ("detectable_format:title", {}, "a <<a > b>> c", "<<a\nb>>"),
    ("combination:two_responses", {}, "a\n******\nb", "a ****** a"),
    ("combination:two_responses", {}, "******a ****** b", "a ****** ****** b"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, "say hi. Hi!", "Hi! Say hi."),
    ("startend:end_checker", {"end_phrase": "The end."}, 'All is well. the end."', "The end. Really."),
    ("startend:quotation", {}, '"quoted"', '"half'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "OH NO", "Oh NO"),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "IT'S",
        "WELL-KNOWN",
    ),
    ("change_case:english_capital", {}, "ALL 3!", "ALl"),
    ("change_case:english_capital", {}, "THE RAIN IN SPAIN FALLS", "HOLA AMIGOS"),
    ("change_case:english_lowercase", {}, "all 3!", "aLl"),
    ("change_case:english_lowercase", {}, "the rain falls", "xkjq zzz"),
    ("change_case:english_lowercase", {}, "i like trains and bread", "bonjour tout le monde"),
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


@given(st.text(), st.sampled_from([c for c in CASES if "language" not in c[0]]))
def test_any_text_is_survived(text, case):
    assert score(text, case[0], case[1]) in (0.0, 1.0)


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


@pytest.mark.parametrize(
    "text, strict, loose",
    [
        ("Sure, here it is:\nno comma", 0, 1),
        ("no comma\nI hope, this helps", 0, 1),
        ("Well,\nno comma\nBye, now", 0, 1),
        ("one, two\nthree, four\nfive", 0, 0),
        ("no comma", 1, 1),
        ("", 0, 0),
    ],
)
def test_loose_readings_leave_out_the_first_or_the_last_line(text, strict, loose):
    columns = {"instruction_id_list": [["punctuation:no_comma"]], "kwargs": [[{}]]}
    for accepted, expected in ((False, strict), (True, loose)):
        assert InstructionFollowing(loose=accepted)(["?"], [text], [[1]], **columns) == [expected]


def test_loose_readings_leave_out_asterisks():
    columns = {"instruction_id_list": [["startend:end_checker"]], "kwargs": [[{"end_phrase": "The end."}]]}
    scores = [
        InstructionFollowing(loose=loose)(["?"], ["**So: The end.**"], [[1]], **columns) for loose in (False, True)
    ]
    assert scores == [[0], [1]]
