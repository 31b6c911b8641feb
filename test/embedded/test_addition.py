from __future__ import annotations

import random
import re

import pytest

from torchrl_rloo.embedded import addition_demonstrations, addition_prompts, build_tokenizer
from torchrl_rloo.embedded.addition import P_FORGET_CARRY, P_OMIT_BOX, P_SLIP
from torchrl_rloo.rewards import boxed_accuracy

STEP = re.compile(r"(\d)\+(\d)(?:\+(\d))?=(\d+)")
ANSWER = re.compile(r"</think>(?:\\boxed\{(\d+)\}|The answer is (\d+))$")


def problem(messages) -> tuple[int, int]:
    a, b = re.fullmatch(r"What is (\d+)\+(\d+)\?", messages[1]["content"]).groups()
    return int(a), int(b)


def columns(text: str) -> list[tuple[int, int, int, int]]:
    """Return ``(x, y, carry, total)`` of every column in the chain of thought."""
    return [(int(x), int(y), int(carry or 0), int(total)) for x, y, carry, total in STEP.findall(text)]


def test_splits_hold_every_problem_once_and_never_overlap():
    train = [problem(row["query"]) for row in addition_prompts("train")]
    test = [problem(row["query"]) for row in addition_prompts("test")]
    assert sorted(train + test) == [(a, b) for a in range(100) for b in range(100)]
    assert len(test) == 1003  # pins the hash: a change would leak held-out problems into old checkpoints' training data
    assert {(b, a) for a, b in test} == set(test)


def test_rows():
    for row in addition_prompts("test"):
        assert set(row) == {"query", "answer"}
        assert [m["role"] for m in row["query"]] == ["system", "user"]
        assert row["answer"] == str(sum(problem(row["query"])))


def test_seed_sets_the_order_and_size_keeps_the_first():
    full = addition_prompts("train", seed=1)
    other = addition_prompts("train", seed=2)
    assert addition_prompts("train", seed=1) == full
    assert addition_prompts("train", size=50, seed=1) == full[:50]
    assert other != full
    assert sorted(map(repr, other)) == sorted(map(repr, full))
    for size in (0, -1, 10_001):
        with pytest.raises(ValueError, match=f"size={size} must be"):
            addition_prompts("train", size=size)
    with pytest.raises(ValueError, match="'validation'"):
        addition_prompts("validation")


def test_demonstrations_are_deterministic_and_leave_the_global_random_state_alone():
    state = random.getstate()
    first = addition_demonstrations(64, 3)
    assert random.getstate() == state
    assert addition_demonstrations(64, 3) == first
    assert addition_demonstrations(64, 4) != first


def test_clean_demonstrations_are_right_in_every_step_and_short():
    shown = addition_demonstrations(3000, 0, clean=True)
    texts = [messages[-1]["content"] for messages in shown]
    answers = [str(sum(problem(messages))) for messages in shown]
    assert not {problem(row["query"]) for row in addition_prompts("test")} & {problem(messages) for messages in shown}
    assert boxed_accuracy(shown, texts, answer=answers) == [1.0] * len(shown)
    for messages, text in zip(shown, texts, strict=True):
        a, b = problem(messages)
        carry = 0
        assert len(columns(text)) == max(len(str(a)), len(str(b)))
        for i, (x, y, written, total) in enumerate(columns(text)):
            assert (x, y, written, total) == (a // 10**i % 10, b // 10**i % 10, carry, x + y + carry)
            carry = total // 10
    tokens = build_tokenizer()([text + "<|im_end|>" for text in texts])["input_ids"]
    assert max(map(len, tokens)) == 25


def test_the_sloppy_teacher_errs_as_often_as_it_should():
    carries = forgotten = shown = slips = boxes = 0
    for messages in addition_demonstrations(6000, 0):
        text, previous, said = messages[-1]["content"], 0, ""
        for i, (x, y, carry, total) in enumerate(columns(text)):
            if i and previous >= 10:
                carries += 1
                forgotten += carry == 0
            assert carry in (0, previous // 10)
            shown += 1
            slips += total != x + y + carry
            assert abs(total - (x + y + carry)) <= 1
            previous, said = total, f"{total % 10}{said}"
        boxed, plain = ANSWER.search(text).groups()
        assert int(boxed or plain) == int(f"{previous // 10}{said}")  # the answer follows from what is written
        boxes += boxed is not None
    assert forgotten / carries == pytest.approx(P_FORGET_CARRY, abs=0.04)
    assert slips / shown == pytest.approx(P_SLIP, abs=0.01)
    assert boxes / 6000 == pytest.approx(1 - P_OMIT_BOX, abs=0.03)
