"""Where reward functions run: in line, in threads, or in processes that can be killed.

==========================  ==========  ============================================================================
executor                    time limit  what a bad sample can do
==========================  ==========  ============================================================================
:class:`InlineExecutor`     none        an exception costs the sample; a hang or a crash is one of the run
:class:`ThreadExecutor`     yes         a hang costs the sample, and its thread goes on; a crash is one of the run
:class:`ProcessExecutor`    yes         a hang, a crash, a leak costs the sample and a worker, which is replaced
==========================  ==========  ============================================================================

They say what came of each call and judge nothing: :class:`~torchrl_rloo.rewards.runner.RewardRunner` does. Async
functions need none of them (:mod:`torchrl_rloo.rewards.executor_async`).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Protocol

from torchrl_rloo.rewards.executor_process import ProcessExecutor, check_limits
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure, RewardFunction, attempt_reward

__all__ = ["Executor", "InlineExecutor", "ProcessExecutor", "ThreadExecutor", "make_executor"]


class Executor(Protocol):
    """Makes calls of reward functions.

    Attributes:
        rows_per_call: trajectories in one call; None for all of a batch.
        workers: calls under way at a time.
        timeout: seconds one trajectory may take; a call of ``n`` may take ``n`` times as long. None for no limit.
    """

    rows_per_call: int | None
    workers: int
    timeout: float | None

    def prepare(self, function: RewardFunction) -> None:
        """Refuses, before a run starts, a function that cannot be run here."""

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Calls a function once for each batch and says what came of each call, in order."""

    def close(self) -> None:
        """Ends what was started; the next run starts it again."""


class InlineExecutor:
    """Calls functions in the calling thread, for all trajectories at once. Ctrl-C and ``sys.exit()`` come through."""

    rows_per_call: int | None = None
    workers = 1
    timeout: float | None = None

    def prepare(self, function: RewardFunction) -> None:
        """Takes any function; one that has a ``prepare()`` of its own is told to make itself ready."""
        prepare_here(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """See :class:`Executor`."""
        return [attempt_reward(function, batch) for batch in batches]

    def close(self) -> None:
        """Nothing to end."""


class ThreadExecutor:
    """Calls functions in threads of this process: for functions that wait (files, networks) or release the GIL.

    A call that exceeds its time is given up and its thread left alone, since a thread cannot be ended from outside: one
    that computes for ever keeps a core busy and the GIL contended until the process ends, and one that holds a lock
    holds it. Where that is to be feared, use a :class:`ProcessExecutor`.

    Args:
        workers: threads at a time, those given up aside.
        timeout: seconds one trajectory may take; None for no limit.
        rows_per_call: trajectories in one call; None for all of a batch.

    Raises:
        ValueError: for arguments that are not positive.
    """

    def __init__(self, workers: int = 1, timeout: float | None = 10.0, rows_per_call: int | None = 1):
        check_limits(workers, timeout, rows_per_call)
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call

    def prepare(self, function: RewardFunction) -> None:
        """Takes any function; one that has a ``prepare()`` of its own is told to make itself ready."""
        prepare_here(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """See :class:`Executor`."""
        results: list[Any] = [None] * len(batches)
        finished: SimpleQueue[tuple[_Thread, RewardCall | RewardFailure]] = SimpleQueue()
        waiting, free = deque(range(len(batches))), []
        running: dict[_Thread, tuple[int, float, float]] = {}  # index of a call, its start, and seconds it may take
        try:
            while waiting or running:
                while waiting and len(running) < self.workers:
                    thread = free.pop() if free else _Thread(function, finished)
                    index = waiting.popleft()
                    limit = math.inf if self.timeout is None else self.timeout * len(batches[index])
                    running[thread] = (index, perf_counter(), limit)
                    thread.calls.put(batches[index])
                left = min(start + limit for _, start, limit in running.values()) - perf_counter()
                try:
                    thread, result = finished.get(timeout=None if left == math.inf else max(left, 0.0))
                except Empty:
                    thread, result = None, None
                if thread in running:  # else it was given up
                    results[running.pop(thread)[0]] = result
                    free.append(thread)
                now = perf_counter()
                for thread, (index, start, limit) in list(running.items()):
                    if now - start >= limit:
                        results[index] = RewardFailure.timed_out(limit, now - start)
                        thread.calls.put(None)
                        del running[thread]
        finally:
            for thread in [*free, *running]:
                thread.calls.put(None)
        return results

    def close(self) -> None:
        """Nothing to end: threads end with their calls."""


def prepare_here(function: RewardFunction) -> None:
    """Calls ``function.prepare()`` where there is one: what it has to load is missed before a run starts, not in it."""
    if callable(prepare := getattr(function, "prepare", None)):
        prepare()


def make_executor(
    mode: str = "inline", *, workers: int | None = None, timeout: float | None = None, rows_per_call: int | None = None
) -> Executor:
    """An executor from settings; what is None is as the class has it.

    Args:
        mode: ``"inline"``, ``"thread"`` or ``"process"``.
        workers, timeout, rows_per_call: see the classes; in line there is none of them.

    Raises:
        ValueError: for an unknown mode, or settings that the mode has no use for.

    Example:
        >>> make_executor("process", workers=2, timeout=5.0).timeout
        5.0
    """
    settings = {"workers": workers, "timeout": timeout, "rows_per_call": rows_per_call}
    settings = {name: value for name, value in settings.items() if value is not None}
    if mode == "inline":
        if settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f"{name}={value} has no effect with mode='inline', where one call of all trajectories runs in the "
                "calling thread and nothing can stop it: use mode='process' (or 'thread')"
            )
        return InlineExecutor()
    if mode not in _MODES:
        raise ValueError(f"mode={mode!r} must be 'inline', 'thread' or 'process'")
    return _MODES[mode](**settings)


_MODES = {"thread": ThreadExecutor, "process": ProcessExecutor}


class _Thread(threading.Thread):
    """Calls a function for each batch that it is given, until it is given None."""

    def __init__(self, function: RewardFunction, finished: SimpleQueue):
        super().__init__(daemon=True, name="reward")
        self.function, self.finished = function, finished
        self.calls: SimpleQueue[RewardBatch | None] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while (batch := self.calls.get()) is not None:
            self.finished.put((self, attempt_reward(self.function, batch, BaseException)))
