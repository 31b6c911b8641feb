"""Event loops on daemon threads, and calls of functions that do not block them.

Conversations run on an :class:`EventLoop`: each collector has its own, and transforms stepped by hand share one. Users'
async functions share a separate loop, and async rewards another one. Loops and threads start on first use, and a forked
process starts its own.

One rule keeps calls from waiting for each other for ever: **work that others wait for never queues behind work that
waits.** Sampling, resets, scoring, agents and ``asyncio.to_thread`` get a thread at once (:func:`call_at_once`). Those
who make such calls bound their number: a source samples one batch at a time, and a collector has ``max_in_flight``
conversations. All other functions of users (:func:`call`) share :func:`set_call_threads` threads, of which only those
that compute count.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from contextvars import ContextVar
from math import inf
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torchrl_rloo.runtime.call_pool import Call, CallLimit, CallPool, as_error, leave_out, name_of
from torchrl_rloo.runtime.lookup import is_async
from torchrl_rloo.runtime.threads import PackageThread, is_exiting

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

CALL_THREADS = 64  # default number of threads for users' sync functions
_BLOCKED_AFTER_S = 1.0  # a loop that runs no callback for this long counts as blocked when it is closed
_LOST_AFTER_S = 30.0  # shortest time for which calls wait for a blocked loop
_CLOSE_TIMEOUT_S = 2.0  # time for cancelled tasks to end when a loop is closed
_STOP_TIMEOUT_S = 0.2  # time for an idle loop's thread to end
_SHORTEST_WAIT_S = 0.01  # between two looks at the clock of a call
_ALIVE_POLL_S = 1.0  # between two looks at whether the loop of a call lives
_TICK_S = 0.1  # time between two questions to a watched loop that answers
_GRACE_S = 0.2  # time after an answer in which a watched loop counts as free
_WARN_TICKS = 9  # looks in a row that find the same task running


class EventLoop:
    """asyncio event loop on a daemon thread; code on it must not block.

    An exception that would end the loop, such as a task's ``SystemExit``, is logged and the loop continues. The thread
    ends at :meth:`close`, when this object is deleted, or at the process's exit, which cancels the tasks first.

    Attributes:
        loop: the asyncio event loop.
        owner: id of the process that made it; the thread does not exist in a forked one.
    """

    def __init__(self, name: str):
        if is_exiting():
            raise RuntimeError(f"the event loop {name!r} cannot start, because the process is exiting")
        self.loop, self.owner = asyncio.new_event_loop(), os.getpid()
        self.loop.set_default_executor(_AtOnce())
        self._stopped = Event()
        stop = weakref.finalize(self, _stop, self.loop, self._stopped, self.owner)
        stop.atexit = False
        self._thread = PackageThread(_drive, self.loop, self._stopped, name=name, stop=stop)
        self._thread.start()
        _OPEN.add(self)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        if self._stopped.is_set():
            work.close()
            raise RuntimeError(f"the event loop {self._thread.name!r} is closed")
        call = LoopCall(self, work)
        try:
            leave_out()
            return call.result()
        except BaseException:
            call.cancel()  # the waiting thread was interrupted
            raise

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the loop, from any thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def close(self, timeout: float = _CLOSE_TIMEOUT_S) -> None:
        """Cancel all tasks, wait for their end, and stop the thread. It may be called again."""
        if asyncio._get_running_loop() is self.loop:
            raise RuntimeError("close() waits, so it cannot be called on the event loop itself")
        _close([self], timeout)


def _drive(loop: asyncio.AbstractEventLoop, stopped: Event) -> None:
    while not stopped.is_set():
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt):  # raised by one task: keep the others running
            if not stopped.is_set():
                _LOGGER.exception("a task on an event loop tried to exit the process")
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, stopped: Event, owner: int) -> None:
    """Stop a loop's thread after the callbacks that are ready."""
    if owner == os.getpid() and not stopped.is_set():
        stopped.set()
        with suppress(RuntimeError):  # the loop has closed already
            loop.call_soon_threadsafe(loop.stop)


def _close(loops: Iterable[EventLoop], timeout: float) -> None:
    """Cancel the tasks of loops, wait for all of them, and stop the loops."""
    loops = [held for held in loops if held.owner == os.getpid() and not held._stopped.is_set()]
    ended = [asyncio.run_coroutine_threadsafe(_end_tasks(timeout), held.loop) for held in loops]
    deadline = monotonic() + timeout + _BLOCKED_AFTER_S
    wait(ended, timeout + _BLOCKED_AFTER_S)
    for held in loops:
        held._thread.stop()
    for held in loops:
        held._thread.join(max(_STOP_TIMEOUT_S, deadline - monotonic()))
        if held._thread.is_alive():
            _LOGGER.warning("the event loop %r is blocked; it ends when its callback returns", held._thread.name)


async def _end_tasks(timeout: float) -> None:
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=timeout)
    await asyncio.get_running_loop().shutdown_asyncgens()


class LoopCall(Generic[T]):
    """Coroutine that runs on an event loop to its end or to :meth:`cancel`.

    A ``concurrent.futures.Future`` has a lock in Python, which a ``KeyboardInterrupt`` can leave locked. The loop would
    then block on it for ever. This class hands its result over in a ``SimpleQueue``, which interrupts cannot break.
    """

    def __init__(self, loop: EventLoop, work: Coroutine[Any, Any, T]):
        self._loop, self._work = loop, work
        self._outcome: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._task: asyncio.Task | None = None
        try:
            if asyncio._get_running_loop() is loop.loop:
                raise RuntimeError("a wait cannot be called on the event loop itself; await the coroutine")
            loop.call_soon(self._start)
        except RuntimeError:
            work.close()
            raise

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result."""
        deadline = None if timeout is None else monotonic() + timeout
        while True:
            # Look at the loop from time to time, since nothing would come after its end
            left = _ALIVE_POLL_S if deadline is None else min(_ALIVE_POLL_S, max(0.0, deadline - monotonic()))
            try:
                value, error = self._outcome.get(timeout=left)
            except Empty:
                if self._loop.loop.is_closed() and self._outcome.empty():
                    raise RuntimeError("the event loop was closed before the call ended") from None
                if deadline is not None and monotonic() >= deadline:
                    raise
                continue
            if error is not None:
                raise error
            return value

    def cancel(self) -> None:
        """Cancel the coroutine on its loop, without waiting for its end."""
        with suppress(RuntimeError):  # the loop was closed, which ended the call
            self._loop.call_soon(self._cancel)

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    def _cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            self._outcome.put((await self._work, None))
        except BaseException as error:  # a KeyboardInterrupt is the caller's, not the loop's
            self._outcome.put((None, error))


_CALL: ContextVar[AsyncCall | None] = ContextVar("call", default=None)


class LoopWatch:
    """Watch of an event loop, on a thread that asks ten times a second whether the loop answers.

    It logs a warning, once for each name, that tells which call blocks the loop, and where.

    Attributes:
        calls: call of each task.
        blocker: call that blocks the loop now; None if there is none, or it is unknown.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: Thread, stopped: Event):
        self._loop, self._thread, self._stopped = loop, thread, stopped
        self.calls: WeakKeyDictionary[asyncio.Task, AsyncCall] = WeakKeyDictionary()
        self.blocker: AsyncCall | None = None
        # The loop is free until a while after its last answer; later time is lost
        self._lock, self._lost, self._free_until, self._asked = Lock(), 0.0, monotonic() + _GRACE_S, False
        self._task, self._since, self._ticks = None, 0.0, 0  # running task of a blocked loop
        self._warned: set[str] = set()
        loop.set_task_factory(self._make_task)
        PackageThread(self._run, name="torchrl_rloo loop watch").start()  # the end of the loop ends it

    def lost(self) -> float:
        """Return the seconds in which the loop has been blocked."""
        with self._lock:
            return self._lost + max(0.0, monotonic() - self._free_until)

    def blocked_for(self) -> float:
        """Return for how many seconds the same task, or unknown code, has blocked the loop; 0 if it answers."""
        with self._lock:  # one look may come before the answer of a loop that was stopped as a whole
            return monotonic() - self._since if self._ticks > 1 else 0.0

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine, **kwargs: Any) -> asyncio.Task:
        task = asyncio.Task(work, loop=loop, **kwargs)
        if (call := _CALL.get()) is not None:
            self.calls[task] = call
        return task

    def _run(self) -> None:
        while not self._stopped.wait(_TICK_S):
            if self._asked:
                self._look()
                continue
            self._asked = True
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                return

    def _answer(self) -> None:
        with self._lock:
            self._count(monotonic())
            self._free_until, self._asked = monotonic() + _GRACE_S, False
            self.blocker = self._task = None
            self._ticks = 0

    def _look(self) -> None:
        """Find the task that has kept the loop from answering, and count the time at the expense of its call."""
        with self._lock:
            now = monotonic()
            if not self._asked or now <= self._free_until:
                return
            task = asyncio.current_task(self._loop)
            if not self._ticks or task is not self._task:
                self._task, self._since, self._ticks = task, self._free_until, 0
            self.blocker = None if task is None else self.calls.get(task)
            self._count(now)
            self._ticks += 1
            warn = self.blocker is not None and self._ticks == _WARN_TICKS
            name = self.blocker.name if warn else ""
        if warn:
            self._warn(name)

    def _count(self, now: float) -> None:
        """Count the time until now, as far as the loop was not free; to be called with the lock."""
        if (seconds := now - self._free_until) > 0:
            self._lost += seconds
            self._free_until = now
            if self.blocker is not None:
                self.blocker.blocked += seconds

    def _warn(self, name: str) -> None:
        """Tell who blocks the loop; not again for the same name."""
        if name in self._warned:
            return
        self._warned.add(name)
        frame = sys._current_frames().get(self._thread.ident)
        place = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        _LOGGER.warning(
            "%s blocks the event loop of async functions%s, so all others wait; make it a sync function, or await "
            "what blocks by asyncio.to_thread. Further blocks by it are not logged",
            *(name, place),
        )


_LOCK = Lock()
_OPEN: weakref.WeakSet[EventLoop] = weakref.WeakSet()
_SHARED: dict[str, EventLoop] = {}
_POOLS = {"users": CallPool(CALL_THREADS), "at once": CallPool(inf)}


def _pool(name: str) -> CallPool:
    with _LOCK:
        if _POOLS[name].owner != os.getpid():
            _POOLS[name] = CallPool(_POOLS[name].size)
        return _POOLS[name]


class _AtOnce(ThreadPoolExecutor):
    """Executor of ``asyncio.to_thread`` on the package's loops; asyncio's own has a few threads, and may deadlock."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        return _pool("at once").submit(function, args, kwargs)


class _UserLoop(EventLoop):
    """Loop of users' async functions, with a watch for those that block it."""

    def __init__(self, name: str):
        super().__init__(name)
        self.watch = LoopWatch(self.loop, self._thread, self._stopped)

    def is_stuck(self) -> bool:
        """Return whether the call that blocks the loop has timed out or was cancelled, or blocks it for long."""
        blocker = self.watch.blocker
        return getattr(blocker, "abandoned", False) or self.watch.blocked_for() > _LOST_AFTER_S


def _user_loop(name: str) -> _UserLoop:
    """Return a loop of users' async functions, or another one in its place if it is stuck."""
    with _LOCK:
        held = _SHARED.get(name)
        if held is not None and held.owner == os.getpid():
            if not held.is_stuck():
                return held
            asyncio.run_coroutine_threadsafe(_retire(held), held.loop)
        held = _SHARED[name] = _UserLoop(name)
        return held


async def _retire(held: EventLoop) -> None:
    """Stop a loop, once it is no longer blocked and its tasks have ended."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
    held._thread.stop()


def default_loop() -> EventLoop:
    """Return the loop shared by transforms that are stepped by hand, outside a collector."""
    with _LOCK:
        held = _SHARED.get("conversations")
        if held is None or held.owner != os.getpid():
            held = _SHARED["conversations"] = EventLoop("conversations")
        return held


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared default loop and wait for it; see :meth:`EventLoop.run`."""
    return default_loop().run(work)


def set_call_threads(number: int) -> None:
    """Set how many threads run users' sync functions in this process; 64 by default.

    Agents do not count, and get a thread each. Calls beyond the number wait for a thread, and their time limits begin
    when they start. A thread that has waited for a second, for a server or for another call, leaves the number.

    Args:
        number: largest number of threads that compute.

    Raises:
        ValueError: if ``number`` is below 1.
    """
    if number < 1:
        raise ValueError(f"number={number} of threads must be at least 1")
    _pool("users").resize(number)


async def call(
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    limit: CallLimit | None = None,
    **kwargs: Any,
) -> Any:
    """Call a user's function, sync or async, without blocking the caller's loop; it may be awaited on any loop.

    An async function runs on the users' loop and is cancelled at its timeout. A sync function runs on one of a fixed
    number of reusable threads (:func:`set_call_threads`). At its timeout, or if the caller is cancelled, its thread is
    abandoned: it ends when the function returns, and another one takes its place.

    All async functions share the users' loop. If one blocks it, a warning names it, and the clocks of the others stand
    still. Once its time is over, later calls get another loop.
    """
    async with nullcontext() if limit is None else limit:
        return await _finish(begin(function, *args, **kwargs), timeout)


async def call_at_once(function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
    """Call a function like :func:`call`, but give a sync one a thread at once.

    This is for work that others wait for, and for functions that run as long as a conversation. The caller bounds how
    many of them there are.
    """
    running = AsyncCall(function, args, {}) if is_async(function) else _pool("at once").submit(function, args, {})
    return await _finish(running, timeout)


def begin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Running:
    """Begin a :func:`call`, and return it. Its ``elapsed()`` are the seconds that count for a time limit."""
    return AsyncCall(function, args, kwargs) if is_async(function) else _pool("users").submit(function, args, kwargs)


class AsyncCall:
    """Call of an async function on a loop of users' functions, which begins at once.

    Its clock stands still while other calls block the loop.

    Attributes:
        future: its result.
        abandoned: whether it timed out, or its caller was cancelled.
        blocked: seconds in which this call itself blocked the loop.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], loop: str = "users"):
        held = _user_loop(loop)
        self.watch, self.name, self.blocked, self.abandoned = held.watch, name_of(function), 0.0, False
        self._began: tuple[float, float] | None = None
        self.future = asyncio.run_coroutine_threadsafe(self._run(function, args, kwargs), held.loop)

    async def _run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        # Start the clock, and make the current task, and all that it starts, part of this call
        self._began = monotonic(), self.watch.lost()
        _CALL.set(self)
        self.watch.calls[asyncio.current_task()] = self
        try:
            return await function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            raise as_error(function, error) from error

    def elapsed(self) -> float:
        """Return the seconds since the begin, without those in which other calls blocked the loop."""
        if self._began is None:
            return 0.0
        began, lost = self._began
        return monotonic() - began - max(0.0, self.watch.lost() - lost - self.blocked)

    def abandon(self) -> None:
        """Cancel the call, which ends once the loop is not blocked."""
        self.abandoned = True
        self.future.cancel()

    def check_loop(self, seconds: float) -> None:
        """Raise RuntimeError if another call has blocked the loop for longer than this."""
        blocker, blocked = self.watch.blocker, self.watch.blocked_for()
        if blocked > seconds and blocker is not self:
            name = "code of no known call" if blocker is None else blocker.name
            raise RuntimeError(f"{self.name} could not run, because {name} blocked the event loop for {blocked:.0f} s")


Running = Call | AsyncCall


async def _finish(call: Running, timeout: float | None) -> Any:
    """Wait for a call, at most to its time limit, and return what it returns."""
    waiting = asyncio.wrap_future(call.future)
    try:
        while not waiting.done() and (remaining := remaining_time(call, timeout)) != 0.0:
            await asyncio.wait({waiting}, timeout=remaining)
    except BaseException:  # cancelled, or the loop is lost
        waiting.cancel()
        call.abandon()
        raise
    if not waiting.done():
        waiting.cancel()
        call.abandon()
        raise TimeoutError(f"{call.name} took longer than {timeout:g} s")
    if waiting.cancelled():
        raise RuntimeError(f"{call.name} was cancelled from within")
    return waiting.result()


def remaining_time(call: Running, timeout: float | None) -> float | None:
    """Return the time to wait for a call, after which its clock is to be read again; 0 at its time limit."""
    if isinstance(call, AsyncCall):
        call.check_loop(max(timeout or 0.0, _LOST_AFTER_S))
    if timeout is None:
        return _LOST_AFTER_S / 3 if isinstance(call, AsyncCall) else None
    remaining = timeout - call.elapsed()
    return 0.0 if remaining <= 0 else max(remaining, _SHORTEST_WAIT_S)


@atexit.register
def _close_all() -> None:
    """Cancel conversations at exit while users' functions can still clean up, then stop all loops and calls."""
    _close([held for held in list(_OPEN) if not isinstance(held, _UserLoop)], _CLOSE_TIMEOUT_S)
    _close([held for held in list(_OPEN) if isinstance(held, _UserLoop)], _CLOSE_TIMEOUT_S)
    for pool in _POOLS.values():
        if pool.owner == os.getpid():
            pool.stop()
