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
from threading import Event, Thread
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from torchrl_rloo._threads import PackageThread

_LOGGER = logging.getLogger(__name__)
_TICK_S = 0.1  # time in which a loop that is not blocked answers
_WARN_TICKS = 10  # ticks in a row that find the same task running


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
        self._lost: tuple[float, float | None] = (0.0, None)  # seconds until a time; None if the loop answers
        self._answered, self._answered_at = Event(), 0.0
        self._answered.set()
        self._task, self._since, self._ticks = None, 0.0, 0  # running task of a blocked loop
        self._warned: set[str] = set()
        loop.set_task_factory(self._make_task)
        PackageThread(self._run, name="torchrl_rloo loop watch", stop=stopped.set).start()

    def lost(self) -> float:
        """Return the seconds in which the loop has been blocked."""
        lost, until = self._lost
        return lost if until is None else lost + monotonic() - until

    def blocked_for(self) -> float:
        """Return for how many seconds the same task, or unknown code, has blocked the loop; 0 if it answers."""
        return 0.0 if self._lost[1] is None else monotonic() - self._since

    def _make_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine, **kwargs: Any) -> asyncio.Task:
        task = asyncio.Task(work, loop=loop, **kwargs)
        if (call := _CALL.get()) is not None:
            self.calls[task] = call
        return task

    def _answer(self) -> None:
        self._answered_at = monotonic()
        self._answered.set()

    def _run(self) -> None:
        asked_at = 0.0
        while not self._stopped.wait(_TICK_S):
            if not self._answered.is_set():
                self._count(monotonic(), asked_at)
                continue
            if self._lost[1] is not None:
                self._count(self._answered_at, asked_at)
                self._lost, self.blocker, self._task, self._ticks = (self._lost[0], None), None, None, 0
            self._answered.clear()
            asked_at = monotonic()
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                return

    def _count(self, now: float, asked_at: float) -> None:
        """Count the time until now as lost, at the expense of the call whose task runs."""
        lost, until = self._lost
        start = asked_at if until is None else until
        if not self._answered.is_set():
            task = asyncio.current_task(self._loop)
            if until is None or task is not self._task:
                self._task, self._since, self._ticks = task, start, 0
            self.blocker = None if task is None else self.calls.get(task)
            self._ticks += 1
        if self.blocker is not None:
            self.blocker.blocked += now - start
        self._lost = lost + now - start, now
        if self._ticks == _WARN_TICKS and self.blocker is not None:
            self._warn(self.blocker.name)

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
