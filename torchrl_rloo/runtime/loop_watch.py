"""LoopWatch: which call blocks an event loop, and the time that the other calls lose by it.

A blocked loop runs nothing, so all its calls seem to take long. The watch finds the one that is to blame: the clocks of
the others stand still while they cannot run.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine
from contextvars import ContextVar
from threading import Event, Lock, Thread
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from torchrl_rloo.runtime.threads import PackageThread

_LOGGER = logging.getLogger(__name__)
_TICK_S = 0.1  # time between two questions to a loop that answers
_GRACE_S = 0.2  # time after an answer in which a loop counts as free
_WARN_TICKS = 9  # looks in a row that find the same task running


class WatchedCall:
    """Call of an async function on a watched loop, with a clock that other calls cannot make run out.

    Args:
        watch: watch of the loop.
        name: name for messages.

    Attributes:
        blocked: seconds in which this call itself blocked the loop.
    """

    def __init__(self, watch: LoopWatch, name: str):
        self.watch, self.name, self.blocked = watch, name, 0.0
        self._began: tuple[float, float] | None = None

    def begin(self) -> None:
        """Start the clock, and make the current task, and all that it starts, part of this call."""
        self._began = monotonic(), self.watch.lost()
        _CALL.set(self)
        self.watch.calls[asyncio.current_task()] = self

    def elapsed(self) -> float:
        """Return the seconds since the begin, without those in which other calls blocked the loop."""
        if self._began is None:
            return 0.0
        began, lost = self._began
        return monotonic() - began - max(0.0, self.watch.lost() - lost - self.blocked)


_CALL: ContextVar[WatchedCall | None] = ContextVar("call", default=None)


class LoopWatch:
    """Watch of an event loop, on a thread that asks ten times a second whether the loop answers.

    It logs a warning, once for each name, that tells which call blocks the loop, and where.

    Args:
        loop: event loop.
        thread: its thread.
        stopped: event that ends the watch.

    Attributes:
        calls: call of each task.
        blocker: call that blocks the loop now; None if there is none, or it is unknown.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: Thread, stopped: Event):
        self._loop, self._thread, self._stopped = loop, thread, stopped
        self.calls: WeakKeyDictionary[asyncio.Task, WatchedCall] = WeakKeyDictionary()
        self.blocker: WatchedCall | None = None
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
