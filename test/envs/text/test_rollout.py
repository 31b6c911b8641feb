"""Rollout functions: they write the conversation, and cannot change its past."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.envs.text import text_env


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def play_one(play: Callable, tokenizer) -> Callable:
    """Return ``play_one(function)``, which returns the row and the transform's counts."""

    def run(function, **kwargs):
        env = text_env(function, tokenizer, prompts_per_batch=1, **kwargs)
        row = play(env, lambda turn, prompt: f"reply {turn}")[0]
        return row, env.transform[-1].counts

    return run


def test_all_messages_that_are_added_are_feedback(play_one: Callable):
    async def rollout(row, generate):
        said = [{"role": "system", "content": "s"}, user(f"seed {row['env_seed']}")]
        reply = await generate(said)
        said += [assistant(reply), {"role": "tool", "content": "t"}, user("u")]
        return float(len(await generate(said)))

    row, _ = play_one(rollout, num_seeds=1)
    assert row[keys.QUERY] == [{"role": "system", "content": "s"}, user("seed 0")]
    added = [assistant("reply 0"), {"role": "tool", "content": "t"}, user("u"), assistant("reply 1")]
    assert row[keys.COMPLETION] == added
    assert float(row[keys.REWARD]) == 7.0 and stop_reason(row) == "ended"


def test_no_reward_is_none_and_columns_are_there(play_one: Callable):
    async def rollout(row, generate):
        await generate(row["query"])

    row, _ = play_one(rollout, dataset=load_prompts([{"query": "say it"}], chat=True))
    assert float(row[keys.REWARD]) == 0.0 and row[keys.QUERY] == [user("say it")] and stop_reason(row) == "ended"


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (lambda reply: [user("q"), assistant(reply.upper()), user("u")], "a changed conversation: message 1 was"),
        (lambda reply: [user("other"), assistant(reply), user("u")], "a changed conversation: message 0 was"),
        (lambda reply: [user("q")], "now it is None"),
        (lambda reply: [user("q"), assistant(reply)], "no new message after the last reply"),
        (lambda reply: 3, "must be text or a list of messages"),
    ],
)
@pytest.mark.parametrize("swallows", [False, True])
def test_who_changes_what_was_said_fails(second, reason, swallows, play_one: Callable, caplog):
    async def rollout(row, generate):
        reply = await generate([user("q")])
        try:
            await generate(second(reply))
        except Exception:
            if not swallows:
                raise
        return 1.0

    with caplog.at_level(logging.ERROR):
        row, counts = play_one(rollout)
    assert stop_reason(row) == "failed" and row[keys.REWARD].isnan().all() and counts["text_env/failed"] == 1
    assert reason in caplog.text


def test_two_replies_at_a_time_are_refused(play_one: Callable, caplog):
    async def rollout(row, generate):
        await asyncio.gather(generate("a"), generate("b"))
        return 1.0

    with caplog.at_level(logging.ERROR):
        row, _ = play_one(rollout)
    assert stop_reason(row) == "failed" and "await one reply at a time" in caplog.text


def test_a_function_that_never_asks_or_raises_is_told(tokenizer):
    async def silent(row, generate):
        return 1.0

    async def broken(row, generate):
        raise KeyError("no such thing")

    for function, message in ((silent, "without a call of generate"), (broken, "no such thing")):
        with pytest.raises(RuntimeError, match=message):
            text_env(function, tokenizer, prompts_per_batch=1).reset()


def test_a_conversation_that_a_limit_ends_cancels_its_function(play_one: Callable):
    ended = []

    async def rollout(row, generate):
        said = [user("q")]
        try:
            while True:
                said += [assistant(await generate(said)), user("more")]
        finally:
            ended.append(len(said))

    row, _ = play_one(rollout, max_turns=3)
    assert stop_reason(row) == "turns" and ended == [7]


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError()], ids=["exit", "cancelled"])
def test_a_function_that_ends_by_no_error_fails_at_once(raised, play_one: Callable, caplog):
    async def rollout(row, generate):
        await generate("q")
        raise raised

    row, counts = play_one(rollout, timeout=None)
    assert (
        stop_reason(row) == "failed"
        and counts["text_env/failed"] == 1
        and float(row[keys.REWARD]) != float(row[keys.REWARD])
    )
    assert f"the rollout function raised {raised!r}" in caplog.text
