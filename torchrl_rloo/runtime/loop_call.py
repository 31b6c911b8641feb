"""LoopCall: a coroutine on an event loop that a thread may wait for, and be interrupted at any instant."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from torchrl_rloo.runtime.event_loop import EventLoop

T = TypeVar("T")

_ALIVE_POLL_S = 1.0


class LoopCall(Generic[T]):
    """Coroutine that runs on an event loop to its end or to :meth:`cancel`.

    A ``concurrent.futures.Future`` has a lock in Python, which a ``KeyboardInterrupt`` can leave locked. The loop would
    then block on it for ever. This class hands its result over in a ``SimpleQueue``, which interrupts cannot break.

    Args:
        loop: the event loop.
        work: the coroutine.

    Raises:
        RuntimeError: if called on that loop, where waiting would deadlock, or if the loop is closed.
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
        """Wait for the result.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            queue.Empty: if there is no result in time.
            RuntimeError: if the loop was closed before the end.
            BaseException: raised by the coroutine.
        """
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
