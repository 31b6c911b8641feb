"""EventLoop: concurrent calls of async reward functions, on one event loop in a daemon thread."""

from __future__ import annotations

import asyncio
import math
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
from torchrl_rloo.runtime.loop_watch import LoopWatch, WatchedCall
from torchrl_rloo.runtime.threads import PackageThread

CONCURRENCY = 16  # calls in flight of a function without an attribute `concurrency`
CHECK_SECONDS = 5.0  # between checks that the loop still runs
_SHORTEST_WAIT_S = 0.05


class EventLoop:
    """Event loop in a daemon thread, which calls async reward functions and starts at the first call.

    A call that times out is cancelled. A coroutine that blocks the loop (``time.sleep``, an endless computation) cannot
    be cancelled. A warning names it, and time limits of the others stand still. If it exceeds its own time limit, the
    loop and its thread are abandoned. The calls without a result are repeated, each on a separate loop and thread, so
    only the blocking call fails.

    Any thread may call :meth:`run`, and runs may overlap. The loop stops when this object is deleted. A pickled copy
    or a forked process starts a new loop.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch
        >>> async def length(completions):
        ...     return [float(len(text)) for text in completions]
        >>> loop = EventLoop()
        >>> [call.scores for call in loop.run(length, [RewardBatch(["?"], ["abc"], [[1]])], timeout=5.0)]
        [[3.0]]
        >>> loop.close()
    """

    def __init__(self):
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._watch: LoopWatch | None = None

    def run(
        self, function: RewardFunction, batches: Sequence[RewardBatch], timeout: float | None = None
    ) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch, with at most ``function.concurrency`` (default 16) calls in flight.

        Args:
            function: async reward function.
            batches: batches of ``n`` trajectories, one per call.
            timeout: seconds per trajectory; a call may take ``n`` times as long. None disables it.

        Returns:
            One result per batch, in order.

        Raises:
            ValueError: if ``function.concurrency`` is below 1.
        """
        # Start over in a forked process: the parent's thread does not exist here
        if self._owner != os.getpid():
            self.__init__()
        limit, results = _concurrency(function), [None] * len(batches)
        loop, thread, watch = self._start()
        future = asyncio.run_coroutine_threadsafe(_call_all(watch, function, batches, limit, timeout, results), loop)
        longest = None if timeout is None else timeout * max(map(len, batches), default=1)
        try:
            if self._wait(future, thread, watch, longest) and not future.cancelled():  # a function may cancel it
                future.result()
                return results
        finally:
            future.cancel()  # has an effect only after an interruption or if the loop is blocked
        # Abandon the blocked loop; copy its results, because it may still write into the list
        with self._lock:
            if self._loop is loop:
                self._abandon()
        results = list(results)
        # Repeat the unfinished calls in separate threads, where one cannot block another
        missing = [i for i, result in enumerate(results) if result is None]
        repeated = ThreadExecutor(_concurrency(function), timeout).run(function, [batches[i] for i in missing])
        for i, result in zip(missing, repeated, strict=True):
            results[i] = result
        return results

    def _start(self) -> tuple[asyncio.AbstractEventLoop, threading.Thread, LoopWatch]:
        with self._lock:
            if self._loop is None:
                self._loop, stopped = asyncio.new_event_loop(), threading.Event()
                self._end = weakref.finalize(self, _stop, self._loop, stopped, self._owner)
                self._end.atexit = False
                self._thread = PackageThread(_serve, self._loop, name="async rewards", stop=self._end)
                self._thread.start()
                self._watch = LoopWatch(self._loop, self._thread, stopped)
            return self._loop, self._thread, self._watch

    @staticmethod
    def _wait(future: Future, thread: threading.Thread, watch: LoopWatch, longest: float | None) -> bool:
        """Wait for the calls; return False if the loop has ended, or one call blocks it for ``longest`` seconds."""
        longest = math.inf if longest is None else longest
        while not future.done():
            wait([future], timeout=max(_SHORTEST_WAIT_S, min(CHECK_SECONDS, longest - watch.blocked_for())))
            if not future.done() and (not thread.is_alive() or watch.blocked_for() >= longest):
                return False
        return True

    def close(self) -> None:
        """Stop the loop; the next run starts a new one."""
        with self._lock:
            self._abandon()

    def _abandon(self) -> None:
        if self._loop is not None:
            self._end()
        self._loop = self._thread = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped and its calls have ended, then close its descriptors."""
    loop.run_forever()
    if tasks := asyncio.all_tasks(loop):  # calls of other runs than the one that abandoned the loop
        loop.run_until_complete(asyncio.wait(tasks))
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, stopped: threading.Event, owner: int) -> None:
    if os.getpid() == owner:
        stopped.set()
        loop.call_soon_threadsafe(loop.stop)


def _concurrency(function: RewardFunction) -> int:
    limit = getattr(function, "concurrency", CONCURRENCY)
    if limit < 1:
        raise ValueError(f"reward {reward_name(function)}: concurrency={limit} must be at least 1")
    return limit


async def _call_all(
    watch: LoopWatch,
    function: RewardFunction,
    batches: Sequence[RewardBatch],
    limit: int,
    timeout: float | None,
    results: list[Any],
) -> None:
    slots = asyncio.Semaphore(limit)

    async def call(index: int, batch: RewardBatch) -> None:
        async with slots:  # the time limit starts when the call has a slot
            results[index] = await _call(watch, function, batch, math.inf if timeout is None else timeout * len(batch))

    await asyncio.gather(*(call(i, batch) for i, batch in enumerate(batches)))


async def _call(
    watch: LoopWatch, function: RewardFunction, batch: RewardBatch, limit: float
) -> RewardCall | RewardFailure:
    start, call = perf_counter(), WatchedCall(watch, f"reward {reward_name(function)}")
    call.begin()
    task = asyncio.ensure_future(_attempt(function, batch))
    try:
        while not task.done() and (left := limit - call.elapsed()) > 0:
            # wait_for would also wait for a task that ignores cancellation
            await asyncio.wait({task}, timeout=None if left == math.inf else left)
    finally:
        task.cancel()
    if not task.done():
        return RewardFailure.timed_out(limit, perf_counter() - start)
    try:
        return task.result()
    except asyncio.CancelledError as error:  # the function cancelled itself
        return RewardFailure.from_exception(error, perf_counter() - start)


async def _attempt(function: RewardFunction, batch: RewardBatch) -> RewardCall | RewardFailure:
    start = perf_counter()
    try:
        return await call_reward_async(function, batch)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # SystemExit would also end the loop
        return RewardFailure.from_exception(error, perf_counter() - start)
