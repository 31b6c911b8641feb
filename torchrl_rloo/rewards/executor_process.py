"""ProcessExecutor: reward functions in worker processes, so that a hang or a crash costs only a worker.

pebble's pool has three limits that this executor avoids. Its workers import the training script again (spawn) or fork
a process with torch's threads. It does not kill the children of a worker. A killed run leaves hung workers behind.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torchrl_rloo.rewards.executor_connection import Message, Worker, wait_for
from torchrl_rloo.rewards.protocol import RewardBatch, RewardCall, RewardFailure, RewardFunction, without_history
from torchrl_rloo.rewards.sent_functions import SentFunctions

LOAD_SECONDS = 120.0  # limit for loading a function and its imports in a worker
_MIN_MEMORY = 64 << 20


class ProcessExecutor:
    """Executor that calls functions in worker processes. A call that times out is killed with its worker.

    Workers start at the first call, in about 0.1 s and without running the training script again. They are reused by
    later calls, and end with the executor or with the training process, even if that is killed. A worker is killed
    together with all processes that it started, even daemons and those of a crashed worker. cloudpickle sends each
    function to a worker once, in its state at :meth:`prepare`. Lambdas and functions of a script or notebook work;
    attributes that change later are not sent. Output of a function goes to standard error.

    Any thread may call :meth:`run`; runs are executed one after another. A pickled copy or a forked process starts
    separate workers.

    Args:
        workers: number of processes.
        timeout: seconds per trajectory; None disables it.
        rows_per_call: number of trajectories per call; None passes the whole batch. Each call costs about 0.2 ms of
            transport.
        environment: names of environment variables that workers get in addition to the usual ones (``PATH``, ``HOME``,
            locale, caches, devices). ``*`` in a name matches any characters. Keys and tokens stay out unless named.
        memory: limit in bytes on the private memory of a worker, beyond which allocations raise. None means the memory
            of the machine.

    Raises:
        ValueError: if an argument is not positive.
        ImportError: if cloudpickle is not installed.

    Example::

        executor = ProcessExecutor(workers=4, timeout=5.0)
        results = executor.run(reward, [batch])  # one RewardCall or RewardFailure per batch
        executor.close()
    """

    def __init__(
        self,
        workers: int = 1,
        timeout: float | None = 10.0,
        rows_per_call: int | None = 1,
        *,
        environment: Sequence[str] = (),
        memory: int | None = None,
    ):
        check_limits(workers, timeout, rows_per_call)
        if memory is not None and memory < _MIN_MEMORY:
            raise ValueError(f"memory={memory} must be at least {_MIN_MEMORY} bytes; use None for that of the machine")
        if isinstance(environment, str):
            raise ValueError(f"environment={environment!r} must be a list of names, as in [{environment!r}]")
        _cloudpickle()
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call
        self.environment, self.memory = tuple(environment), memory
        self._reset()

    def _reset(self) -> None:
        self._owner, self._lock, self._closes = os.getpid(), threading.Lock(), 0
        self._runner: int | None = None  # thread of the last run
        self._idle: list[Worker] = []
        self._functions = SentFunctions(_cloudpickle().dumps, "a worker process")

    def prepare(self, function: RewardFunction) -> None:
        """Serialize a function for the workers.

        Raises:
            TypeError: if the function cannot be pickled.
        """
        self._functions.add(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch and return the results in order.

        Raises:
            TypeError: if the function cannot be pickled.
            RuntimeError: if another thread closes the executor during the run.
        """
        # Start over in a forked process: the sockets of the workers belong to its parent
        if self._owner != os.getpid():
            self._reset()
        closes = self._closes
        with self._lock:
            self._runner = threading.get_ident()
            key, data = self._functions.add(function)
            load = Message("load", key, data, LOAD_SECONDS)
            results: list[Any] = [None] * len(batches)
            waiting, busy = deque(range(len(batches))), {}
            try:
                while waiting or busy:
                    if self._closes != closes:
                        raise RuntimeError("the ProcessExecutor was closed during a run")
                    # Start calls while there are free workers
                    while waiting and len(busy) < self.workers:
                        index = waiting.popleft()
                        call = self._call(key, without_history(function, batches[index]))
                        if isinstance(call, RewardFailure):
                            results[index] = call
                            continue
                        worker = self._take_worker()
                        busy[worker] = index
                        worker.submit(load, call)
                    # Collect results; a worker that hung or died is not reused
                    for worker, result in wait_for(list(busy)):
                        results[busy.pop(worker)] = result
                        if not worker.is_dead:
                            self._idle.append(worker)
            finally:
                for worker in busy:  # not empty only after an exception
                    worker.end()
                if self._closes != closes:
                    self._end_idle()
        return results

    def _call(self, key: int, batch: RewardBatch) -> Message | RewardFailure:
        limit = math.inf if self.timeout is None else self.timeout * len(batch)
        try:
            return Message("call", key, _cloudpickle().dumps(batch), limit)
        except Exception as error:
            failure = RewardFailure.from_exception(error)
            failure.message = f"the columns cannot be sent to a worker process: {failure.message}"
            return failure

    def _take_worker(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_idle():
                return worker
            worker.end()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if self.memory is None else self.memory
        return Worker(self.environment, memory)

    def close(self) -> None:
        """Stop the workers and a run in another thread; the next run starts new workers."""
        if self._owner == os.getpid():
            self._closes += 1
            # A signal handler in the middle of a run must not wait for it; the run then ends the workers
            if self._lock.acquire(blocking=self._runner != threading.get_ident()):
                try:
                    self._end_idle()
                finally:
                    self._lock.release()

    def _end_idle(self) -> None:
        while self._idle:
            self._idle.pop().end()

    def __getstate__(self) -> dict[str, Any]:
        names = ("workers", "timeout", "rows_per_call", "environment", "memory")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def check_limits(workers: int, timeout: float | None, rows_per_call: int | None) -> None:
    """Raise ``ValueError`` if a setting of an executor is not positive."""
    if workers < 1:
        raise ValueError(f"workers={workers} must be at least 1")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout} must be a positive, finite number of seconds; use None to disable it")
    if rows_per_call is not None and rows_per_call < 1:
        raise ValueError(f"rows_per_call={rows_per_call} must be at least 1; use None for the whole batch")


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError('ProcessExecutor requires cloudpickle: pip install "torchrl_rloo[rewards]"') from error
    return cloudpickle
