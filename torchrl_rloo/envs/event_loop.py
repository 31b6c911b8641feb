"""Event loops on daemon threads, and calls of users' functions that do not block them.

Conversations run on an :class:`EventLoop`: each collector has its own, and transforms stepped by hand share one. Users'
async functions share a separate loop, and their sync functions a pool of threads. A function that blocks so stops only
its own conversation. Loops and threads start on first use, and a forked process starts its own.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import wait
from contextlib import AsyncExitStack, suppress
from threading import Event, Lock
from time import monotonic
from typing import Any, TypeVar

from torchrl_rloo._threads import PackageThread, is_exiting
from torchrl_rloo.envs.call_pool import Call, CallLimit, CallPool, as_error, name_of
from torchrl_rloo.rewards.protocol import is_async

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

CALL_THREADS = 64  # default number of threads for users' sync functions
_BLOCKED_AFTER_S = 1.0  # a loop that runs no callback for this long counts as blocked
_CLOSE_TIMEOUT_S = 2.0  # time for cancelled tasks to end when a loop is closed
_STOP_TIMEOUT_S = 0.2  # time for an idle loop's thread to end
_ALIVE_POLL_S = 1.0
_QUEUED_POLL_S = 0.01  # shortest time between two looks at a call that waits for a thread


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
        if asyncio._get_running_loop() is self.loop:
            work.close()
            raise RuntimeError("run() waits, so it cannot be called on the event loop itself; await the coroutine")
        if self._stopped.is_set():
            work.close()
            raise RuntimeError(f"the event loop {self._thread.name!r} is closed")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            with _call_pool().waiting():
                # Look at the thread from time to time, since nothing would resolve the future after its end
                while not wait({future}, _ALIVE_POLL_S).done and self._thread.is_alive():
                    pass
            if not future.done():
                raise RuntimeError(f"the event loop {self._thread.name!r} was closed")
            return future.result()
        except BaseException:
            future.cancel()  # the waiting thread was interrupted
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
_POOLS: list[CallPool] = []  # the pool of this process, after its first call


def _shared(name: str) -> EventLoop:
    with _LOCK:
        held = _SHARED.get(name)
        if held is None or held.owner != os.getpid():
            held = _SHARED[name] = EventLoop(name)
        return held


def _call_pool() -> CallPool:
    with _LOCK:
        if not _POOLS or _POOLS[0].owner != os.getpid():
            _POOLS[:] = [CallPool(CALL_THREADS if not _POOLS else _POOLS[0].size)]
        return _POOLS[0]


def default_loop() -> EventLoop:
    """Return the loop shared by transforms that are stepped by hand, outside a collector."""
    return _shared("conversations")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the shared default loop and wait for it; see :meth:`EventLoop.run`."""
    return default_loop().run(work)


def set_call_threads(number: int) -> None:
    """Set how many threads run users' sync functions in this process; 64 by default.

    Raise it if many conversations wait in functions at the same time, such as slow tools. Calls beyond the number wait
    for a thread, and their time limits begin when they start.

    Args:
        number: largest number of threads. Abandoned ones and those that wait for other calls do not count.

    Raises:
        ValueError: if ``number`` is below 1.
    """
    if number < 1:
        raise ValueError(f"number={number} of threads must be at least 1")
    _call_pool().resize(number)


async def call(
    function: Callable[..., Any],
    *args: Any,
    timeout: float | None = None,
    limit: CallLimit | None = None,
    **kwargs: Any,
) -> Any:
    """Call a user's function, sync or async, without blocking the caller's loop; it may be awaited on any loop.

    An async function runs on the users' loop and is cancelled at its timeout. All async functions share that loop
    until one blocks it; the next call then starts a new loop. A sync function runs on one of a fixed number of reusable
    threads (:func:`set_call_threads`). At its timeout, or if the caller is cancelled, its thread is abandoned: it ends
    when the function returns, and another one takes its place.

    Args:
        function: sync or async function.
        *args: positional arguments of the function.
        timeout: time limit in seconds, from the start of the function; None disables it. Waiting for a thread or for
            ``limit`` does not count.
        limit: limit of concurrent calls that this call shares; None disables it.
        **kwargs: keyword arguments of the function.

    Returns:
        What the function returns. What it raises is raised here.

    Raises:
        TimeoutError: if the function exceeds ``timeout``.
        RuntimeError: in place of SystemExit, KeyboardInterrupt, StopIteration, or a cancellation from within the
            function; these would otherwise end a loop or the run. Also if the process is exiting.
    """
    async with AsyncExitStack() as places:
        if limit is not None:
            await places.enter_async_context(limit)
        if is_async(function):
            return await _call_async(function, args, kwargs, timeout)
        return await _call_sync(function, args, kwargs, timeout)


async def _call_async(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
    future = asyncio.run_coroutine_threadsafe(_await_guarded(function, args, kwargs), _shared("users").loop)
    waiting = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({waiting}, timeout=timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if done:
        return _result(function, waiting)
    # At the timeout, cancel it and check that it does not block the users' loop
    waiting.cancel()
    await _replace_if_blocked()
    raise TimeoutError(f"{name_of(function)} took longer than {timeout:g} s")


async def _call_sync(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], timeout: float | None) -> Any:
    pool = _call_pool()
    submitted = pool.submit(function, args, kwargs)
    waiting = asyncio.wrap_future(submitted)
    try:
        while not waiting.done() and (remaining := _remaining(submitted, timeout)) != 0.0:
            await asyncio.wait({waiting}, timeout=remaining)
    except asyncio.CancelledError:
        waiting.cancel()
        pool.abandon(submitted)
        raise
    if waiting.done():
        return _result(function, waiting)
    waiting.cancel()
    pool.abandon(submitted)
    raise TimeoutError(f"{name_of(function)} took longer than {timeout:g} s")


def _remaining(submitted: Call, timeout: float | None) -> float | None:
    """Return the time to wait for a call: the rest of its limit, or a poll while it waits for a thread."""
    if timeout is None:
        return None
    if submitted.started_at is None:
        return max(timeout, _QUEUED_POLL_S)
    return max(0.0, submitted.started_at + timeout - monotonic())


def _result(function: Callable[..., Any], done: asyncio.Future) -> Any:
    if done.cancelled():
        raise RuntimeError(f"{name_of(function)} was cancelled from within")
    return done.result()


async def _await_guarded(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return await function(*args, **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise as_error(function, error) from error


async def _replace_if_blocked() -> None:
    """Replace the users' loop if it is blocked."""
    held = _SHARED.get("users")
    if held is None:
        return
    responded = Event()
    held.call_soon(responded.set)
    for _ in range(20):
        if responded.is_set():
            return
        await asyncio.sleep(_BLOCKED_AFTER_S / 20)
    with _LOCK:
        if _SHARED.get("users") is not held:
            return
        del _SHARED["users"]
    asyncio.run_coroutine_threadsafe(_retire(held), held.loop)


async def _retire(held: EventLoop) -> None:
    """Stop a loop, once it is no longer blocked and its tasks have ended."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks)
    held._thread.stop()


@atexit.register
def _close_all() -> None:
    """Cancel conversations at exit while users' functions can still clean up, then stop all loops and calls."""
    users = _SHARED.get("users")
    _close([held for held in list(_OPEN) if held is not users], _CLOSE_TIMEOUT_S)
    _close([held for held in list(_OPEN) if held is users], _CLOSE_TIMEOUT_S)
    if _POOLS and _POOLS[0].owner == os.getpid():
        _POOLS[0].stop()
