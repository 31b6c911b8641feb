"""Base of vLLM engines that run as coroutines on one event loop, with pauses."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager
from functools import partial
from threading import RLock, current_thread
from typing import Any, TypeVar

from torchrl_rloo.engines.base import (
    AsyncEngine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    SamplingClock,
    WeightStep,
    check_in_flight,
)
from torchrl_rloo.engines.vllm_api import PAUSE_MODES, VLLMEngineBase
from torchrl_rloo.runtime.threads import PackageThread

T = TypeVar("T")


CLOSED = EngineError("this engine is closed")
_PAUSED_CHECK_S = 0.1  # time between two looks at a deadline during a pause
NOT_RESTARTED = EngineDeadError("restart() stopped this engine and has not started it yet")


class LoopThread:
    """Event loop on a daemon thread. It keeps no reference to the objects that start work on it.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._work: set[asyncio.Task] = set()
        self._ended: EngineError | None = None
        self._end_lock = RLock()  # reentrant, since the garbage collector may call end() while it is held
        self._thread = PackageThread(
            self.loop.run_forever, name=name, stop=partial(self.loop.call_soon_threadsafe, self.loop.stop)
        )
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start work on the loop and return its future. Cancelling the future cancels the work."""
        if self._ended is not None:
            work.close()
            failed: Future[T] = Future()
            failed.set_exception(_copy(self._ended))
            return failed
        return asyncio.run_coroutine_threadsafe(self._until_ended(work), self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Run work on the loop and return its result.

        Args:
            work: coroutine to run.
            timeout: maximum duration in seconds.
            what: name of the work in the error.

        Raises:
            EngineTimeoutError: if the work takes longer. It is then cancelled.
        """
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
            self.loop.call_soon_threadsafe(self._cancel_work)

    def close(self, error: EngineError) -> None:
        """Stop the thread. Pending and later work fails with ``error``. It may be called again."""
        self.end(error, final=True)
        # The garbage collector may call it on the loop's thread, which cannot wait for itself
        if self._thread is current_thread():
            self.loop.stop()
        elif self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self.loop)
            self._thread.join(timeout=10.0)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()

    def _cancel_work(self) -> None:
        for task in list(self._work):
            task.cancel()

    async def _stop(self) -> None:
        """Stop the loop once all work has ended, since callers would wait forever for the rest."""
        await asyncio.sleep(0.1)  # let other tasks of the loop end
        if self._work:
            await asyncio.wait(self._work, timeout=5.0)
        self.loop.stop()

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
    """Base of vLLM engines that accept requests at any time. Requests wait during a pause.

    A subclass sets ``_loop`` and implements the abstract coroutines, which raise only :class:`EngineError` and its
    subclasses.

    Args:
        request_timeout: seconds of sampling that a request may take; time in a pause does not count.
    """

    _loop: LoopThread

    def __init__(self, request_timeout: float):
        super().__init__(request_timeout)
        self._open = _gate(True)  # closed during a pause
        self._sampling_clock = SamplingClock()
        self._in_engine = 0  # number of requests passed to the engine
        self._long_calls = 0  # number of calls in progress for which the engine may answer no others

    @abstractmethod
    async def _sample(self, request: Request) -> Sample:
        """Sample one request."""

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

    def submit(self, request: Request) -> Future[Sample]:
        return self._loop.start(self._sample_in_time(request))

    @property
    def occupied(self) -> bool:
        """True during a step of an update, ``sleep`` or ``wake``."""
        return self._long_calls > 0

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
        if loads and self._open.is_set():
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

    async def _sample_in_time(self, request: Request) -> Sample:
        """Sample a request, unless it reaches its deadline first."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        deadline, late = self._sampling_clock.read() + self.request_timeout, False

        def check() -> None:
            nonlocal late, timer
            seconds = deadline - self._sampling_clock.read()
            if seconds > 0:
                timer = loop.call_later(max(seconds, _PAUSED_CHECK_S) if self.paused else seconds, check)
            else:
                late = task.cancel()

        timer = loop.call_later(self.request_timeout, check)
        try:
            return await self._sample_unless_paused(request)
        except asyncio.CancelledError:
            if not late:
                raise
            raise self._late() from None
        finally:
            timer.cancel()

    async def _sample_unless_paused(self, request: Request) -> Sample:
        self._check_entry()
        await self._open.wait()
        self._check(ready=True)  # an update may have failed during the wait, or the engine may sleep
        self._in_engine += 1
        try:
            return await self._sample(request)
        finally:
            self._in_engine -= 1

    async def _pause(self, mode: str) -> None:
        self._open.clear()
        self._sampling_clock.stop()
        try:
            await self._pause_engine(mode)
        except BaseException:  # including CancelledError at a time-out
            self._sampling_clock.start()  # deadlines must pass even if the engine never answers
            try:
                await self._resume_engine()
            finally:
                self._open.set()
            raise

    async def _resume(self) -> None:
        self._sampling_clock.start()
        if self.failed_version is not None:
            await self._pause_engine("abort")  # otherwise frozen requests would continue with mixed weights
        await self._resume_engine()
        self._open.set()
