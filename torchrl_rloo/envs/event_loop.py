"""Two event loops on daemon threads: one drives conversations, one runs users' async functions.

They start on first use, and each process has its own: a forked process starts new ones. User functions have a separate
loop, so a function that blocks it does not block any conversation.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any, TypeVar

from torchrl_rloo.rewards.protocol import is_async

_LOGGER = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCKED_AFTER_S = 1.0  # a loop that runs no callback for this long counts as blocked
_EXIT_TIMEOUT_S = 2.0


class _Loop:
    def __init__(self, name: str):
        self.loop, self.owner = asyncio.new_event_loop(), os.getpid()
        self.stopped = False
        self.thread = Thread(target=self._drive, daemon=True, name=name)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread after the callbacks that are ready."""
        self.stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _drive(self) -> None:
        while not self.stopped:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # raised by one task: keep the others running
                _LOGGER.exception("a task on the event loop of the %s tried to exit the process", self.thread.name)


class EventLoop(_Loop):
    def run(self, work):
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call_soon(self, fn, *args):
        self.loop.call_soon_threadsafe(fn, *args)

    def close(self):
        self.stop()


_LOCK = Lock()
_LOOPS: dict[str, _Loop] = {}
_CALLS: weakref.WeakSet[Thread] = weakref.WeakSet()  # threads of sync functions


def _loop(name: str) -> asyncio.AbstractEventLoop:
    with _LOCK:
        held = _LOOPS.get(name)
        if held is None or held.owner != os.getpid():
            held = _LOOPS[name] = _Loop(name)
        return held.loop


def conversation_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that conversations run on; code on it must not block."""
    return _loop("conversations")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the conversations' loop and wait for it.

    Args:
        work: the coroutine.

    Returns:
        The coroutine's result.

    Raises:
        RuntimeError: if called on that loop, where waiting would deadlock.
    """
    loop = conversation_loop()
    if asyncio._get_running_loop() is loop:
        work.close()
        raise RuntimeError("run() waits, so it cannot be called on the conversations' loop; await the coroutine")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # the waiting thread was interrupted
        raise


async def call(function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
    """Call a user's function, sync or async, without blocking the caller's loop.

    An async function runs on the users' loop and is cancelled at its timeout. All async functions share that loop
    until one blocks it; the next call then starts a new loop. A sync function runs on a new daemon thread, which is
    abandoned at the timeout.

    Args:
        function: sync or async function.
        *args: positional arguments of the function.
        timeout: time limit in seconds; None disables it.
        **kwargs: keyword arguments of the function.

    Returns:
        What the function returns. What it raises is raised here.

    Raises:
        TimeoutError: if the function exceeds ``timeout``.
        RuntimeError: in place of SystemExit, KeyboardInterrupt, StopIteration, or a cancellation from within the
            function; these would otherwise end a loop or the run.
    """
    # Start the function where it cannot block this loop
    if is_async(function):
        future = asyncio.run_coroutine_threadsafe(_await_guarded(function, args, kwargs), _loop("users"))
    else:
        future = _call_on_thread(function, args, kwargs)
    waiting = asyncio.wrap_future(future)
    # Wait for it, and cancel it if this task is cancelled
    try:
        done, _ = await asyncio.wait({waiting}, timeout=timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if done:
        if waiting.cancelled():
            raise RuntimeError(f"{_name(function)} was cancelled from within")
        return waiting.result()
    # At the timeout, cancel it and check that it does not block the users' loop
    waiting.cancel()
    await _replace_if_blocked()
    raise TimeoutError(f"{_name(function)} took longer than {timeout:g} s")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _await_guarded(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return await function(*args, **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _as_error(function, error) from error


def _as_error(function: Callable[..., Any], raised: BaseException) -> Exception:
    """Wrap exceptions that asyncio treats specially in a RuntimeError."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration | CancelledError):
        return raised
    error = RuntimeError(f"{_name(function)} raised {raised!r}")
    error.__cause__ = raised
    return error


def _call_on_thread(function: Callable[..., T], args: tuple, kwargs: dict[str, Any]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # includes SystemExit, which the caller must learn of
            future.set_exception(_as_error(function, error))
        else:
            future.set_result(result)

    # Use a daemon thread, since a call that never returns must not keep the process alive
    thread = Thread(target=work, daemon=True, name=getattr(function, "__name__", "call"))
    _CALLS.add(thread)
    thread.start()
    return future


async def _replace_if_blocked() -> None:
    """Drop the users' loop and its tasks if it is blocked; the next call starts a new one."""
    held = _LOOPS.get("users")
    if held is None:
        return
    responded = Event()
    held.loop.call_soon_threadsafe(responded.set)
    for _ in range(20):
        if responded.is_set():
            return
        await asyncio.sleep(_BLOCKED_AFTER_S / 20)
    with _LOCK:
        if _LOOPS.get("users") is held:
            del _LOOPS["users"]


@atexit.register
def _stop_threads() -> None:
    """Stop the loops and let calls finish: a thread that Python's exit kills inside torch aborts the process."""
    loops = [held for held in _LOOPS.values() if held.owner == os.getpid()]
    for held in loops:
        held.stop()
    until = monotonic() + _EXIT_TIMEOUT_S
    for thread in (*(held.thread for held in loops), *list(_CALLS)):
        if thread.is_alive():
            thread.join(max(0.0, until - monotonic()))
