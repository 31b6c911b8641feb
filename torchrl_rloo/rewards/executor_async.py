"""EventLoop: async reward functions, all calls of all functions concurrently, on one loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from time import perf_counter
from typing import Any

from torchrl_rloo.rewards.executors import ThreadExecutor
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    call_reward_async,
    reward_name,
)

CONCURRENCY = 16  # calls of one function under way at a time, for a function without an attribute `concurrency`
LOOK_SECONDS = 5.0  # between looks at whether the loop still runs


class EventLoop:
    """Calls async functions on one loop, which starts on first use, in a daemon thread.

    A call that exceeds its time is cancelled. A coroutine that blocks the loop (``time.sleep``, a computation without
    end) cannot be: the loop is given up with its thread, and the calls that had no result yet run again, each on a loop
    and thread of its own, so that only the one that blocks is lost.

    Any thread may call :meth:`run`; runs overlap. The loop ends with this object. A pickled copy and a forked process
    have their own.
    """

    def __init__(self):
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(
        self, function: RewardFunction, batches: Sequence[RewardBatch], timeout: float | None = None
    ) -> list[RewardCall | RewardFailure]:
        """Calls a function once for each batch, at most ``function.concurrency`` (default 16) at a time.

        Args:
            function: an async reward function.
            batches: of ``n`` trajectories each.
            timeout: a call may take ``n`` times as many seconds; None for no limit.

        Raises:
            ValueError: if ``function.concurrency`` is below 1.
        """
        if self._owner != os.getpid():
            self.__init__()
        limit, results = _concurrency(function), [None] * len(batches)
        loop, thread = self._start()
        future = asyncio.run_coroutine_threadsafe(_call_all(function, batches, limit, timeout, results), loop)
        longest = None if timeout is None else timeout * max(map(len, batches), default=1)
        try:
            if self._finishes(future, loop, thread, longest) and not future.cancelled():  # by a function, say
                future.result()
                return results
        finally:
            future.cancel()  # nothing, unless interrupted or blocked
        with self._lock:
            if self._loop is loop:
                self._forget()
        results = list(results)  # the old loop may write into its own yet
        rest = [i for i, result in enumerate(results) if result is None]
        alone = ThreadExecutor(_concurrency(function), timeout).run(function, [batches[i] for i in rest])
        for i, result in zip(rest, alone, strict=True):
            results[i] = result
        return results

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=[self._loop], daemon=True, name="async rewards")
                self._thread.start()
                self._end = weakref.finalize(self, _stop, self._loop, self._owner)
                self._end.atexit = False
            return self._loop, self._thread

    @staticmethod
    def _finishes(
        future: Future, loop: asyncio.AbstractEventLoop, thread: threading.Thread, longest: float | None
    ) -> bool:
        """Waits for the calls; False if the loop has ended or did nothing for as long as a call may take."""
        while not future.done():
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            wait([future], timeout=LOOK_SECONDS if longest is None else longest)
            if not future.done() and (not thread.is_alive() or longest is not None and not turned.is_set()):
                return False
        return True

    def close(self) -> None:
        """Ends the loop; the next run starts another."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        if self._loop is not None:
            self._end()
        self._loop = self._thread = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped and the calls on it have ended, and closes its descriptors."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):  # of other runs than the one that gave it up
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, owner: int) -> None:
    if os.getpid() == owner:
        loop.call_soon_threadsafe(loop.stop)


def _concurrency(function: RewardFunction) -> int:
    limit = getattr(function, "concurrency", CONCURRENCY)
    if limit < 1:
        raise ValueError(f"reward {reward_name(function)}: concurrency={limit} must be at least 1, or no call begins")
    return limit


async def _call_all(
    function: RewardFunction, batches: Sequence[RewardBatch], limit: int, timeout: float | None, results: list[Any]
) -> None:
    free = asyncio.Semaphore(limit)

    async def one(index: int, batch: RewardBatch) -> None:
        async with free:  # waiting for its turn takes nothing off a call's time
            results[index] = await _call(function, batch, None if timeout is None else timeout * len(batch))

    await asyncio.gather(*(one(i, batch) for i, batch in enumerate(batches)))


async def _call(function: RewardFunction, batch: RewardBatch, limit: float | None) -> RewardCall | RewardFailure:
    start = perf_counter()
    task = asyncio.ensure_future(_attempt(function, batch))
    try:
        await asyncio.wait({task}, timeout=limit)  # unlike wait_for, does not wait for what ignores its cancellation
    finally:
        task.cancel()
    if not task.done():
        return RewardFailure.timed_out(limit, perf_counter() - start)
    try:
        return task.result()
    except asyncio.CancelledError as error:  # cancelled from within
        return RewardFailure.of(error, perf_counter() - start)


async def _attempt(function: RewardFunction, batch: RewardBatch) -> RewardCall | RewardFailure:
    start = perf_counter()
    try:
        return await call_reward_async(function, batch)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit, too, would end the loop
        return RewardFailure.of(error, perf_counter() - start)
