"""ProcessExecutor: reward functions in worker processes, which a hang or a crash costs and nothing else.

Own code because of what pebble's pool lacks: its workers either import the training script again (spawn) or fork a
process that has torch's threads; it kills a worker but not the worker's children, and a killed run leaves hung workers.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchrl_rloo.rewards.executor_connection import Guard, Message, Worker, wait_for
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure, RewardFunction, reward_name

LOAD_SECONDS = 120.0  # to load a function in a worker, with all that it imports


class ProcessExecutor:
    """Calls functions in worker processes. A call that exceeds its time costs its worker, killed with its children.

    Workers start on first use, in about a tenth of a second and without running the training script again, and outlive
    calls. They end with the executor, and with the training process even if that is killed. A function goes to each
    worker once, by cloudpickle, as it is when it is prepared: lambdas and functions of a script or notebook work,
    attributes that are changed later do not arrive. What a function prints goes to standard error.

    Any thread may call :meth:`run`; runs take turns. A pickled copy and a forked process start workers of their own.

    Args:
        workers: processes.
        timeout: seconds one trajectory may take; None for no limit.
        rows_per_call: trajectories in one call; None for all of a batch. More than one saves transport, some 0.2 ms a
            call, where functions are fast.

    Raises:
        ValueError: for arguments that are not positive.
        ImportError: if cloudpickle is not installed.
    """

    def __init__(self, workers: int = 1, timeout: float | None = 10.0, rows_per_call: int | None = 1):
        check_limits(workers, timeout, rows_per_call)
        _cloudpickle()
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call
        self._forget()

    def _forget(self) -> None:
        self._owner, self._lock, self._closing = os.getpid(), threading.Lock(), False
        self._idle: list[Worker] = []
        self._guard: Guard | None = None
        self._functions: dict[int, tuple[RewardFunction, int, bytes]] = {}  # by id, which holds while it is kept here
        self._keys = itertools.count()

    def prepare(self, function: RewardFunction) -> None:
        """Pickles a function.

        Raises:
            TypeError: if it cannot be pickled.
        """
        if id(function) in self._functions:
            return
        try:
            data = _cloudpickle().dumps(function)
        except Exception as error:
            raise TypeError(
                f"reward {reward_name(function)} cannot be sent to a worker process ({type(error).__name__}: {error}): "
                "make what cannot be pickled (locks, connections, open files) on first use instead of in __init__, or "
                "use a ThreadExecutor"
            ) from error
        self._functions[id(function)] = (function, next(self._keys), data)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """See :class:`~torchrl_rloo.rewards.executors.Executor`."""
        if self._owner != os.getpid():  # a fork has the sockets of its parent's workers, and must not use them
            self._forget()
        with self._lock:
            self.prepare(function)
            _, key, data = self._functions[id(function)]
            load = Message("load", key, data, LOAD_SECONDS)
            results: list[Any] = [None] * len(batches)
            waiting, busy = deque(range(len(batches))), {}
            try:
                while waiting or busy:
                    if self._closing:
                        raise RuntimeError("the ProcessExecutor was closed in the middle of a run")
                    while waiting and len(busy) < self.workers:
                        index = waiting.popleft()
                        call = self._call(key, batches[index])
                        if isinstance(call, RewardFailure):
                            results[index] = call
                            continue
                        worker = self._take()
                        busy[worker] = index
                        worker.give(load, call)
                    for worker, result in wait_for(list(busy)):
                        results[busy.pop(worker)] = result
                        if not worker.ended:
                            self._idle.append(worker)
            finally:
                for worker in busy:  # interrupted
                    worker.end()
        return results

    def _call(self, key: int, batch: RewardBatch) -> Message | RewardFailure:
        limit = math.inf if self.timeout is None else self.timeout * len(batch)
        try:
            return Message("call", key, _cloudpickle().dumps(batch), limit)
        except Exception as error:
            failure = RewardFailure.of(error)
            failure.message = f"the columns cannot be sent to a worker process: {failure.message}"
            return failure

    def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_exited():
                return worker
            worker.end()
        if self._guard is None or self._guard.process.poll() is not None:
            self._guard = Guard()
        return Worker(self._guard)

    def close(self) -> None:
        """Ends the workers, and a run in another thread; the next run starts new ones."""
        if self._owner == os.getpid():
            self._closing = True
            with self._lock:
                self._closing = False
                while self._idle:
                    self._idle.pop().end()
                self._guard = None

    def __getstate__(self) -> dict[str, Any]:
        return {"workers": self.workers, "timeout": self.timeout, "rows_per_call": self.rows_per_call}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def check_limits(workers: int, timeout: float | None, rows_per_call: int | None) -> None:
    """Refuses settings of an executor that are not positive."""
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds, or None for no limit")
    if rows_per_call is not None and rows_per_call < 1:
        raise ValueError(f"rows_per_call={rows_per_call} must be at least 1, or None for all of a batch")


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError('cloudpickle is not installed: pip install "torchrl_rloo[rewards]"') from error
    return cloudpickle
