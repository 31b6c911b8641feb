"""Virtual time: an event loop whose clock jumps to the next timer, so that hours of a cluster take seconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from math import ulp
from typing import Any, TypeVar

T = TypeVar("T")


class StuckError(RuntimeError):
    """Error of a simulation in which everything waits and no timer is left."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that never sleeps: its clock starts at 0 s and jumps from timer to timer.

    Code that waits by ``asyncio`` alone runs in it unchanged. Threads and sockets do not.
    """

    def __init__(self):
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise StuckError(f"after {self._now:.1f} simulated s everything waits and no timer is left")
        self._now += seconds
        # A timer is due if it is earlier than the clock plus its resolution, which must not be lost in rounding
        self._clock_resolution = max(1e-9, 2 * ulp(self._now))


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump):
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list:
        """Skip the time-out instead of waiting for it."""
        self._jump(timeout)
        return []


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, and return its result.

    Raises:
        StuckError: if everything waits and no timer is left.

    Example:
        >>> async def year() -> float:
        ...     await asyncio.sleep(365 * 24 * 3600)
        ...     return asyncio.get_running_loop().time()
        >>> run_virtual(year())
        31536000.0
    """
    loop = VirtualLoop()
    try:
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        finally:
            _cancel_all(loop)
    finally:
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what the coroutine left behind, and wait for its end."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class Server:
    """Serial resource, such as the CPU of an event loop: pieces of work run one after the other.

    Attributes:
        busy_seconds: sum of all requested work.
    """

    def __init__(self):
        self.busy_seconds, self._free_at = 0.0, 0.0

    async def work(self, seconds: float) -> None:
        """Wait for all earlier work, then for this."""
        if seconds <= 0:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + seconds
        self.busy_seconds += seconds
        await asyncio.sleep(self._free_at - now)
