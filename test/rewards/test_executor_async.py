"""Async rewards: calls that overlap, fail, hang, or block all others."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from support.waiting import wait_until
from torchrl_rloo.rewards.executors import run_async
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure


def batches(*completions: str) -> list[RewardBatch]:
    return [RewardBatch(["p"], [c], [[1, 2]], {"answer": ["4"]}) for c in completions]


def outcomes(results: list[RewardCall | RewardFailure]) -> list[float | None | str]:
    return [r.kind if isinstance(r, RewardFailure) else r.scores[0] for r in results]


async def naps_or(completions, **_):
    for text in completions:
        if text == "raise":
            raise KeyError("answer")
        elif text == "exit":
            sys.exit(3)
        elif text == "hang":
            await asyncio.sleep(1000)
        elif text == "deaf":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        elif text == "cancel":
            raise asyncio.CancelledError
    await asyncio.sleep(0.1)
    return [1.0] * len(completions)


def test_async_calls_overlap_and_fail_alone():
    texts = ["ok", "raise", "hang", "exit", "deaf", "cancel", *["ok"] * 8]
    expected = [1.0, "raised", "timed_out", "raised", "timed_out", "raised", *[1.0] * 8]
    assert outcomes(run_async(naps_or, batches(*texts), 5.0)) == expected
    assert outcomes(run_async(naps_or, batches("ok"))) == [1.0]

    waiting = set()

    async def waits_for_the_others(completions, **_):
        waiting.update(completions)
        while len(waiting) < 4:
            await asyncio.sleep(0.01)
        return [1.0]

    assert outcomes(run_async(waits_for_the_others, batches(*"1234"), 60.0)) == [1.0] * 4


def test_a_coroutine_that_blocks_the_loop_loses_its_own_call_alone():
    release, threads = threading.Event(), set()

    async def blocks_or(completions, **_):
        if completions == ["block"]:
            release.wait(60)
        threads.add(threading.current_thread().name)
        return await naps_or(completions)

    texts = ["ok", "block", "ok", "raise", "ok"]
    assert outcomes(run_async(blocks_or, batches(*texts), 4.0)) == [1.0, "timed_out", 1.0, "raised", 1.0]
    threads.clear()
    assert outcomes(run_async(blocks_or, batches("ok", "ok"), 60.0)) == [1.0, 1.0]
    assert threads == {"rewards"}  # a new loop runs while the old one is still blocked
    release.set()


def test_a_blocked_loop_costs_other_runs_on_it_nothing():
    release, calls = threading.Event(), []

    async def patient(completions, **_):
        calls.extend(completions)
        while not release.is_set():
            await asyncio.sleep(0.01)
        return [1.0]

    async def blocks(**_):
        release.wait(60)
        return [1.0]

    found: list = []
    other = threading.Thread(target=lambda: found.extend(run_async(patient, batches("a", "b"))))
    other.start()
    wait_until(lambda: len(calls) == 2)
    assert outcomes(run_async(blocks, batches("a"), 0.5)) == ["timed_out"]
    release.set()
    other.join(60)
    assert outcomes(found) == [1.0, 1.0] and calls == ["a", "b"]


def test_a_block_within_its_own_limit_is_named_and_costs_others_no_time(caplog):
    began = threading.Event()

    async def naps(**_):
        began.set()
        for _ in range(2):
            await asyncio.sleep(0.3)
        return [1.0]

    async def blocks(**_):
        time.sleep(3)
        return [1.0]

    found: list = []
    other = threading.Thread(target=lambda: found.extend(run_async(naps, batches("a", "b"), 2.0)))
    other.start()
    began.wait(60)
    assert outcomes(run_async(blocks, batches("a"), 60.0)) == [1.0]
    other.join(60)
    assert outcomes(found) == [1.0, 1.0]
    assert "reward blocks blocks the event loop" in caplog.text


def test_a_function_that_cancels_all_that_it_finds_costs_its_calls_alone():
    async def cancels(completions, **_):
        for task in asyncio.all_tasks() if completions == ["all"] else ():
            task.cancel()
        await asyncio.sleep(0.01)
        return [1.0]

    assert outcomes(run_async(cancels, batches("a", "all", "b"))) == [1.0, "raised", 1.0]


def test_a_loop_that_is_given_up_ends_with_its_block():
    def loops() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "rewards"}

    before = loops()
    release = threading.Event()

    async def blocks(**_):
        release.wait(60)
        return [1.0]

    for _ in range(2):
        assert outcomes(run_async(blocks, batches("a"), 0.5)) == ["timed_out"]
    assert outcomes(run_async(naps_or, batches("ok"))) == [1.0] and len(loops() - before) >= 2
    release.set()
    wait_until(lambda: len(loops() - before) == 1)


def test_a_function_says_how_many_of_its_calls_may_be_under_way():
    class Judge:
        concurrency = 3

        def __init__(self):
            self.now = self.most = 0

        async def __call__(self, completions, **_):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(1)
            self.now -= 1
            return [1.0]

    judge = Judge()
    # Eight rounds of 1 s: the wait for a slot does not count
    results = run_async(judge, batches(*"abcdefghijklmnopqrstuvwx"), timeout=7.0)
    assert outcomes(results) == [1.0] * 24 and judge.most == 3
    judge.concurrency = 0
    with pytest.raises(ValueError, match="concurrency=0 must be at least 1"):
        run_async(judge, batches("a"))
