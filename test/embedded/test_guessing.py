"""Guessing task: problems, teachers, and the game that answers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

import pytest

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.embedded.guessing import (
    HIGHEST,
    LOWEST,
    MAX_GUESSES,
    P_THOUGHTLESS,
    RANGE_SIZES,
    SECRETS_PER_RANGE,
    guessing_demonstrations,
    guessing_prompts,
)
from torchrl_rloo.embedded.resolve import GUESSING
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import vLLMWrapper

TOKENIZER = build_tokenizer()
SAID = re.compile(r"<think>(?:(\d+)-(\d+))?</think>(\d+)")


def bounds(messages) -> tuple[int, int]:
    low, high = re.fullmatch(r"Guess a number between (\d+) and (\d+)\.", messages[0]["content"]).groups()
    return int(low), int(high)


def guesses(messages) -> list[tuple[str | None, str | None, int]]:
    """Return the written bounds and the guess of each turn."""
    said = [SAID.fullmatch(m["content"]).groups() for m in messages if m["role"] == "assistant"]
    return [(low, high, int(guess)) for low, high, guess in said]


def test_splits_share_no_bounds_and_all_numbers():
    train, test = guessing_prompts("train"), guessing_prompts("test")
    seen, held_out = ({bounds(row["query"]) for row in rows} for rows in (train, test))
    assert not seen & held_out
    assert seen | held_out == {
        (low, low + size + 1) for size in RANGE_SIZES for low in range(LOWEST, HIGHEST + 1) if low + size + 1 <= HIGHEST
    }
    assert len(held_out) == 91 and len(test) == 91 * SECRETS_PER_RANGE  # pins the hash
    assert {row["secret"] for row in train} >= {row["secret"] for row in test}
    assert set(Counter(bounds(row["query"]) for row in train).values()) == {SECRETS_PER_RANGE}


def test_rows():
    for row in guessing_prompts("test"):
        assert set(row) == {"query", "low", "high", "secret"} and bounds(row["query"]) == (row["low"], row["high"])
        assert row["low"] < row["secret"] < row["high"]
    first, other = guessing_prompts("train", size=50, seed=1), guessing_prompts("train", size=50, seed=2)
    assert guessing_prompts("train", size=50, seed=1) == first != other
    with pytest.raises(ValueError, match="size=729 must be"):
        guessing_prompts("test", size=729)
    with pytest.raises(ValueError, match="'validation'"):
        guessing_prompts("validation")


def test_clean_demonstrations_heed_every_answer():
    held_out = {bounds(row["query"]) for row in guessing_prompts("test")}
    found = 0
    for messages in guessing_demonstrations(2000, 0, clean=True):
        low, high = bounds(messages)
        assert (low, high) not in held_out
        answers = [m["content"] for m in messages[2::2]]
        played = guesses(messages)
        for i, (written_low, written_high, guess) in enumerate(played):
            assert (written_low, written_high) == (str(low), str(high)) and low < guess < high
            assert min(guess - low, high - guess) >= (high - low) * 2 // 5
            if i < len(answers):
                assert answers[i] in ("higher", "lower")
                low, high = (guess, high) if answers[i] == "higher" else (low, guess)
        found += len(played) < MAX_GUESSES  # or at the very last guess
    assert found > 1900


def test_the_sloppy_teacher_errs_as_often_as_it_should():
    state = random.getstate()
    games = guessing_demonstrations(3000, 3)
    assert random.getstate() == state and guessing_demonstrations(3000, 3) == games
    thoughtless = [game for game in games if guesses(game)[0][0] is None]
    assert len(thoughtless) / 3000 == pytest.approx(P_THOUGHTLESS, abs=0.03)
    for game in thoughtless:
        low, high = bounds(game)
        assert all(written is None and low < guess < high for written, _, guess in guesses(game))
    tokens = [len(ids) for ids in TOKENIZER([m["content"] for m in games[0] if m["role"] == "assistant"])["input_ids"]]
    assert max(tokens) < 12


# ------------------------------------------------------------------------------------------------------ the environment
def rows_of(say: Callable[[list[str], int, int], str]) -> list:
    """Return a finished row for each of four games, of a policy that guesses ``say(answers so far, low, high)``."""
    train, _ = GUESSING.load(eval_size=1, limit=4)
    env = GUESSING.env(train, TOKENIZER, prompts_per_batch=4)

    def turn(request, index) -> ScriptedTurn:
        prompt = TOKENIZER.decode(request.prompt)
        low, high = map(int, re.search(r"between (\d+) and (\d+)", prompt).groups())
        said = say(re.findall(r"user\n(higher|lower)", prompt), low, high)
        return ScriptedTurn(TOKENIZER(said + "<|im_end|>")["input_ids"])

    with ScriptedEngine(turn) as engine:
        policy = vLLMWrapper(engine, tokenizer=TOKENIZER, generate_kwargs={"max_new_tokens": 12})
        return list(LLMCollector(env, policy).collect().unbind(0))


def bisect(answers: list[str], low: int, high: int) -> str:
    for answer in answers:
        guess = (low + high) // 2
        low, high = (guess, high) if answer == "higher" else (low, guess)
    return f"<think>{low}-{high}</think>{(low + high) // 2}"


def test_who_bisects_finds_the_number():
    for row in rows_of(bisect):
        assert float(row[keys.REWARD]) == 1.0 and stop_reason(row) == "ended"
        assert int(row[keys.NUM_TURNS]) <= MAX_GUESSES
        said = [m["content"] for m in row[keys.COMPLETION]]
        assert said[-1].endswith(f"</think>{row['secret']}")
        sampled = TOKENIZER.decode(row[keys.TOKENS][row[keys.ACTION_MASK]])
        assert sampled == "".join(text + "<|im_end|>" for text in said[::2])


def test_who_does_not_has_lost_after_seven_guesses():
    for row in rows_of(lambda answers, low, high: "<think></think>7"):
        assert float(row[keys.REWARD]) == 0.0 and stop_reason(row) == "ended"
        assert int(row[keys.NUM_TURNS]) == MAX_GUESSES
        assert [m["content"] for m in row[keys.COMPLETION]][1::2] == ["higher"] * (MAX_GUESSES - 1)
