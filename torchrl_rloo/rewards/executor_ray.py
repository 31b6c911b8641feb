"""RayExecutor: reward functions in actors of a Ray cluster, which have their own CPUs, memory and nodes."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

from torchrl_rloo.rewards.executor_process import LOAD_SECONDS, check_limits
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFailure,
    RewardFunction,
    attempt_reward,
    without_history,
)
from torchrl_rloo.rewards.sent_functions import SentFunctions

_POLL_S = 1.0  # longest wait between two looks at whether the executor was closed
_ATTEMPTS = 2  # actors that a call may lose until its samples fail


class RayExecutor:
    """Executor that calls functions in Ray actors. A call that times out is killed with its actor.

    Actors start at the first call, on any node of the cluster, and are reused by later calls. They end with the
    executor or with its process. A call whose actor or node died is repeated once in another actor. Functions are sent
    to an actor once, in their state at :meth:`prepare`.

    Any thread may call :meth:`run`; runs are executed one after another. A pickled copy starts separate actors, so each
    rollout worker has its own.

    Args:
        workers: number of actors.
        timeout: seconds per trajectory; None disables it.
        rows_per_call: number of trajectories per call; None passes the whole batch.
        remote_config: resources of each actor, such as ``{"num_cpus": 2}``, see ``ray.remote``. None reserves no CPU.
        start_timeout: seconds that an actor may take to start and to load a function, with the wait for resources.

    Raises:
        ValueError: if an argument is not positive.
        ImportError: if Ray is not installed.

    Example::

        with ray_session():
            rewards = RewardTransform(grade, executor=RayExecutor(workers=4, timeout=30.0))
    """

    def __init__(
        self,
        workers: int = 1,
        timeout: float | None = 10.0,
        rows_per_call: int | None = 1,
        *,
        remote_config: Mapping[str, Any] | None = None,
        start_timeout: float = LOAD_SECONDS,
    ):
        check_limits(workers, timeout, rows_per_call)
        if not 0 < start_timeout < math.inf:
            raise ValueError(f"start_timeout={start_timeout} must be a positive, finite number of seconds")
        _ray()
        self.workers, self.timeout, self.rows_per_call = workers, timeout, rows_per_call
        self.remote_config, self.start_timeout = dict(remote_config or {}), start_timeout
        self._lock, self._closes = threading.Lock(), 0
        self._idle: list[_Actor] = []
        self._functions = SentFunctions(_ray().cloudpickle.dumps, "an actor")

    def prepare(self, function: RewardFunction) -> None:
        """Serialize a function for the actors.

        Raises:
            TypeError: if the function cannot be pickled.
        """
        self._functions.add(function)

    def run(self, function: RewardFunction, batches: Sequence[RewardBatch]) -> list[RewardCall | RewardFailure]:
        """Call a function once per batch and return the results in order.

        Raises:
            TypeError: if the function cannot be pickled.
            RuntimeError: if this process is in no cluster, or another thread closes the executor during the run.
        """
        if not _ray().is_initialized():
            raise RuntimeError("a RayExecutor requires a cluster; use it in ray_session(), or take a ProcessExecutor")
        closes = self._closes
        with self._lock:
            self.prepare(function)
            results: list[Any] = [None] * len(batches)
            waiting, busy = deque((index, 1) for index in range(len(batches))), {}
            try:
                while waiting or busy:
                    if self._closes != closes:
                        raise RuntimeError("the RayExecutor was closed during a run")
                    # Start calls while there are free actors
                    while waiting and len(busy) < self.workers:
                        index, attempt = waiting.popleft()
                        future, work = self._begin(function, without_history(function, batches[index]), index, attempt)
                        busy[future] = work
                    # Collect results; an actor that hung or died is not reused
                    for future in _ended(busy):
                        work = busy.pop(future)
                        result = work.result(future)
                        if result is None:  # the function is loaded
                            future, work = work.continued()
                            busy[future] = work
                        elif _is_kind(result, "worker_died") and work.attempt < _ATTEMPTS:
                            waiting.appendleft((work.index, work.attempt + 1))
                        else:
                            results[work.index] = result
                            if not work.actor.is_dead:
                                self._idle.append(work.actor)
            finally:
                for work in busy.values():  # not empty only after an exception
                    work.actor.kill()
        return results

    def _begin(self, function: RewardFunction, batch: RewardBatch, index: int, attempt: int) -> tuple[Future, _Work]:
        """Send a batch to a free actor, after the function if the actor lacks it."""
        key, data = self._functions.add(function)
        actor = self._idle.pop() if self._idle else _Actor(self.remote_config)
        limit = math.inf if self.timeout is None else self.timeout * len(batch)

        def call() -> tuple[Future, _Work]:
            actor.loaded.add(key)
            work = _Work(actor, index, attempt, perf_counter(), limit, None)
            return actor.handle.call.remote(key, batch).future(), work

        if key in actor.loaded:
            return call()
        loading = _Work(actor, index, attempt, perf_counter(), self.start_timeout, call)
        return actor.handle.load.remote(key, data).future(), loading

    def close(self) -> None:
        """Stop the actors and a run in another thread; the next run starts new ones."""
        self._closes += 1
        with self._lock:
            while self._idle:
                self._idle.pop().kill()

    def __getstate__(self) -> dict[str, Any]:
        names = ("workers", "timeout", "rows_per_call", "remote_config", "start_timeout")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


class _Actor:
    """Actor as its executor knows it."""

    def __init__(self, remote_config: Mapping[str, Any]):
        options = {"num_cpus": 0, **remote_config, "max_restarts": 0}
        self.handle = _ray().remote(_RewardActor).options(**options).remote()
        self.loaded: set[int] = set()
        self.is_dead = False

    def kill(self) -> None:
        self.is_dead, ray = True, _ray()
        if ray.is_initialized():
            ray.kill(self.handle, no_restart=True)


class _Work(NamedTuple):
    """Call in an actor: the load of a function if it has a continuation, or the scoring of a batch."""

    actor: _Actor
    index: int
    attempt: int
    start: float
    limit: float
    continued: Callable[[], tuple[Future, _Work]] | None

    def result(self, future: Future) -> RewardCall | RewardFailure | None:
        """Return the result of an ended call, or of one beyond its limit, and kill an actor that hung or died."""
        ray, seconds = _ray(), perf_counter() - self.start
        if not future.done():
            self.actor.kill()
            return RewardFailure.timed_out(self.limit, seconds)
        try:
            return future.result()
        except ray.exceptions.RayTaskError as error:  # of a batch or a score that cannot be pickled
            return RewardFailure.from_exception(error.cause or error, seconds)
        except ray.exceptions.RayError as error:
            self.actor.kill()
            reason = " ".join(str(error).partition("Some common causes")[0].split())  # Ray's advice follows
            return RewardFailure("worker_died", f"the actor died: {reason}", seconds=seconds)


class _RewardActor:
    """Holder of reward functions in an actor."""

    def __init__(self) -> None:
        self._functions: dict[int, RewardFunction] = {}

    def load(self, key: int, data: bytes) -> RewardFailure | None:
        """Load a pickled function."""
        from ray import cloudpickle

        try:
            self._functions[key] = cloudpickle.loads(data)
        except Exception as error:
            return RewardFailure.from_exception(error)
        return None

    def call(self, key: int, batch: RewardBatch) -> RewardCall | RewardFailure:
        """Score a batch."""
        return attempt_reward(self._functions[key], batch)


def _ray() -> ModuleType:
    from torchrl_rloo.ray_session import require_ray  # imports torch, which this package does not

    return require_ray()


def _ended(busy: Mapping[Future, _Work]) -> list[Future]:
    """Wait for calls that end or exceed their limits, at most for a while, and return them.

    In an actor with an event loop, as rollout workers are, ``ray.wait`` and ``ray.get`` would warn.
    """
    left = min(work.start + work.limit for work in busy.values()) - perf_counter()
    wait(busy, timeout=max(min(left, _POLL_S), 0.0), return_when=FIRST_COMPLETED)
    now = perf_counter()
    return [future for future, work in busy.items() if future.done() or now >= work.start + work.limit]


def _is_kind(result: RewardCall | RewardFailure, kind: str) -> bool:
    return isinstance(result, RewardFailure) and result.kind == kind
