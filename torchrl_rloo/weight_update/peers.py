"""Calls of engines on threads, and Session, one engine's part in a push."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from threading import Condition
from time import monotonic
from typing import Any

import torch

from torchrl_rloo._threads import PackageThread
from torchrl_rloo.weight_update.target import EngineTimeoutError, WeightTarget
from torchrl_rloo.weight_update.transport import Link

GRACE_SECONDS = 1.0  # wait beyond a time-out for the engine's error, which is more specific
_POLL_SECONDS = 0.25  # longest wait without a look at the clock


class PeerError(Exception):
    """Failed call of an engine, with the engine's error as its cause.

    Attributes:
        peer: name of the engine.
        purpose: purpose of the call.
    """

    def __init__(self, peer: str, purpose: str):
        super().__init__(f"{purpose} failed in {peer}")
        self.peer, self.purpose = peer, purpose


class Peer:
    """Engine whose calls run one after the other on a daemon thread.

    Args:
        engine: engine to call.
        number: index of the engine in its publisher.

    Attributes:
        link: connection of the transport, or None.
        connected_to: manifest and start count that the connection is for.
        filled: version that the publisher gave the engine, with the start count of that time; None before the first.
    """

    def __init__(self, engine: WeightTarget, number: int):
        self.engine = engine
        self.name = f"engine {number} ({type(engine).__name__})"
        self.link: Link | None = None
        self.connected_to: tuple | None = None
        self.filled: tuple[int, int] | None = None
        self._calls: SimpleQueue | None = None

    def call(self, function: Callable[[WeightTarget], Any]) -> None:
        """Call ``function``, which must not raise, with the engine after its earlier calls."""
        if self._calls is None:
            self._calls = SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._end = weakref.finalize(self, self._calls.put, None)
            PackageThread(_serve, self._calls, device, name="engine calls", stop=self._end).start()
        self._calls.put((function, self.engine))

    def abandon_calls(self) -> None:
        """Start the next call on a new thread, because earlier ones may still hang."""
        if self._calls is not None:
            self._end()
            self._calls = None

    def disconnect(self) -> None:
        """Close the connection. The next push connects again."""
        if self.link is not None:
            self.link.close()
        self.link = self.connected_to = None


def _serve(calls: SimpleQueue, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own, and an engine may use the caller's
    while (call := calls.get()) is not None:
        function, engine = call
        function(engine)
        del call, function, engine  # otherwise they live until the next call


class Session:
    """One engine's part in a push: steps that run in order on the peer's thread until one fails.

    Args:
        peer: engine to call.
        timeout: seconds that one step may take. The engine has the same limit.
        changed: condition that is notified after each step, common to all sessions of a push.

    Attributes:
        error: error of the failed step; None if there is none.
        completed: number of completed steps.
        is_open: True once the steps include the start of an update.
        paused: True from the begin of a pause until the engine resumed.
        commit_began: time at which the commit was added; 0 before.
        paused_at: time at which the pause began; 0 before.
        still_seconds: time from the begin of the pause until the engine resumed.
    """

    def __init__(self, peer: Peer, timeout: float, changed: Condition):
        self.peer, self.timeout, self.changed = peer, timeout, changed
        self.start_count = peer.engine.start_count
        self.error: PeerError | None = None
        self.completed, self.added = 0, 0
        self.paused = self.is_open = False
        self.commit_began = self.paused_at = self.still_seconds = 0.0
        self._since = 0.0  # time at which the pending step could begin
        self._purpose = ""
        self._abandoned = False

    def add(self, purpose: str, call: Callable[[WeightTarget], Any], *, always: bool = False) -> int:
        """Run a step after the earlier ones, and return their number together.

        Args:
            purpose: purpose of the step, for errors.
            call: function of the engine.
            always: whether to run the step after a failure too.
        """
        with self.changed:
            if self.completed == self.added:
                self._since, self._purpose = monotonic(), purpose
            self.added += 1
            if not self._abandoned:
                self.peer.call(lambda engine: self._run(purpose, call, always, engine))
            return self.added

    def _run(self, purpose: str, call: Callable[[WeightTarget], Any], always: bool, engine: WeightTarget) -> None:
        with self.changed:
            skip = self._abandoned or (self.error is not None and not always)
            if not skip:
                self._since, self._purpose = monotonic(), purpose
        failure = None
        try:
            if not skip:
                call(engine)
        except BaseException as error:  # reported to the publisher's thread
            failure = error
        with self.changed:
            if not self._abandoned:
                self.completed += 1
                self._since = monotonic()
                if failure is not None:
                    self._fail(purpose, failure)
            self.changed.notify_all()

    def _fail(self, purpose: str, cause: BaseException) -> None:
        if self.error is None:  # otherwise report the first failure
            self.error = PeerError(self.peer.name, purpose)
            self.error.__cause__ = cause

    def cancel(self, purpose: str, cause: BaseException) -> None:
        """Skip the steps that have not begun."""
        with self.changed:
            self._fail(purpose, cause)

    @property
    def idle(self) -> bool:
        """Whether all steps have ended, or the engine hangs."""
        return self._abandoned or self.completed == self.added

    @property
    def abandoned(self) -> bool:
        """Whether the engine did not answer in time."""
        return self._abandoned

    def expire(self) -> None:
        """Fail the session if its step takes too long. Later calls of the engine run on a new thread."""
        if not self.idle and self.seconds_left() <= 0:
            self._fail(self._purpose, EngineTimeoutError(f"no answer within timeout={self.timeout:g} s"))
            self._abandoned = True
            self.peer.abandon_calls()

    def seconds_left(self) -> float:
        """Return the seconds until :meth:`expire` fails the session."""
        return self._since + self.timeout + GRACE_SECONDS - monotonic()


def wait_until(sessions: Iterable[Session], predicate: Callable[[], bool], changed: Condition) -> None:
    """Wait until ``predicate`` holds, which sessions that take too long must not prevent once they have failed."""
    sessions = list(sessions)
    with changed:
        while True:
            for session in sessions:
                session.expire()
            if predicate():
                return
            busy = [session.seconds_left() for session in sessions if not session.idle]
            changed.wait(min([_POLL_SECONDS, *(max(0.0, seconds) + 0.001 for seconds in busy)]))
