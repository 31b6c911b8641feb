"""CallPool: bounded, reusable daemon threads for users' sync functions; CallLimit: bound of concurrent calls."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from threading import Condition, Lock, current_thread
from time import monotonic
from typing import Any

import torch

from torchrl_rloo._threads import PackageThread, is_exiting

_LOGGER = logging.getLogger(__name__)

_SLOW_START_S = 10.0  # a call that waited longer for a thread is worth a warning


class Call(Future):
    """Future of one call of a sync function.

    Attributes:
        started_at: time of ``time.monotonic()`` at which the function started; None while the call waits for a thread.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.work: tuple[Callable[..., Any], tuple, dict[str, Any]] | None = (function, args, kwargs)
        self.submitted_at, self.started_at = monotonic(), None
        self.worker: _Worker | None = None  # the thread that runs it


class CallPool:
    """Pool of at most ``size`` daemon threads, started on demand, that run calls in the order of submission.

    Two kinds of threads do not count: one whose call was abandoned, which ends when its function returns, and one that
    waits for other calls (:meth:`waiting`). So calls that make calls cannot use up the pool.

    Args:
        size: largest number of threads that count.
    """

    def __init__(self, size: int):
        self.owner = os.getpid()
        self.size, self._lock = size, Lock()
        self._changed = Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._counted = self._idle = self._starting = 0
        self._stopped = self._warned = False

    def submit(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
        """Queue a call; it neither waits nor starts a thread itself.

        Raises:
            RuntimeError: if the process is exiting.
        """
        call = Call(function, args, kwargs)
        with self._lock:
            if self._stopped or is_exiting():
                raise RuntimeError(f"{name_of(function)} cannot be called, because the process is exiting")
            self._queue.append(call)
            self._changed.notify()
            self._grow()
        return call

    def abandon(self, call: Call) -> None:
        """Cancel a call. If its function is running, another thread may start in place of its thread."""
        call.cancel()
        with self._lock:
            worker = call.worker
            if worker is not None and not worker.abandoned:
                worker.abandoned = True
                if not worker.waiting:
                    self._counted -= 1
                    self._grow()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave the calling thread, if it belongs to the pool, out of the count within the context."""
        worker = current_thread()
        if not isinstance(worker, _Worker) or worker.pool is not self:
            yield
            return
        with self._lock:
            worker.waiting = True
            if not worker.abandoned:
                self._counted -= 1
                self._grow()
        try:
            yield
        finally:
            with self._lock:
                worker.waiting = False
                self._counted += not worker.abandoned

    def resize(self, size: int) -> None:
        """Change the number of threads. Surplus ones end after their calls."""
        with self._lock:
            self.size = size
            self._changed.notify_all()
            for _ in range(len(self._queue)):
                self._grow()

    def stop(self) -> None:
        """Cancel queued calls and let threads end after their calls."""
        with self._lock:
            self._stopped = True
            queued = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for call in queued:
            call.cancel()

    def _grow(self) -> None:
        """Start a thread if a queued call has none and the size allows it; to be called with the lock."""
        if len(self._queue) > self._idle + self._starting and self._counted < self.size and not self._stopped:
            self._counted += 1
            self._starting += 1
            # Thread.start waits for the new thread, so it must not run here: the caller may be an event loop
            start_new_thread(self._start, ())

    def _start(self) -> None:
        try:
            _Worker(self).start()
        except RuntimeError as error:  # the system has no more threads
            with self._lock:
                self._counted -= 1
                self._starting -= 1
                failed = [] if self._counted else list(self._queue)  # otherwise other threads will take them
                for call in failed:
                    self._queue.remove(call)
            for call in failed:
                if call.set_running_or_notify_cancel():
                    call.set_exception(RuntimeError(f"{name_of(call.work[0])} has no thread to run on: {error}"))

    def serve(self, worker: _Worker) -> None:
        """Run calls until the pool is stopped, too large, or the thread's call was abandoned."""
        with self._lock:
            self._starting -= 1
        while (call := self._next(worker)) is not None:
            _run(call)
            with self._lock:
                call.worker = None
                if worker.abandoned:
                    return
            del call  # it would live until the next call

    def _next(self, worker: _Worker) -> Call | None:
        """Wait for a call, and return None if the thread is to end."""
        while True:
            with self._lock:
                self._idle += 1
                try:
                    while not (self._queue or self._stopped or self._counted > self.size):
                        self._changed.wait()
                finally:
                    self._idle -= 1
                if self._stopped or self._counted > self.size:
                    self._counted -= 1
                    return None
                call = self._queue.popleft()
                call.worker = worker
            if call.set_running_or_notify_cancel():
                self._report_wait(call)
                return call
            with self._lock:
                call.worker = None
                if worker.abandoned:
                    return None

    def _report_wait(self, call: Call) -> None:
        waited = monotonic() - call.submitted_at
        if waited > _SLOW_START_S and not self._warned:
            self._warned = True
            _LOGGER.warning(
                "%s waited %.0f s for one of the %d threads that run users' functions; raise the number with "
                "set_call_threads, or make the functions async",
                *(name_of(call.work[0]), waited, self.size),
            )


class _Worker(PackageThread):
    """Thread of a pool."""

    def __init__(self, pool: CallPool):
        super().__init__(pool.serve, self, name="torchrl_rloo call", stop=pool.stop)
        self.pool, self.abandoned, self.waiting = pool, False, False


def _run(call: Call) -> None:
    """Run a call as a new thread would: with an empty context, and with gradients enabled."""
    (function, args, kwargs), call.work = call.work, None
    call.started_at = monotonic()
    try:
        result = contextvars.Context().run(function, *args, **kwargs)
    except BaseException as error:  # includes SystemExit, which the caller must learn of
        call.set_exception(as_error(function, error))
    else:
        call.set_result(result)
    finally:
        torch.set_grad_enabled(True)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    return getattr(function, "__name__", type(function).__name__)


def as_error(function: Callable[..., Any], raised: BaseException) -> Exception:
    """Wrap exceptions that asyncio treats specially in a RuntimeError."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration | CancelledError):
        return raised
    error = RuntimeError(f"{name_of(function)} raised {raised!r}")
    error.__cause__ = raised
    return error


class CallLimit:
    """Limit of concurrent calls, over all event loops and collectors of the process; first come, first served.

    ``async with limit:`` waits for a place and holds it. A call that times out or is cancelled gives its place back,
    even if its thread still runs the function.

    Args:
        size: largest number of concurrent calls.

    Raises:
        ValueError: if ``size`` is below 1.
    """

    def __init__(self, size: int):
        if size < 1:
            raise ValueError(f"size={size} of a CallLimit must be at least 1")
        self.size, self._free, self._lock = size, size, Lock()
        self._queue: deque[Future[None]] = deque()

    def __reduce__(self) -> tuple:
        return CallLimit, (self.size,)  # a copy in another process has its own places

    async def __aenter__(self) -> CallLimit:
        with self._lock:
            if self._free and not self._queue:
                self._free -= 1
                return self
            place: Future[None] = Future()
            self._queue.append(place)
        try:
            await asyncio.wrap_future(place)
        except asyncio.CancelledError:
            if not place.cancel():  # the place was given just before the cancellation
                self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        """Give the place to the first in the queue that was not cancelled."""
        with self._lock:
            while self._queue:
                place = self._queue.popleft()
                if place.set_running_or_notify_cancel():
                    break
            else:
                self._free += 1
                return
        place.set_result(None)
