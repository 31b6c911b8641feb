"""CallPool: reusable daemon threads for sync functions; CallLimit: bound of concurrent calls."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import sys
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from math import inf
from threading import Condition, Lock, current_thread
from time import monotonic
from typing import Any

from torchrl_rloo.runtime.threads import PackageThread, is_exiting

_LOGGER = logging.getLogger(__name__)

_SLOW_START_S = 10.0  # a call that waited longer for a thread is worth a warning
_WAITING_S = 1.0  # a thread that has not computed for this long waits for something
_COMPUTES_S = 0.001  # CPU time of a thread that computes, in that time
_IDLE_S = 60.0  # time after which a thread without calls ends


class Call(Future):
    """Future of one call of a sync function."""

    def __init__(self, pool: CallPool, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.name = name_of(function)
        self.work: tuple[Callable[..., Any], tuple, dict[str, Any]] | None = (function, args, kwargs)
        self.submitted_at, self.started_at = monotonic(), None
        self.worker: _Worker | None = None  # the thread that runs it
        self._pool = pool

    @property
    def future(self) -> Call:
        """Future of the call, which is the call itself."""
        return self

    def elapsed(self) -> float:
        """Return the seconds since the function started; 0 while the call waits for a thread."""
        return 0.0 if self.started_at is None else monotonic() - self.started_at

    def abandon(self) -> None:
        """Cancel the call. If its function is running, another thread may start in place of its thread."""
        self._pool.abandon(self)


class CallPool:
    """Pool of daemon threads, started on demand, that run calls in the order of submission.

    At most ``size`` threads count. A thread whose call was abandoned does not; it ends when its function returns. Nor
    does one that waits: while calls are queued, the pool looks every second for threads that have used no CPU. So
    calls that wait for each other, or for calls that they make, cannot use up the pool.
    """

    def __init__(self, size: float):
        self.owner = os.getpid()
        self.size, self._lock = size, Lock()
        self._changed = Condition(self._lock)
        self._queue: deque[Call] = deque()
        self._busy: set[_Worker] = set()
        self._counted = self._idle = self._starting = 0
        self._stopped = self._warned = self._looking = False

    def submit(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
        """Queue a call; it neither waits nor starts a thread itself."""
        call = Call(self, function, args, kwargs)
        with self._lock:
            if self._stopped or is_exiting():
                raise RuntimeError(f"{name_of(function)} cannot be called, because the process is exiting")
            self._queue.append(call)
            self._changed.notify()
            self._grow()
        return call

    def abandon(self, call: Call) -> None:
        """Cancel a call; see :meth:`Call.abandon`."""
        call.cancel()
        with self._lock:
            worker = call.worker
            if worker is not None and not worker.abandoned:
                worker.abandoned = True
                self._leave_out(worker)
                self._grow()

    def leave_out(self, worker: _Worker) -> None:
        """Leave a thread out of the count until its call ends."""
        with self._lock:
            self._leave_out(worker)
            self._grow()

    def resize(self, size: int) -> None:
        """Change the number of threads. Surplus ones end after their calls."""
        with self._lock:
            self.size = size
            self._changed.notify_all()
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
        """Start threads for queued calls as far as the size allows it; to be called with the lock."""
        while len(self._queue) > self._idle + self._starting and not self._stopped:
            # Thread.start waits for the new thread, so it must not run here: the caller may be an event loop
            if self._counted < self.size:
                self._counted += 1
                self._starting += 1
                try:
                    start_new_thread(self._start, ())
                except RuntimeError as error:
                    self._note_missing(error)
                    return
                continue
            if not self._looking:
                with suppress(RuntimeError):  # the next call tries again
                    start_new_thread(self._look, ())
                    self._looking = True
            return

    def _look(self) -> None:
        """Leave threads that wait out of the count as long as calls are queued, so that others start."""
        while True:
            time.sleep(_WAITING_S / 2)
            with self._lock:
                if not self._queue or self._stopped:
                    self._looking = False
                    return
                for worker in self._busy:
                    if worker.counts and worker.waits():
                        self._leave_out(worker)
                self._grow()

    def _leave_out(self, worker: _Worker) -> None:
        self._counted -= worker.counts
        worker.counts = False

    def _start(self) -> None:
        try:
            _Worker(self).start()
        except RuntimeError as error:
            with self._lock:
                self._note_missing(error)

    def _note_missing(self, error: RuntimeError) -> None:
        """Count a thread that the system did not start, and fail the calls that no other takes; with the lock."""
        self._counted -= 1
        self._starting -= 1
        while self._queue and not self._counted:
            call = self._queue.popleft()
            if call.set_running_or_notify_cancel():
                call.set_exception(RuntimeError(f"{call.name} has no thread to run on: {error}"))

    def serve(self, worker: _Worker) -> None:
        """Run calls until the pool is stopped, too large, or idle, or the thread's call was abandoned."""
        with self._lock:
            self._starting -= 1
        while (call := self._next(worker)) is not None:
            if call.set_running_or_notify_cancel():
                self._report_wait(call)
                _run(call)
            with self._lock:
                call.worker = None
                self._busy.discard(worker)
                if worker.abandoned:
                    return
                self._counted += not worker.counts
                worker.counts = True
            del call  # it would live until the next call

    def _next(self, worker: _Worker) -> Call | None:
        """Wait for a call, and return None if the thread is to end."""
        with self._lock:
            self._idle += 1
            awaited = True
            while awaited and not (self._queue or self._stopped or self._counted > self.size):
                awaited = self._changed.wait(_IDLE_S)
            self._idle -= 1
            if not self._queue or self._stopped or self._counted > self.size:
                self._counted -= 1
                return None
            call = self._queue.popleft()
            call.worker = worker
            worker.mark()
            self._busy.add(worker)
        return call

    def _report_wait(self, call: Call) -> None:
        waited = monotonic() - call.submitted_at
        if waited > _SLOW_START_S and self.size < inf and not self._warned:
            self._warned = True
            _LOGGER.warning(
                "%s waited %.0f s for one of the %d threads that run users' functions, because all of them compute; "
                "run what computes in processes, or raise the number with set_call_threads",
                *(name_of(call.work[0]), waited, self.size),
            )


class _Worker(PackageThread):
    """Thread of a pool."""

    def __init__(self, pool: CallPool):
        super().__init__(pool.serve, self, name="torchrl_rloo call", stop=pool.stop)
        self.pool, self.counts, self.abandoned = pool, True, False
        self._marked = (0.0, 0.0)  # a time, and the CPU time used until then

    def mark(self) -> None:
        """Note the CPU time; to be called by the thread at the begin of a call."""
        self._marked = monotonic(), time.thread_time()

    def waits(self) -> bool:
        """Return whether the thread, which runs a call, has not computed for a while."""
        (then, used), now = self._marked, monotonic()
        if now - then < _WAITING_S:
            return False
        # Only Linux tells the CPU time of another thread
        clock = getattr(time, "pthread_getcpuclockid", None)
        self._marked = now, used if clock is None else time.clock_gettime(clock(self.ident))
        return self._marked[1] - used < _COMPUTES_S


def leave_out() -> None:
    """Leave the calling thread, if it belongs to a pool, out of its count: it is about to wait for another call."""
    if isinstance(worker := current_thread(), _Worker):
        worker.pool.leave_out(worker)


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
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_grad_enabled(True)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages, with its class."""
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


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
