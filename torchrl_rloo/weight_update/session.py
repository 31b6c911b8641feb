"""Session: one engine's part in a push, as steps that run in order until one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from torchrl_rloo.weight_update.peers import Peer, PeerError
from torchrl_rloo.weight_update.target import EngineError, EngineTimeoutError, InFlight, WeightTarget

ABORT_SECONDS = 10.0  # limit for engines to cancel a failed update
GRACE_SECONDS = 1.0  # wait beyond a time-out for the engine's error, which is more specific
_POLL_SECONDS = 0.25  # longest wait without a look at the clock


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

    def __init__(self, peer: Peer, timeout: float, changed: threading.Condition):
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
            always: whether to run the step also after a failure.
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

    def add_pause(self, in_flight: InFlight) -> None:
        """Pause the engine, unless an earlier step did."""
        if self.commit_began:
            return

        def pause(engine: WeightTarget) -> None:
            if engine.start_count != self.start_count:
                raise EngineError("it was restarted during the push")
            self.paused, self.paused_at = True, monotonic()
            engine.pause(in_flight, timeout=self.timeout)

        self.commit_began = monotonic()
        self.add("pausing", pause)

    def add_resume(self) -> None:
        """Resume the engine. After a failure, cancel its update before."""

        def resume(engine: WeightTarget) -> None:
            if self.error is not None:
                with suppress(Exception):  # report the first failure; the next push aborts again
                    engine.update_weights("abort", timeout=min(self.timeout, ABORT_SECONDS))
            if self.paused:
                engine.resume()
                self.paused = False
            self.still_seconds = monotonic() - self.paused_at

        self.add("resuming", resume, always=True)

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
        """True if all steps have ended, or if the engine hangs."""
        return self._abandoned or self.completed == self.added

    @property
    def abandoned(self) -> bool:
        """True if the engine did not answer in time."""
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


def wait_until(sessions: Sequence[Session], predicate: Callable[[], bool], changed: threading.Condition) -> None:
    """Wait until ``predicate`` holds. It must hold once all sessions have ended or failed."""
    with changed:
        while True:
            for session in sessions:
                session.expire()
            if predicate():
                return
            busy = [session.seconds_left() for session in sessions if not session.idle]
            changed.wait(min([_POLL_SECONDS, *(max(0.0, seconds) + 0.001 for seconds in busy)]))


def clean_up(sessions: Sequence[Session], changed: threading.Condition, *, wait: bool) -> None:
    """Cancel the update in engines that failed, and resume those that are still paused."""
    cleaners = []
    for session in sessions:
        session.peer.disconnect()
        # A new session, because a hung engine's calls run on a new thread
        cleaner = Session(session.peer, min(session.timeout, ABORT_SECONDS), changed)
        cleaner.add("aborting the update", lambda e, s=cleaner: e.update_weights("abort", timeout=s.timeout))
        cleaner.add("resuming", lambda e, s=session: e.resume() if s.paused else None, always=True)
        cleaners.append(cleaner)
    if wait:
        wait_until(cleaners, lambda: all(cleaner.idle for cleaner in cleaners), changed)
