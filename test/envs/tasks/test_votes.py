"""Votes of majorities: answers share a vote exactly if the scorer gives them one verdict, whatever the gold."""

from __future__ import annotations

import itertools

import pytest

from support.answers import CHOICES, MATH, NUMBERS
from torchrl_rloo.embedded.resolve import TASKS as EMBEDDED_TASKS
from torchrl_rloo.envs.tasks.registry import TASKS
from torchrl_rloo.evaluation.statistics import maj_at_k
from torchrl_rloo.rewards.matching import boxed_answer

BOXED = [[rf"\boxed{{{answer}}}" for answer in group] for group in MATH]
GOLDS = {
    "math": [group[-1] for group in MATH[::4]],
    "gsm8k": ["11/2", "1/12", "0.5", "-3/4", "1.75", "1000", "1000000", "50%", "50", "-50"],
    "multiple_choice": list("ABCD"),
}
GROUPS = {"math": BOXED, "gsm8k": NUMBERS, "multiple_choice": CHOICES}
COLUMN = {"math": "solution", "gsm8k": "answer", "multiple_choice": "answer"}


def test_every_task_with_votes_is_here():
    voting = {name for name, task in TASKS.items() if task.extract_answer is not None}
    assert voting == {*GROUPS, "geometry3k"} and TASKS["geometry3k"].extract_answer is TASKS["math"].extract_answer
    assert {t.scorer for t in EMBEDDED_TASKS.values() if t.extract_answer} <= {
        "boxed_accuracy",
        *(TASKS[name].scorer for name in GROUPS),
    }


@pytest.mark.parametrize("name", GROUPS)
def test_equal_answers_are_one_vote_and_different_ones_are_not(name):
    vote = TASKS[name].extract_answer
    votes = [{vote(text) for text in group} for group in GROUPS[name]]
    assert all(len(forms) == 1 and None not in forms for forms in votes), votes
    assert not [pair for pair in itertools.combinations(votes, 2) if pair[0] & pair[1]]
    assert boxed_answer(r"\boxed{1 2}") != boxed_answer(r"\boxed{12}")


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.usefixtures("one_judge")
def test_one_vote_is_one_verdict_against_each_gold(name):
    scorer, groups = TASKS[name].make_scorer(), GROUPS[name]
    groups = [list(dict.fromkeys(group[:1] + group[-2:])) for group in groups]
    texts = [text for group in groups for text in group]
    verdicts = {text: [] for text in texts}
    for gold in GOLDS[name]:
        scores = scorer(["?"] * len(texts), texts, [[1]] * len(texts), **{COLUMN[name]: [gold] * len(texts)})
        for text, score in zip(texts, scores, strict=True):
            verdicts[text].append(score)
    odd = [group for group in groups if len({tuple(verdicts[text]) for text in group}) > 1]
    assert not odd
    earned = [tuple(verdicts[group[0]]) for group in groups if any(verdicts[group[0]])]
    assert len(set(earned)) == len(earned) >= len(GOLDS[name])


def test_majorities_of_right_answers_win():
    vote = TASKS["math"].extract_answer
    boxes = [rf"\boxed{{{a}}}" for a in (r"\frac{11}{2}", "5.5", r"\frac{1}{12}", r"\frac1{12}", "5", "5", "5")]
    assert maj_at_k([vote(b) for b in boxes], [1, 1, 0, 0, 0, 0, 0], 7) == 0.0
    boxes = [rf"\boxed{{{a}}}" for a in (r"\frac{1}{2}", "0.5", "1/2", "3", "3")]
    assert maj_at_k([vote(b) for b in boxes], [1, 1, 1, 0, 0], 5) == 1.0


@pytest.mark.parametrize("groups", [BOXED], ids=["text"])
def test_votes_without_a_scorer_never_join_different_answers(groups):
    votes = [{boxed_answer(text) for text in group} for group in groups]
    assert not [pair for pair in itertools.combinations(votes, 2) if pair[0] & pair[1]]


@pytest.mark.parametrize(
    ("one", "other"),
    [("1/2", "0.5"), (r"\frac{1}{2}", r"\dfrac12"), ("x=5", "5"), (r"\$5", "5.0"), ("1,234", r"1\,234"),
     (r"\frac{x}{2}", r"\frac x2"), (r"\dfrac{a}{b}", r"\frac{a}{b}"), (r"\frac{1}{2}", r"\frac 1 2"),
     (r"x^{2}", "x^2"), (r"\left(1, 2\right)", "(1,2)"), (r"\text{Yes}", "yes")],
)  # fmt: skip
def test_votes_without_a_scorer_join_notations(one, other):
    assert boxed_answer(rf"\boxed{{{one}}}") == boxed_answer(rf"\boxed{{{other}}}") is not None
