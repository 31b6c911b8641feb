"""Two event loops on daemon threads: one that drives conversations, one for whatever users' async functions do.

They start on first use and are this process's own: a forked process starts others. What users write runs apart from
the conversations, so that a function that blocks its loop holds up no conversation.
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

_PATIENCE = 1.0  # s in which a loop must turn once, or it is blocked
_EXIT_TIMEOUT_S = 2.0


class _Loop:
    def __init__(self, name: str):
        self.loop, self.owner = asyncio.new_event_loop(), os.getpid()
        self.stopped = False
        self.thread = Thread(target=self._drive, daemon=True, name=name)
        self.thread.start()

    def stop(self) -> None:
        """End the thread once it has done what is ready."""
        self.stopped = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _drive(self) -> None:
        while not self.stopped:
            try:
                self.loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # a task raised it; the others know nothing of it
                _LOGGER.exception("a task on the loop of the %s wanted to end the process", self.thread.name)


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
    """The loop that conversations run on; nothing on it may block."""
    return _loop("conversations")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Does work on the conversations' loop and waits for it.

    Raises:
        RuntimeError: if called on that loop itself, where waiting would never end.
    """
    loop = conversation_loop()
    if asyncio._get_running_loop() is loop:
        work.close()
        raise RuntimeError("run() waits, so it cannot be called on the loop of the conversations: await the work")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # an interrupt of the waiting thread
        raise


async def call(function: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
    """Calls a user's function, sync or async, so that it blocks nothing, and gives what it returns or raises.

    An async function runs on a loop beside that of the conversations, always the same one while nobody blocks it, and
    is cancelled when its time is up. A sync function runs on a daemon thread of its own, which is left behind then.

    Args:
        function: what to call.
        *args: its arguments.
        timeout: seconds it may take; None for no limit.
        **kwargs: its arguments.

    Raises:
        TimeoutError: when the time is up.
        RuntimeError: in place of what is no error, but would end a loop or the run: SystemExit, KeyboardInterrupt,
            StopIteration, and a cancellation that nobody here asked for.
    """
    if is_async(function):
        future = asyncio.run_coroutine_threadsafe(_guarded(function, args, kwargs), _loop("users"))
    else:
        future = _on_a_thread(function, args, kwargs)
    waiting = asyncio.wrap_future(future)
    try:
        done, _ = await asyncio.wait({waiting}, timeout=timeout)
    except asyncio.CancelledError:
        waiting.cancel()
        raise
    if done:
        if waiting.cancelled():
            raise RuntimeError(f"{_name(function)} was cancelled from within")
        return waiting.result()
    waiting.cancel()
    await _replace_if_blocked()
    raise TimeoutError(f"{_name(function)} took longer than {timeout:g} s")


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


async def _guarded(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return await function(*args, **kwargs)
    except (SystemExit, KeyboardInterrupt) as error:
        raise _as_error(function, error) from error


def _as_error(function: Callable[..., Any], raised: BaseException) -> Exception:
    """What a task can raise without a meaning of its own to asyncio."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration | CancelledError):
        return raised
    error = RuntimeError(f"{_name(function)} raised {raised!r}")
    error.__cause__ = raised
    return error


def _on_a_thread(function: Callable[..., T], args: tuple, kwargs: dict[str, Any]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # SystemExit, too: it is the caller's to hear of
            future.set_exception(_as_error(function, error))
        else:
            future.set_result(result)

    thread = Thread(target=work, daemon=True, name=getattr(function, "__name__", "call"))
    _CALLS.add(thread)
    thread.start()
    return future


async def _replace_if_blocked() -> None:
    """Gives up a users' loop that does not turn, with what is on it; the next call starts another."""
    held = _LOOPS.get("users")
    if held is None:
        return
    turned = Event()
    held.loop.call_soon_threadsafe(turned.set)
    for _ in range(20):
        if turned.is_set():
            return
        await asyncio.sleep(_PATIENCE / 20)
    with _LOCK:
        if _LOOPS.get("users") is held:
            del _LOOPS["users"]


@atexit.register
def _stop_threads() -> None:
    """Stop the loops and let calls finish: Python's exit kills threads, and one inside torch aborts the process."""
    loops = [held for held in _LOOPS.values() if held.owner == os.getpid()]
    for held in loops:
        held.stop()
    until = monotonic() + _EXIT_TIMEOUT_S
    for thread in (*(held.thread for held in loops), *list(_CALLS)):
        if thread.is_alive():
            thread.join(max(0.0, until - monotonic()))
