from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.cost import assert_linear
from torchrl_rloo.rewards.choices import MultipleChoice

ABCD = MultipleChoice(choices="ABCD")
PIECES = st.lists(
    st.sampled_from(
        ["A", "B", "c", "answer is ", "Answer: ", "(", ")", "\n", " or ", ", ", r"\boxed{", "}", ". ", "I "]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize(
    ("text", "letter"),
    {
        # boxes
        r"\boxed{C}": "C",
        r"\boxed{\text{(C) 42}}": "C",
        r"\boxed{c}": "C",
        r"\boxed{A}, no: \boxed{B}": "B",
        r"\boxed{B}. The answer is not A, it is clear": "B",
        r"\boxed{42}. The answer is C": "C",
        r"\boxed{a good idea}": None,
        # announcements
        "A good idea is to test each. The answer is B": "B",
        "The answer is (c).": "C",
        "**Answer: C**": "C",
        "Answer:\n\nC": "C",
        "ANSWER - (D) Rome": None,
        'The answer is: "B"': "B",
        "Answer to the question is clearly B": "B",
        "The correct option is C, not D.": "C",
        "Option A is wrong. So the answer is B, since option D is silly.": "B",
        "The answer is not C, it is D": "D",
        "The answer is A. Hmm, no. The answer is B.": "B",
        "The answer is A because it rains": "A",
        "I choose option (D).": "D",
        "The answer is a matter of taste": None,
        "The answer is A-level": None,
        # lines
        "C": "C",
        " (C) \n": "C",
        "**C.**": "C",
        "c": "C",
        "C) Paris": "C",
        "It is\nC. Paris\nfor sure": "C",
        "A) Rome\nB) Paris\nC) Bonn": None,
        "A) Rome\nB) Paris\n\nB": "B",
        # prose and hedges
        "A good idea": None,
        "Both A and B": None,
        "The answer is A or B": None,
        "The answer is A, B, and C.": None,
        "Answer: A/B/C/D": None,
        r"\boxed{A, B}": None,
        "E": None,
        "": None,
        # letters that are ruled out, supposed or doubted
        "The answer cannot be A.": None,
        "The answer can't be A, so it is B.": "B",
        "The answer can’t be A. The answer is C.": "C",
        "The answer is B. (The answer would be A if x > 0.)": "B",
        "The answer might be A?\n\nB": "B",
        "The answer is A or maybe C": None,
        "The answer is A, or perhaps C": None,
        "The answer is A (or B)": None,
        "The answer is A (B is wrong).": "A",
        "The answer could well be A.": None,
        "If x > 0, the answer is A. Otherwise the answer is B.": "B",
        "Suppose the answer is A. Then 2 = 3. The answer is B.": "B",
        "The answer is B if n is even": None,
        "The wrong answer is A.": None,
        "I don't choose A. I choose C.": "C",
        "The answer isn't necessarily A, it is B": "B",
        "Perhaps the answer is A. No: the answer is B": "B",
        "At first I thought the answer is A. The answer is D.": "D",
        "I would not go with A.": None,
        "The answer is B|C": None,
        r"\boxed{A. B. C.}": None,
        "I doubt that the answer is A.": None,
        "The answer used to be A.": None,
        "The answer is A. That is wrong.": None,
        "The answer is A. No wait, that's wrong. The answer is C.": "C",
        # certain choices near such words
        "There is no doubt that the answer is B.": "B",
        "The answer is B. C is wrong.": "B",
        "The answer is B. A, C and D are wrong.": "B",
        r"\boxed{B. Paris}": "B",
        "Since the others are wrong, the answer is C.": "C",
        "If we add 2 and 3 we get 5, so the answer is B.": "B",
        "A cannot be. The answer is B": "B",
        "The answer must be C.": "C",
        "It may rain. I'd go with D": "D",
        "The answer is B, which would be wrong for odd n.": "B",
        # letters that come first or alone, tags, and choices of others
        "The correct answer is B, although many people would choose C.": "B",
        "B is the correct answer.": "B",
        "<answer>B</answer>": "B",
        "The answer is C? No, B.": "B",
        "It's B.": "B",
        "Most students pick C. The answer is B.": "B",
        "The answer is B; others might select C instead.": "B",
        "I would choose D.": "D",
        "So I'll go with (a).": "A",
        "Let's choose C.": "C",
        "A is wrong and B is correct.": "B",
        "While A is tempting, B is the right choice.": "B",
        "None of A, B, C is correct.": None,
        "Neither A nor B is correct.": None,
        "If B is correct, then it rains.": None,
        "Is B correct?": None,
        "B is correct? I doubt it.": None,
        "A or B is correct.": None,
        "B must be the answer.": "B",
        "Therefore (c).": "C",
        "It is A good idea.": None,
        "That's D, I am sure.": "D",
        "Option (D) is the best answer, because it is warm.": "D",
        "B is my final answer": "B",
        "<answer>A</answer> so <answer>D</answer>": "D",
        "<answer>A or B</answer>": None,
        "<answer>Paris</answer> The answer is C": "C",
        "<answer>B": None,
        "Many would pick C, but the answer is B.": "B",
        "It is not true that B is correct.": None,
        "B is correct about the date, yet the answer is C.": "C",
        "People who choose A are wrong; D is correct.": "D",
        "Do not choose A.": None,
        "They choose A.": None,
    }.items(),
)
def test_find_choice(text, letter):
    assert ABCD.find_choice(text) == letter


@settings(deadline=None, max_examples=100)
@given(PIECES | st.text(max_size=40))
def test_no_text_raises_and_a_choice_is_a_letter_of_the_text(text):
    chosen = ABCD.find_choice(text)
    assert chosen is None or (chosen in "ABCD" and chosen in text.upper())


@pytest.mark.parametrize(
    "piece", ["answer is ", "(A)", "A, ", "\n", r"\boxed{", "{", "answer ", "A)\n", "answer is A or ", " "]
)
def test_time_is_linear_in_the_text(piece):
    assert_linear(lambda n: ABCD.find_choice(piece * n), 2_000)


@pytest.mark.parametrize("gold", ["B", "b", "(B)", "B.", " B ", 1])
def test_golds_as_letters_and_indices(gold):
    assert ABCD(["?"] * 2, [r"\boxed{B}", "C"], [[1]] * 2, answer=[gold] * 2) == [1, 0]


def test_golds_as_texts():
    reward = MultipleChoice("gold", "ABC", options="texts")
    texts = ["Rome", "Paris", "Bonn"]
    columns = {"gold": ["Paris", " paris", 1, "B", None], "texts": [texts] * 5}
    assert reward(["?"] * 5, ["B"] * 5, [[1]] * 5, **columns) == [1, 1, 1, 1, None]
    with pytest.raises(ValueError, match="gold='London' must be one of the choices ABC.*'Rome'"):
        reward(["?"], ["B"], [[1]], gold=["London"], texts=[texts])
    with pytest.raises(KeyError, match="requires column 'texts'"):
        reward(["?"], ["B"], [[1]], gold=["B"])


@pytest.mark.parametrize("gold", ["E", "Paris", 4, -1, 1.0, True])
def test_golds_that_are_no_choice(gold):
    with pytest.raises(ValueError, match="must be one of the choices ABCD, an index 0 to 3"):
        ABCD(["?"], ["B"], [[1]], answer=[gold])


def test_digits_name_choices_and_messages_are_read():
    reward = MultipleChoice(choices="1234")
    texts = ["The answer is 3.", "The answer is 3.5", [{"role": "assistant", "content": "3"}], []]
    assert reward(["?"] * 4, texts, [[1]] * 4, answer=["3"] * 4) == [1, 0, 1, 0]
    assert MultipleChoice().find_choice("The answer is I think B") is None


@pytest.mark.parametrize("choices", ["A", "", "AA", "Aa", ["A", "BC"], "A-"])
def test_choices_out_of_range(choices):
    with pytest.raises(ValueError, match="choices="):
        MultipleChoice(choices=choices)
