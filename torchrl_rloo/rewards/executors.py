"""Executors that run reward functions inline, in threads, or in worker processes.

==========================  ==========  ============================================================================
executor                    time limit  effect of a bad sample
==========================  ==========  ============================================================================
:class:`InlineExecutor`     none        an exception fails the sample; a hang or a crash stops the run
:class:`ThreadExecutor`     yes         a hang fails the sample and keeps its thread; a crash stops the run
:class:`ProcessExecutor`    yes         a hang or a crash fails the sample and its worker, which is replaced
==========================  ==========  ============================================================================

Executors return the result of each call. :class:`~torchrl_rloo.rewards.runner.RewardRunner` counts and logs the
failures. Async functions run on an event loop instead (:mod:`torchrl_rloo.rewards.executor_async`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Protocol

from torchrl_rloo.rewards.executor_process import ProcessExecutor, check_limits
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure, RewardFunction, attempt_reward
from torchrl_rloo.runtime import event_loop

__all__ = ["Executor", "InlineExecutor", "ProcessExecutor", "ThreadExecutor", "make_executor"]


class Executor(Protocol):
    """Protocol of executors, which call reward functions.

    Attributes:
        rows_per_call: number of trajectories per call; None passes the whole batch.
        workers: maximum number of concurrent calls.
        timeout: seconds per trajectory; a call with ``n`` trajectories may take ``n`` times as long. None disables it.
    """

    rows_per_call: int | None
    workers: int
    timeout: float | None

    def prepare(self, function: RewardFunction) -> None:
        """Raise, before the run starts, if this executor cannot run the function."""

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch and return the results in order."""

    def close(self) -> None:
        """Stop the workers; the next run restarts them."""


class InlineExecutor:
    """Executor that calls functions in the calling thread, with the whole batch.

    ``KeyboardInterrupt`` and ``SystemExit`` propagate.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch, boxed_accuracy
        >>> batch = RewardBatch(["?"], [r"\\boxed{7}"], [[1]], {"answer": ["7"]})
        >>> InlineExecutor().run(boxed_accuracy, [batch])[0].scores
        [1.0]
    """

    rows_per_call: int | None = None
    workers = 1
    timeout: float | None = None

    def prepare(self, function: RewardFunction) -> None:
        """Call the ``prepare()`` method of the function, if it has one."""
        prepare_function(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch and return the results in order."""
        return [attempt_reward(function, batch) for batch in batches]

    def close(self) -> None:
        """Do nothing: there are no workers."""


class ThreadExecutor:
    """Executor that calls functions in threads of this process, for functions that wait for I/O or release the GIL.

    A call that times out is abandoned together with its thread, because Python cannot kill a thread. The thread may
    keep a core, the GIL or a lock until the process ends. Use :class:`ProcessExecutor` for functions that may hang.

    Args:
        workers: maximum number of threads, not counting abandoned ones.
        timeout: seconds per trajectory; None disables it.
        rows_per_call: number of trajectories per call; None passes the whole batch.

    Raises:
        ValueError: if an argument is not positive.

    Example:
        >>> from torchrl_rloo.rewards import RewardBatch, boxed_accuracy
        >>> batch = RewardBatch(["?"], [r"\\boxed{7}"], [[1]], {"answer": ["7"]})
        >>> ThreadExecutor(workers=2, timeout=5.0).run(boxed_accuracy, [batch])[0].scores
        [1.0]
    """

    def __init__(self, workers: int = 1, timeout: float | None = 10.0, rows_per_call: int | None = 1):
        check_limits(workers, timeout, rows_per_call)
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call

    def prepare(self, function: RewardFunction) -> None:
        """Call the ``prepare()`` method of the function, if it has one."""
        prepare_function(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch and return the results in order."""
        return event_loop.run(self._call_all(function, batches))

    async def _call_all(
        self, function: RewardFunction, batches: Sequence[RewardBatch]
    ) -> list[RewardCall | RewardFailure]:
        slots = asyncio.Semaphore(self.workers)

        async def call(batch: RewardBatch) -> RewardCall | RewardFailure:
            limit = None if self.timeout is None else self.timeout * len(batch)
            async with slots:
                start = perf_counter()
                try:
                    attempt = partial(attempt_reward, function, batch, BaseException)
                    return await event_loop.call_at_once(attempt, timeout=limit)
                except TimeoutError:  # an error of the function itself is a result
                    return RewardFailure.timed_out(limit, perf_counter() - start)

        return await asyncio.gather(*map(call, batches))

    def close(self) -> None:
        """Do nothing: threads end with their calls."""


def prepare_function(function: RewardFunction) -> None:
    """Call ``function.prepare()``, if it exists, so that missing models or packages fail before the run starts."""
    if callable(prepare := getattr(function, "prepare", None)):
        prepare()


def make_executor(
    mode: str = "inline",
    *,
    workers: int | None = None,
    timeout: float | None = None,
    rows_per_call: int | None = None,
    environment: Sequence[str] | None = None,
) -> Executor:
    """Create an executor from settings.

    Args:
        mode: ``"inline"``, ``"thread"`` or ``"process"``.
        workers: maximum number of concurrent calls; None, here and below, keeps the default of the class.
        timeout: seconds per trajectory.
        rows_per_call: number of trajectories per call.
        environment: names of environment variables that processes get in addition; see :class:`ProcessExecutor`.

    Raises:
        ValueError: if ``mode`` is unknown, or another setting is given with ``mode="inline"`` or has no effect in it.

    Example:
        >>> make_executor("process", workers=2, timeout=5.0).timeout
        5.0
    """
    settings = {"workers": workers, "timeout": timeout, "rows_per_call": rows_per_call, "environment": environment}
    settings = {name: value for name, value in settings.items() if value is not None}
    if mode == "inline":
        if settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f"{name}={value} cannot be combined with mode='inline', where one call runs in the calling thread and "
                "nothing can stop it; use mode='process' or 'thread'"
            )
        return InlineExecutor()
    if mode not in _MODES:
        raise ValueError(f"unknown mode={mode!r}; it must be 'inline', 'thread' or 'process'")
    if mode == "thread" and environment is not None:
        raise ValueError(
            f"environment={environment} has no effect with mode='thread', whose functions see all variables; omit it"
        )
    return _MODES[mode](**settings)


_MODES = {"thread": ThreadExecutor, "process": ProcessExecutor}
