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
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from math import inf
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeVar

from torchrl_rloo.runtime.call_pool import Call, CallLimit, CallPool, as_error, leave_out, name_of
from torchrl_rloo.runtime.lookup import is_async
from torchrl_rloo.runtime.loop_call import LoopCall
from torchrl_rloo.runtime.loop_watch import LoopWatch, WatchedCall
from torchrl_rloo.runtime.threads import PackageThread, is_exiting

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

CALL_THREADS = 64  # default number of threads for users' sync functions
_BLOCKED_AFTER_S = 1.0  # a loop that runs no callback for this long counts as blocked when it is closed
_LOST_AFTER_S = 30.0  # shortest time for which calls wait for a blocked loop
_CLOSE_TIMEOUT_S = 2.0  # time for cancelled tasks to end when a loop is closed
_STOP_TIMEOUT_S = 0.2  # time for an idle loop's thread to end
_SHORTEST_WAIT_S = 0.01  # between two looks at the clock of a call


class EventLoop:
    """asyncio event loop on a daemon thread; code on it must not block.

    An exception that would end the loop, such as a task's ``SystemExit``, is logged and the loop continues. The thread
    ends at :meth:`close`, when this object is deleted, or at the process's exit, which cancels the tasks first.

    Args:
        name: name of the thread.

    Attributes:
        loop: the asyncio event loop.
        owner: id of the process that made it; the thread does not exist in a forked one.

    Raises:
        RuntimeError: if the process is exiting.

    Example:
        >>> loop = EventLoop("example")
        >>> async def double(value):
        ...     return 2 * value
        >>> loop.run(double(4))
        8
        >>> loop.close()
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
        """Run a coroutine on the loop and wait for it.

        Args:
            work: the coroutine.

        Returns:
            The coroutine's result.

        Raises:
            RuntimeError: if called on that loop, where waiting would deadlock, or if the loop is closed.
        """
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
        """Call a function on the loop, from any thread.

        Raises:
            RuntimeError: if the loop is closed.
        """
        self.loop.call_soon_threadsafe(function, *args)

    def close(self, timeout: float = _CLOSE_TIMEOUT_S) -> None:
        """Cancel all tasks, wait for their end, and stop the thread. It may be called again.

        Args:
            timeout: seconds to wait for the tasks. The thread stops even if they do not end.

        Raises:
            RuntimeError: if called on the loop.
        """
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

    Args:
        function: sync or async function.
        *args: positional arguments of the function.
        timeout: time limit in seconds, from the start of the function; None disables it. Waiting for a thread, for
            ``limit``, or for another function that blocks the loop does not count.
        limit: limit of concurrent calls that this call shares; None disables it.
        **kwargs: keyword arguments of the function.

    Returns:
        What the function returns. What it raises is raised here.

    Raises:
        TimeoutError: if the function exceeds ``timeout``.
        RuntimeError: in place of SystemExit, KeyboardInterrupt, StopIteration, or a cancellation from within the
            function; these would otherwise end a loop or the run. Also if the process is exiting, or if another
            function blocks the loop for longer than ``timeout`` and 30 s.
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


class AsyncCall(WatchedCall):
    """Call of an async function on a loop of users' functions, which begins at once.

    Attributes:
        future: its result.
        abandoned: whether it timed out, or its caller was cancelled.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], loop: str = "users"):
        held = _user_loop(loop)
        super().__init__(held.watch, name_of(function))
        self.abandoned = False
        self.future = asyncio.run_coroutine_threadsafe(self._run(function, args, kwargs), held.loop)

    async def _run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        self.begin()
        try:
            return await function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            raise as_error(function, error) from error

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
    """Return the time to wait for a call, after which its clock is to be read again; 0 at its time limit.

    Raises:
        RuntimeError: if another call blocks its loop for too long.
    """
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
