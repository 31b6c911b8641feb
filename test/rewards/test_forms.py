"""A reward for texts that gets messages, or the reverse, is told what to set: by the runner, and before a run."""

from __future__ import annotations

import re

import pytest

from torchrl_rloo.data import load_prompts
from torchrl_rloo.diagnostics.checks import CHECKS, Facts, probe_rewards
from torchrl_rloo.diagnostics.checks.probes import find_form_hints
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.rewards import RewardBatch, RewardRunner, boxed_accuracy
from torchrl_rloo.rewards.runner import RewardFailureError

ROWS = [{"prompt": f"{i}+{i}?", "answer": str(2 * i)} for i in range(6)]
TO_TEXT, TO_CHAT = "it expects texts, but gets chat messages: set data.chat=false", "it expects chat messages, but gets"


def unique(completions, **columns):  # the first four are for texts
    return [len(set(completion)) for completion in completions]


def length(completions, **columns):
    return [float(len(completion)) for completion in completions]


async def matches(prompts, completions, answer, **columns):
    return [float(bool(re.search(gold, text))) for text, gold in zip(completions, answer, strict=True)]


def says(completions, answer, **columns):
    return [float(gold in text) for text, gold in zip(completions, answer, strict=True)]


def last_message(completions, **columns):  # for messages
    return [float(len(completion[-1]["content"])) for completion in completions]


def broken(completions, other, **columns):  # for nothing
    return [other[0]["missing"]]


def flat(completions, **columns):
    return [1.0] * len(completions)


TEXTS = [unique, length, matches, says]


@pytest.mark.parametrize("function", [*TEXTS, last_message, broken, flat, boxed_accuracy], ids=lambda f: f.__name__)
def test_only_a_function_that_scores_the_other_form_alone_is_advised(function):
    tokenizer = build_tokenizer()
    for chat in (True, False):
        hints = find_form_hints([function], load_prompts(ROWS, chat=chat), tokenizer)
        expected = TO_TEXT if chat and function in TEXTS else TO_CHAT if not chat and function is last_message else None
        assert list(hints) == [function.__name__] * bool(expected) and all(expected in h for h in hints.values())


@pytest.mark.parametrize(("function", "check"), [(unique, "reward failures"), (length, "reward order")])
def test_the_checks_before_a_run_advise(function, check):
    train, tokenizer = load_prompts(ROWS, chat=True), build_tokenizer()
    facts = Facts(
        None,
        train,
        train,
        tokenizer,
        functions=[function.__name__],
        probes=probe_rewards([function], train, tokenizer),
        form_hints=find_form_hints([function], train, tokenizer),
    )
    found = CHECKS[check](facts)
    (finding,) = [found] if not hasattr(found, "__next__") else found
    assert finding.level == "error" and finding.remedy.startswith(TO_TEXT)


def test_a_run_that_it_fails_says_so_and_a_failure_of_another_kind_does_not(caplog):
    said = [[{"role": "assistant", "content": text}] for text in ("a", "bc", "")]
    batch = RewardBatch(
        [[{"role": "user", "content": "?"}]] * 3, said, [[1]] * 3, {"answer": ["2"] * 3, "other": [{}] * 3}
    )
    for function, advised in ((unique, True), (matches, True), (broken, False)):
        with pytest.raises(RewardFailureError, match="samples in a row") as failure:
            RewardRunner(function, max_consecutive_failures=3)(batch)
        assert (TO_TEXT in str(failure.value)) == (TO_TEXT in caplog.records[-1].getMessage()) == advised
