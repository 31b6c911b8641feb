"""Bases of vLLM engines: VLLMEngineBase takes weights, LoopEngine runs coroutines on one event loop, with pauses."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from threading import RLock
from typing import Any, TypeVar

from torchrl_rloo.engines.base import (
    AsyncEngine,
    Engine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    SamplingClock,
    WeightStep,
    check_in_flight,
    wait_for_all,
)
from torchrl_rloo.engines.vllm_api import PAUSE_MODES, scoring_arguments
from torchrl_rloo.runtime.event_loop import EventLoop

T = TypeVar("T")

CLOSED = EngineError("this engine is closed")
NOT_RESTARTED = EngineDeadError("restart() stopped this engine and has not started it yet")
_PAUSED_CHECK_S = 0.1  # time between two looks at a deadline during a pause
_END_S = 5.0  # time for work to end when its loop is closed


class VLLMEngineBase(Engine):
    """Base of vLLM engines, which sends the steps of weight updates to their workers.

    A subclass implements the abstract methods. The engine's ``version`` changes once all workers report it.
    """

    _staged = True
    _adapter_failed = False  # True if failed_version is of an adapter only, so that the weights are intact
    _adapter: Any = None  # what requests pass as the adapter; None samples with the weights only
    _replaces_adapter = True  # False if requests that were started with an adapter keep it after a newer one

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of workers of the engine. Each takes part in an update."""

    @cached_property
    def image_settings(self) -> dict[str, Any] | None:
        """Settings with which vLLM reads images; None if the model reads text only."""
        return self._rpc("image_settings", timeout=60.0)[0]

    @abstractmethod
    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        """Call a method of every worker and return the results."""

    @abstractmethod
    def _stamp(self, version: int, timeout: float) -> None:
        """Name the current weights in further outputs, and drop everything cached of other weights."""

    @abstractmethod
    def _load_adapter(self, path: str, version: int, timeout: float) -> None:
        """Load a LoRA adapter and sample with it from now on."""

    def _abort_frozen(self, timeout: float) -> None:  # noqa: B027
        """End requests that a pause froze, which would continue with another adapter than they were started with."""

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        """Do one step of a weight update, as :meth:`WeightTarget.update_weights` describes."""
        info = dict(info or {})
        # Writing to released GPU memory would end the process
        if self.asleep and step != "abort":
            raise self._refusal(ready=True)
        if step == "connect":
            self._staged = info["staged"]
            return self._rpc("init_weight_transfer_engine", info, timeout=timeout)
        if step == "start":
            if not self._staged:
                self.failed_version, self._adapter_failed = info["version"], False
            return self._rpc("announce_weight_update", info["version"], info.get("verify", True), timeout=timeout)
        if step == "bucket":
            return self._rpc("update_weights", info, timeout=timeout)
        if step == "abort":
            return self._rpc("abort_weight_update", timeout=timeout)
        if step == "adapter":
            self._take_adapter(info, timeout)
            return [{"version": self.version, "checksums": [info["checksum"]]}]
        # Finish: the weights count as failed until every worker has reported the version
        if self._adapter is not None:
            self._abort_frozen(timeout)  # reloading the weights drops all adapters
        self.failed_version, self._adapter_failed = info["version"], False
        self._rpc("finish_weight_update", timeout=timeout)
        reports = self._rpc("weight_report", timeout=timeout)
        if wrong := [report for report in reports if report["version"] != info["version"]]:
            raise EngineError(f"a worker was sent version {wrong[0]['version']}, but finish is of {info['version']}")
        self._adapter = None
        self._stamp(info["version"], timeout)
        self.version, self.failed_version = info["version"], None
        return reports

    def _take_adapter(self, info: Mapping[str, Any], timeout: float) -> None:
        # An adapter does not repair weights whose update failed
        if self.failed_version is not None and not self._adapter_failed:
            raise self._refusal(ready=True)
        self._rpc("check_adapter", info["path"], info["checksum"], timeout=timeout)
        if self._adapter is None or not self._replaces_adapter:
            self._abort_frozen(timeout)
        # A failed load keeps the old adapter, but a late one may still replace it
        previous_failure = self.failed_version
        self.failed_version, self._adapter_failed = info["version"], True
        try:
            self._load_adapter(info["path"], info["version"], timeout)
        except EngineError as error:
            if not isinstance(error, EngineTimeoutError):
                self.failed_version = previous_failure
            raise
        self._stamp(info["version"], timeout)
        self.version, self.failed_version = info["version"], None

    def _reset_to_checkpoint(self) -> None:
        """Count a restart and reset everything sent before it."""
        self.start_count += 1
        self.version, self.failed_version, self._adapter, self._staged = 0, None, None, True
        self.asleep = False


class LoopThread:
    """Event loop on a thread, whose end fails all work. It keeps no reference to the objects that start work on it."""

    def __init__(self, name: str):
        self._events = EventLoop(name)
        self.loop = self._events.loop
        self._work: set[asyncio.Task] = set()
        self._ended: EngineError | None = None
        self._end_lock = RLock()  # reentrant, since the garbage collector may call end() while it is held

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop and return its future. Cancelling the future cancels the work."""
        if self._ended is not None:
            work.close()
            failed: Future[T] = Future()
            failed.set_exception(_copy(self._ended))
            return failed
        return asyncio.run_coroutine_threadsafe(self._until_ended(work), self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run work on the loop and return its result; cancel it and raise ``EngineTimeoutError`` if it is late."""
        future = self.start(work)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise EngineTimeoutError(f"{what} took longer than timeout={timeout} s") from error

    def end(self, error: EngineError, *, final: bool = False) -> None:
        """Fail pending and later work with ``error``. An earlier call's error remains unless this one is final."""
        with self._end_lock:
            first = self._ended is None
            if first or final:
                self._ended = error  # set before the cancellation, since cancelled work raises it
        if first:
            self.call_soon(lambda: [task.cancel() for task in list(self._work)])

    def call_soon(self, function: Callable[[], Any]) -> None:
        """Call a function on the loop, unless the loop has ended with the process."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def close(self, error: EngineError) -> None:
        """Stop the thread. Pending and later work fails with ``error``. It may be called again."""
        self.end(error, final=True)
        # The garbage collector may call it on the loop's thread, which ends with this object
        if asyncio._get_running_loop() is not self.loop:
            self._events.close(_END_S)

    async def _until_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        self._work.add(task)
        if self._ended is not None:  # the loop ended after the start
            task.cancel()
        try:
            return await work
        except BaseException:
            if self._ended is None:
                raise
            raise _copy(self._ended) from None
        finally:
            self._work.discard(task)


def _copy(error: EngineError) -> EngineError:
    return type(error)(*error.args)  # one exception raised in several places would collect all their tracebacks


def _gate(is_open: bool) -> asyncio.Event:
    gate = asyncio.Event()  # bound to the loop that first waits for it, so each loop needs a new one
    if is_open:
        gate.set()
    return gate


class LoopEngine(VLLMEngineBase, AsyncEngine):
    """Base of vLLM engines that accept requests at any time. Requests wait at a gate during a pause.

    A subclass sets ``_loop`` and implements the abstract coroutines, which raise only :class:`EngineError` and its
    subclasses.
    """

    _loop: LoopThread

    def __init__(self, request_timeout: float):
        super().__init__(request_timeout)
        self._open = _gate(True)  # closed during a pause
        self._clock = SamplingClock()
        self._in_engine = 0  # number of requests passed to the engine
        self._long_calls = 0  # number of calls in progress for which the engine may answer no others

    @abstractmethod
    async def _sample(self, request: Request) -> Sample:
        """Sample one request."""

    @abstractmethod
    async def _score(self, row: Sequence[int], arguments: dict[str, Any]) -> list[float]:
        """Score one row with arguments of :func:`scoring_arguments`."""

    @abstractmethod
    async def _pause_engine(self, mode: str) -> None:
        """Pause sampling in one of vLLM's modes and drop all caches."""

    @abstractmethod
    async def _resume_engine(self) -> None:
        """Continue sampling."""

    @abstractmethod
    async def _collective(self, method: str, args: tuple, timeout: float) -> list:
        """Call a method of every worker."""

    @abstractmethod
    async def _name_weights(self, version: int) -> None:
        """Name the current weights in further outputs and drop all caches."""

    @abstractmethod
    async def _sleep_engine(self) -> None:
        """Release memory on the device."""

    @abstractmethod
    async def _wake_engine(self) -> None:
        """Allocate the released memory again."""

    @property
    def paused(self) -> bool:
        """True between pause and resume."""
        return not self._open.is_set()

    @property
    def occupied(self) -> bool:
        """True during a step of an update, ``sleep`` or ``wake``."""
        return self._long_calls > 0

    def submit(self, request: Request) -> Future[Sample]:
        return self._loop.start(self._in_time(lambda: self._sample(request)))

    def score(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        arguments = scoring_arguments(temperature)
        return wait_for_all(self._loop.start(self._in_time(partial(self._score, row, arguments))) for row in rows)

    def check_health(self, timeout: float = 10.0) -> None:
        """Call all workers. During a step of an update, sleep() or wake(), that call's time limit applies instead."""
        self._check()
        if self.occupied:
            return
        try:
            self._rpc("weight_report", timeout=timeout)
        except EngineTimeoutError as error:
            raise EngineDeadError(f"{type(self).__name__} hangs: {error}; call restart()") from error

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        check_in_flight(in_flight)
        self._loop.call(self._pause(PAUSE_MODES[in_flight]), timeout, f"pause({in_flight!r})")

    def resume(self) -> None:
        self._loop.call(self._resume(), self.request_timeout, "resume()")

    def sleep(self) -> None:
        with self._long_call():
            self._loop.call(self._sleep_engine(), self.request_timeout, "sleep()")
        self.asleep = True

    def wake(self) -> None:
        with self._long_call():
            self._loop.call(self._wake_engine(), self.request_timeout, "wake()")
        self.asleep = False

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        # A forward pass while weights are loaded would kill the engine
        loads = step in ("finish", "adapter") or (step == "start" and not self._staged)
        if loads and not self.paused:
            raise EngineError(f"{step!r} loads weights; pause the engine before")
        with self._long_call():
            return super().update_weights(step, info, timeout=timeout)

    @contextmanager
    def _long_call(self) -> Iterator[None]:
        self._long_calls += 1
        try:
            yield
        finally:
            self._long_calls -= 1

    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        return self._loop.call(self._collective(method, args, timeout), timeout, method)

    def _stamp(self, version: int, timeout: float) -> None:
        self._loop.call(self._name_weights(version), timeout, "naming the weights")

    def _abort_frozen(self, timeout: float) -> None:
        self._loop.call(self._abort_inside(), timeout, "aborting frozen requests")

    async def _abort_inside(self) -> None:
        while self._in_engine:  # a request may reach the engine after the first abort
            await self._pause_engine("abort")
            await asyncio.sleep(0.01)

    def _finish_restart(self) -> None:
        """Reset the state after a :meth:`restart`. A pause continues, since its caller will end it."""
        paused = self.paused
        self._open = _gate(not paused)
        self._reset_to_checkpoint()
        if paused:
            self._loop.call(self._pause_engine("abort"), self.request_timeout, "pause()")

    async def _in_time(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work of a request outside of pauses, unless it reaches its deadline first."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        deadline, late = self._clock.read() + self.request_timeout, False

        def check() -> None:
            nonlocal late, timer
            seconds = deadline - self._clock.read()
            if seconds > 0:
                timer = loop.call_later(max(seconds, _PAUSED_CHECK_S) if self.paused else seconds, check)
            else:
                late = task.cancel()

        timer = loop.call_later(self.request_timeout, check)
        try:
            self._check_entry()
            await self._open.wait()
            self._check(ready=True)  # an update may have failed during the wait, or the engine may sleep
            self._in_engine += 1
            try:
                return await work()
            finally:
                self._in_engine -= 1
        except asyncio.CancelledError:
            if not late:
                raise
            raise self._late() from None
        finally:
            timer.cancel()

    async def _pause(self, mode: str) -> None:
        self._open.clear()
        self._clock.stop()
        try:
            await self._pause_engine(mode)
        except BaseException:  # including CancelledError at a time-out
            self._clock.start()  # deadlines must pass even if the engine never answers
            try:
                await self._resume_engine()
            finally:
                self._open.set()
            raise

    async def _resume(self) -> None:
        self._clock.start()
        if self.failed_version is not None:
            await self._pause_engine("abort")  # otherwise frozen requests would continue with mixed weights
        await self._resume_engine()
        self._open.set()
