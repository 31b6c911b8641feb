"""What vLLM engines that take requests at any time share: an event loop on a thread of its own, and the pauses."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future, TimeoutError
from threading import Thread, current_thread
from typing import Any, TypeVar

from torchrl_rloo.modules.engines.base import (
    IN_FLIGHT,
    AsyncEngine,
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    Request,
    Sample,
    WeightStep,
)
from torchrl_rloo.modules.engines.vllm_api import PAUSE_MODES, VLLMEngineBase

T = TypeVar("T")


CLOSED = EngineError("this engine is closed")
NOT_RESTARTED = EngineDeadError("this engine has been ended by restart() and is not started yet")


class LoopThread:
    """An event loop on a daemon thread. It keeps no reference to whatever starts work on it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str):
        self.loop = asyncio.new_event_loop()
        self._work: set[asyncio.Task] = set()
        self._ended: EngineError | None = None
        self._thread = Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts work on the loop; cancelling the future cancels it."""
        if self._ended is not None:
            work.close()
            failed: Future[T] = Future()
            failed.set_exception(_copy(self._ended))
            return failed
        return asyncio.run_coroutine_threadsafe(self._until_ended(work), self.loop)

    def call(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Does work on the loop and returns what it comes to.

        Raises:
            EngineTimeoutError: if it takes more than ``timeout`` seconds; it is cancelled then.
        """
        future = self.start(work)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise EngineTimeoutError(f"{what} took longer than timeout={timeout} s") from error

    def end(self, error: EngineError) -> None:
        """Fails the work under way and all work to come; of several ends the last one's error counts."""
        first, self._ended = self._ended is None, error  # set before the work is cancelled, which raises it
        if first:
            self.loop.call_soon_threadsafe(self._cancel_work)

    def close(self, error: EngineError) -> None:
        """Stops the thread; work under way and to come fails with ``error``. May be called again."""
        self.end(error)
        if self._thread is current_thread():  # the garbage collector may run anywhere
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
        """Stops the loop once all work has seen its end: who waits for it would wait for ever."""
        await asyncio.sleep(0.1)  # what others have on the loop may end too
        if self._work:
            await asyncio.wait(self._work, timeout=5.0)
        self.loop.stop()

    async def _until_ended(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        self._work.add(task)
        if self._ended is not None:  # since it was started
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
    return type(error)(*error.args)  # an exception raised in many places would gather all their tracebacks


def _gate(is_open: bool) -> asyncio.Event:
    gate = asyncio.Event()  # of the loop that first waits at it, so each loop needs its own
    if is_open:
        gate.set()
    return gate


class LoopEngine(VLLMEngineBase, AsyncEngine):
    """A vLLM engine behind coroutines: requests wait while it is paused, and torn weights sample nothing.

    A subclass sets ``_loop``, and says how to reach the engine in the abstract coroutines, which raise only what
    :class:`~torchrl_rloo.modules.engines.base.EngineError` has below it.

    Args:
        request_timeout: seconds that a request of :meth:`generate` may take.
    """

    _loop: LoopThread

    def __init__(self, request_timeout: float):
        super().__init__(request_timeout)
        self._open = _gate(True)  # closed during a pause
        self._inside = 0  # requests that the engine has

    @abstractmethod
    async def _sample(self, request: Request) -> Sample:
        """Samples a request."""

    @abstractmethod
    async def _pause_engine(self, mode: str) -> None:
        """Pauses sampling in one of vLLM's modes, and drops all caches."""

    @abstractmethod
    async def _resume_engine(self) -> None:
        """Samples again."""

    @abstractmethod
    async def _collective(self, method: str, args: tuple, timeout: float) -> list:
        """Calls a method of every worker."""

    @abstractmethod
    async def _name_weights(self, version: int) -> None:
        """Names the weights in force, and drops all caches."""

    @abstractmethod
    async def _sleep_engine(self) -> None:
        """Frees memory on the device."""

    @abstractmethod
    async def _wake_engine(self) -> None:
        """Takes it back."""

    def submit(self, request: Request) -> Future[Sample]:
        return self._loop.start(self._sampled(request))

    def pause(self, in_flight: InFlight = "finish", *, timeout: float = 600.0) -> None:
        if in_flight not in IN_FLIGHT:
            raise ValueError(f"in_flight={in_flight!r} must be one of {IN_FLIGHT}")
        self._loop.call(self._paused(PAUSE_MODES[in_flight]), timeout, f"pause({in_flight!r})")

    def resume(self) -> None:
        self._loop.call(self._resumed(), self.request_timeout, "resume()")

    def sleep(self) -> None:
        self._loop.call(self._sleep_engine(), self.request_timeout, "sleep()")
        self.asleep = True

    def wake(self) -> None:
        self._loop.call(self._wake_engine(), self.request_timeout, "wake()")
        self.asleep = False

    def update_weights(self, step: WeightStep, info: Mapping[str, Any] | None = None, *, timeout: float) -> list[dict]:
        loads = step in ("finish", "adapter") or (step == "start" and not self._staged)
        if loads and self._open.is_set():  # a forward pass amidst a load would end the engine
            raise EngineError(f"weights are loaded at {step!r}: pause the engine before")
        return super().update_weights(step, info, timeout=timeout)

    def _rpc(self, method: str, *args: Any, timeout: float) -> list:
        return self._loop.call(self._collective(method, args, timeout), timeout, method)

    def _stamp(self, version: int, timeout: float) -> None:
        self._loop.call(self._name_weights(version), timeout, "naming the weights")

    def _start_again(self) -> None:
        """Forgets the engine before, in a :meth:`restart`; a pause goes on, as whoever made it will end it."""
        paused = not self._open.is_set()
        self._open = _gate(not paused)
        self._started_anew()
        self.closed = False
        if paused:
            self._loop.call(self._pause_engine("abort"), self.request_timeout, "pause()")

    async def _sampled(self, request: Request) -> Sample:
        self._check(ready=True)
        await self._open.wait()
        self._check(ready=True)  # it may have been torn or put to sleep meanwhile
        self._inside += 1
        try:
            return await self._sample(request)
        finally:
            self._inside -= 1

    async def _paused(self, mode: str) -> None:
        self._open.clear()
        try:
            await self._pause_engine(mode)
        except BaseException:  # in time-outs too
            try:
                await self._resume_engine()
            finally:
                self._open.set()
            raise

    async def _resumed(self) -> None:
        if self.torn is not None:
            await self._pause_engine("abort")  # frozen requests would go on with torn weights
        await self._resume_engine()
        self._open.set()
