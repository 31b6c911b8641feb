"""Publication: one version on its way to engines, from staging to the last resume."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic

from torchrl_rloo.weight_update.base import WeightSyncError
from torchrl_rloo.weight_update.peers import Peer, PeerError
from torchrl_rloo.weight_update.session import Session, clean_up, wait_until
from torchrl_rloo.weight_update.target import EngineDeadError, EngineTimeoutError, InFlight, TargetGroup

STRAGGLER_SECONDS = 5.0  # a rolling commit takes the next engine if one takes longer


@dataclass(eq=False)
class Snapshot:
    """One version as it is sent to engines, which publishers extend.

    Attributes:
        version: policy version of the weights.
        kept: whether the snapshot stays valid while the training model changes.
        tainted: whether an engine failed with this version, so that a late worker may still read its memory.
    """

    version: int
    kept: bool
    tainted: bool


class Publication:
    """One version on its way to engines.

    Args:
        version: policy version of the weights.
        sessions: one session per engine.
        changed: condition of the sessions.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        load: function that adds the steps that load the snapshot into a paused engine.
        on_filled: function called when an engine has the version and has resumed.
        on_failed: function called with each session that fails. None ends the whole push at the first failure.

    Attributes:
        snapshot: snapshot of the version; None until it is complete.
        began: time at which the push began.
        failed: sessions of engines that failed.
    """

    def __init__(
        self,
        version: int,
        sessions: Sequence[Session],
        changed: threading.Condition,
        *,
        in_flight: InFlight,
        load: Callable[[Session, Snapshot], None],
        on_filled: Callable[[Session, Snapshot], None],
        on_failed: Callable[[Session], None] | None,
    ):
        self.version, self.sessions, self.in_flight = version, list(sessions), in_flight
        self.snapshot: Snapshot | None = None
        self.began = monotonic()
        self.failed: list[Session] = []
        self._changed, self._load, self._on_filled, self._on_failed = changed, load, on_filled, on_failed

    def versions(self) -> set[int]:
        """Return the versions that the engines have."""
        return {session.peer.engine.version for session in [*self.sessions, *self.failed]}

    def settle(self) -> None:
        """Wait until every engine has completed its steps or failed.

        Raises:
            PeerError: at a failure that ends the push.
        """
        self._wait(lambda: all(session.idle for session in self.sessions))
        self._drop_failed()

    def commit_in_turn(self) -> None:
        """Load one engine after the other, first those that have staged everything.

        Raises:
            PeerError: at a failure that ends the push.
        """
        if self._on_failed is None:  # no engine activates a version that another one could not stage
            self.settle()
        waiting, active = list(self.sessions), []
        while waiting or active:
            # Begin with the next engine once the previous one has resumed, failed, or takes long
            is_free = all(monotonic() - session.commit_began > STRAGGLER_SECONDS for session in active)
            ready = next((session for session in waiting if session.idle), None)
            if ready is not None and is_free:
                waiting.remove(ready)
                if ready.error is None:
                    self.add_commit(ready)
                    active.append(ready)
            else:
                self._wait_for_any(active if ready is not None else [*waiting, *active])
            for session in [session for session in active if session.idle]:
                active.remove(session)
                if session.error is None:
                    self._on_filled(session, self.snapshot)
            self._drop_failed()

    def commit_together(self) -> None:
        """Pause all engines once all have staged everything, load them, and resume them together.

        Raises:
            PeerError: at a failure that ends the push.
        """
        self.settle()
        for add in (self._add_pause, self._add_load, Session.add_resume):
            for session in self.sessions:
                add(session)
            self.settle()
        for session in self.sessions:
            self._on_filled(session, self.snapshot)

    def add_commit(self, session: Session) -> None:
        """Add the steps that pause one engine, load the snapshot, and resume it."""
        self._add_pause(session)
        self._add_load(session)
        session.add_resume()

    def cancel(self, purpose: str, cause: BaseException) -> None:
        """Skip all further steps, and leave no engine paused or in the update."""
        for session in self.sessions:
            session.cancel(purpose, cause)
        clean_up([*self.sessions, *self.failed], self._changed, wait=True)
        if self.snapshot is not None:
            self.snapshot.tainted = True

    def _add_pause(self, session: Session) -> None:
        session.add_pause(self.in_flight)

    def _add_load(self, session: Session) -> None:
        self._load(session, self.snapshot)

    def _wait_for_any(self, sessions: Sequence[Session]) -> None:
        """Wait until one of the sessions has ended, or for a moment."""
        limit = monotonic() + 0.1
        self._wait(lambda: any(session.idle for session in sessions) or monotonic() > limit)

    def _wait(self, predicate: Callable[[], bool]) -> None:
        wait_until(self.sessions, predicate, self._changed)

    def _drop_failed(self) -> None:
        """Report engines that failed, and raise the error if it ends the push."""
        failed = [session for session in self.sessions if session.error is not None and session.idle]
        if not failed:
            return
        self.sessions = [session for session in self.sessions if session not in failed]
        self.failed += failed
        self.snapshot.tainted = True
        if self._on_failed is not None:
            clean_up(failed, self._changed, wait=False)
            for session in failed:
                self._on_failed(session)
        if self._on_failed is None or not self.sessions:
            raise failed[0].error


def explain(
    version: int, error: BaseException, peers: Sequence[Peer], group: TargetGroup | None, timeout: float
) -> WeightSyncError:
    """Return an error with the failed step, the engine, the cause, the current versions and the fix.

    Args:
        version: version that did not arrive.
        error: error of a session, or of the trainer.
        peers: all engines.
        group: group of the engines, or None.
        timeout: time limit of a step in seconds.
    """
    cause = error.__cause__ if isinstance(error, PeerError) else error
    where = f"{error.peer} failed at {error.purpose}" if isinstance(error, PeerError) else "the trainer failed"
    states = [
        f"{peer.name} has version {peer.engine.version}"
        if peer.engine.failed_version is None
        else f"{peer.name} has parts of version {peer.engine.failed_version} and refuses to sample"
        for peer in peers
    ]
    if group is not None:
        remedy = f"The {type(group).__name__} restarts or refills its members; the next push sends everything"
    elif isinstance(cause, EngineDeadError):
        remedy = "Call the engine's restart() and push again, or use an EnginePool, which restarts its members"
    elif isinstance(cause, EngineTimeoutError):
        remedy = f"Push again; if the engine is alive but slow, raise timeout={timeout:g}"
    else:
        remedy = "Push again after fixing the cause; the push sends everything"
    return WeightSyncError(
        f"version {version} of the weights did not arrive: {where}: {type(cause).__name__}: {cause}. "
        f"Now {'; '.join(states)}. {remedy}"
    )
