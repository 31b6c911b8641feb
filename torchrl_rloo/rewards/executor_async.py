"""Concurrent calls of async reward functions, on an event loop that only they use."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter

from torchrl_rloo.rewards.executors import ThreadExecutor
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    call_reward_async,
    reward_name,
)
from torchrl_rloo.runtime.event_loop import AsyncCall, run

CONCURRENCY = 16  # calls in flight of a function without an attribute `concurrency`
_CHECK_S = 1.0  # between two looks at the loop and the clock of a call

Result = RewardCall | RewardFailure


def run_async(function: RewardFunction, batches: Sequence[RewardBatch], timeout: float | None = None) -> list[Result]:
    """Call a function once per batch, with at most ``function.concurrency`` (default 16) calls in flight.

    A call that times out is cancelled. A coroutine that blocks the loop (``time.sleep``, an endless computation) cannot
    be cancelled. A warning names it, and time limits of the others stand still. If it exceeds its own time limit, the
    loop and its thread are abandoned, and later calls get another one. Calls that a block or a cancellation by another
    call kept from a result are repeated in separate threads, so only the guilty call fails.

    Any thread may call this function, and runs may overlap.

    Args:
        function: async reward function.
        batches: batches of ``n`` trajectories, one per call.
        timeout: seconds per trajectory; a call may take ``n`` times as long. None disables it.

    Returns:
        One result per batch, in order.

    Raises:
        ValueError: if ``function.concurrency`` is below 1.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch
        >>> async def length(completions):
        ...     return [float(len(text)) for text in completions]
        >>> [call.scores for call in run_async(length, [RewardBatch(["?"], ["abc"], [[1]])], timeout=5.0)]
        [[3.0]]
    """
    concurrency = getattr(function, "concurrency", CONCURRENCY)
    if concurrency < 1:
        raise ValueError(f"reward {reward_name(function)}: concurrency={concurrency} must be at least 1")
    results = run(_call_all(function, batches, concurrency, math.inf if timeout is None else timeout))
    # Repeat the calls that another one blocked, in threads, where one cannot block another
    missing = [i for i, result in enumerate(results) if result is None]
    repeated = ThreadExecutor(concurrency, timeout).run(function, [batches[i] for i in missing])
    for i, result in zip(missing, repeated, strict=True):
        results[i] = result
    return results


async def _call_all(
    function: RewardFunction, batches: Sequence[RewardBatch], concurrency: int, timeout: float
) -> list[Result | None]:
    slots, attempt = asyncio.Semaphore(concurrency), _attempt(function)

    async def call(batch: RewardBatch) -> Result | None:
        async with slots:  # the time limit starts when the call has a slot
            return await _call(attempt, batch, timeout * len(batch))

    return await asyncio.gather(*map(call, batches))


async def _call(attempt: Callable[[RewardBatch], Awaitable[Result]], batch: RewardBatch, limit: float) -> Result | None:
    """Return the result of a call, or None if a function cancelled it, or blocks the loop for longer than the limit."""
    start, call = perf_counter(), AsyncCall(attempt, (batch,), {}, "rewards")
    waiting = asyncio.wrap_future(call.future)
    try:
        while not waiting.done() and (left := limit - call.elapsed()) > 0:
            blocked = call.watch.blocked_for()
            if blocked >= limit and call.watch.blocker is not call:
                return None
            await asyncio.wait({waiting}, timeout=min(_CHECK_S, left, max(0.05, limit - blocked)))
        if not waiting.done():
            return RewardFailure.timed_out(limit, perf_counter() - start)
        return None if waiting.cancelled() else waiting.result()
    finally:
        if not waiting.done():
            waiting.cancel()
            call.abandon()


def _attempt(function: RewardFunction) -> Callable[[RewardBatch], Awaitable[Result]]:
    """Return a coroutine function that calls a reward function and does not raise; the loop's warnings name it."""

    async def attempt(batch: RewardBatch) -> Result:
        start = perf_counter()
        try:
            return await call_reward_async(function, batch)
        except BaseException as error:  # SystemExit would also end the loop
            if isinstance(error, asyncio.CancelledError):
                raise
            return RewardFailure.from_exception(error, perf_counter() - start)

    attempt.__qualname__ = f"reward {reward_name(function)}"
    return attempt
