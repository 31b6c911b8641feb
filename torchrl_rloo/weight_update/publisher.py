"""Publisher: base of updaters of engines, which stage a version, commit it engine by engine, and keep a snapshot."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Literal

import torch
from torch import nn

from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.peers import Peer, PeerError, Session, wait_until
from torchrl_rloo.weight_update.target import (
    EngineDeadError,
    EngineError,
    EngineTimeoutError,
    InFlight,
    TargetGroup,
    WeightTarget,
    check_in_flight,
)

Commit = Literal["rolling", "barrier"]

ABORT_SECONDS = 10.0  # limit for engines to cancel a failed update
STRAGGLER_SECONDS = 5.0  # a rolling commit goes on to the next engine if one takes longer
_POLL_SECONDS = 0.1  # between looks at a group without members, or at the clock


@dataclass(eq=False)
class Snapshot:
    """One version as it is sent to engines, which a subclass extends.

    Attributes:
        version: policy version of the weights.
        kept: whether the snapshot stays valid while the training model changes.
        tainted: whether an engine failed with this version, so that a late worker may still read its memory.
    """

    version: int
    kept: bool
    tainted: bool


@dataclass(eq=False)
class Publication:
    """Version that is staged and not yet committed everywhere."""

    version: int
    sessions: list[Session]
    began: float
    snapshot: Snapshot | None = None
    failed: list[Session] = field(default_factory=list)


class Publisher(WeightUpdater):
    """Base class of updaters of engines.

    :meth:`publish` stages a version while engines sample. :meth:`commit` pauses each engine only to load it. With a
    :class:`~torchrl_rloo.weight_update.target.TargetGroup`, a push succeeds if at least one member has the version, and
    members that fail are reported to the group. With plain engines one failure is an error.

    Args:
        model: training model.
        engines: one or more engines, or a group. Ranks that do not send need none.
        sends: True if this rank sends.
        sharded: True if the model's ranks push together, so that all fail if one fails.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        commit: ``"rolling"`` loads one engine after the other while the others sample. ``"barrier"`` pauses all engines
            together once all have staged everything.
        timeout: time limit of a step in seconds.

    Raises:
        ValueError: if there are no engines or an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        engines: WeightTarget | Sequence[WeightTarget] | TargetGroup,
        *,
        sends: bool,
        sharded: bool,
        in_flight: InFlight,
        commit: Commit,
        timeout: float,
    ):
        self.group = engines if isinstance(engines, TargetGroup) else None
        if self.group is not None:
            self.engines: list[WeightTarget] = []
        else:
            self.engines = [engines] if isinstance(engines, WeightTarget) else list(engines)
        if sends and self.group is None and not self.engines:
            raise ValueError("engines=[] must have at least one engine on the rank that sends")
        check_in_flight(in_flight)
        if commit not in ("rolling", "barrier"):
            raise ValueError(f"commit={commit!r} must be 'rolling' or 'barrier'")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        self.in_flight, self.commit_policy, self.timeout = in_flight, commit, timeout
        self.sends, self.sharded = sends, sharded
        self._trained = model
        self._initial_counts = _change_counts(model)
        self._lock = threading.RLock()  # orders pushes and fills
        self._peers: dict[int, Peer] = {}
        for engine in self.engines:
            self._peer(engine)
        self._changed = threading.Condition()
        self._open: Publication | None = None
        self._snapshot: Snapshot | None = None  # of the version that engines have
        self._filled = False  # whether any engine has weights of this publisher

    @abstractmethod
    def _take_snapshot(self, version: int, sessions: Sequence[Session], keep: bool) -> Snapshot | None:
        """Gather the weights once, and add the steps that stage them to the sessions. Other ranks only gather."""

    @abstractmethod
    def _stage(self, session: Session, snapshot: Snapshot) -> None:
        """Add the steps that stage a complete snapshot."""

    @abstractmethod
    def _load(self, session: Session, snapshot: Snapshot) -> None:
        """Add the steps that load the snapshot into a paused engine and confirm it."""

    @abstractmethod
    def _release(self, snapshot: Snapshot) -> None:
        """Free a snapshot that no engine needs any more."""

    def _note_push(self, publication: Publication) -> None:  # noqa: B027
        """Record measurements of a successful push."""

    def publish(self) -> int:
        """Stage the current weights under a new version in all engines, which sample on, and return the version.

        A version that was published before and not committed is dropped. Training may go on after the return.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group. The version is spent.
        """
        with self._lock:
            self.version += 1
            self._publish(self.version, keep=True)
            self._finish_staging()
            return self.version

    def commit(self, version: int) -> None:
        """Activate a published version in all engines that have staged it.

        Raises:
            ValueError: if ``version`` is not the one that was published last, or was committed already.
            WeightSyncError: if an engine failed, or all members of a group.
        """
        with self._lock:
            if self._open is None or self._open.version != version:
                have = "none" if self._open is None else self._open.version
                raise ValueError(f"version={version} must be the one that waits for its commit, which is {have}")
            self._commit()

    def push_weights(self) -> int:
        """Publish the current weights, commit them, and return their version.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group. The version is spent. The next push sends
                everything again.
        """
        with self._lock:
            return super().push_weights()

    def _send(self, version: int) -> None:
        self._publish(version, keep=self.group is not None)
        self._commit()

    def initialize(self) -> None:
        """Give all engines the current weights under the current version, if they have none of this publisher.

        All ranks of a sharded model call it together.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group.
        """
        with self._lock:
            if not self._filled:
                self._send(self.version)

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint, whose weights the model has."""
        with self._lock:
            super().resume_from(version)
            self._drop_snapshots()
            self._filled = False
            self._initial_counts = _change_counts(self._trained)
            for peer in self._peers.values():
                peer.filled = None

    def fill(self, engine: WeightTarget) -> None:
        """Give one engine the version that the others have, from the snapshot and without the training model.

        It may be called from any thread while the model trains, and waits for a push in flight. Before the first push
        the snapshot is taken from the model, unless training has changed it since the publisher was made.

        Raises:
            WeightSyncError: if the engine failed, or if there is no snapshot.
        """
        with self._lock:
            peer = self._peer(engine)
            session = Session(peer, self.timeout, self._changed)
            if self._snapshot is None:
                self._snapshot = self._initial_snapshot()
            snapshot = self._snapshot
            if not snapshot.kept:
                raise WeightSyncError(
                    "there is no snapshot to fill from: this transport keeps none for plain engines; push again, or "
                    "use an EnginePool or SharedMemory()"
                )
            has_it = peer.filled == (snapshot.version, engine.start_count) and engine.version == snapshot.version
            if not has_it or engine.failed_version is not None:
                # Stage and load in one go, since no other engine waits
                self._stage(session, snapshot)
                self._add_commit(session, snapshot)
                wait_until([session], lambda: session.idle, self._changed)
                if session.error is not None:
                    snapshot.tainted = True
                    self._clean_up([session], wait=False)
                    raise self._explained(snapshot.version, session.error) from session.error.__cause__
            self._note_filled(session, snapshot)

    def close(self) -> None:
        """Release the snapshot and the connections. The engines stay open, and a push connects again."""
        with self._lock:
            self._drop_snapshots()
            for peer in self._peers.values():
                peer.disconnect()

    def _publish(self, version: int, keep: bool) -> None:
        """Begin to stage a version."""
        self._discard_open()
        began, failure, publication = monotonic(), None, None
        try:
            engines = self._wait_for_targets() if self.sends else []
            sessions = [Session(self._peer(engine), self.timeout, self._changed) for engine in engines]
            publication = self._open = Publication(version, sessions, began)
        except WeightSyncError as error:
            failure = error
        try:
            snapshot = self._take_snapshot(version, publication.sessions if publication else (), keep)
            if publication is not None:
                publication.snapshot = snapshot
            elif snapshot is not None:
                self._release(snapshot)
        except BaseException as error:
            if publication is not None:
                self._cancel(publication, "the push", error)
            if not isinstance(error, Exception):
                raise
            if failure is None:
                failure = self._explained(version, error)
                failure.__cause__ = error.__cause__ if isinstance(error, PeerError) else error
        try:
            self._agree(failure)
        except BaseException:
            self._open = None
            raise

    def _finish_staging(self) -> None:
        """Wait until every engine has staged the open version or has failed."""
        failure = None
        if (publication := self._open) is not None:
            try:
                self._wait(publication, lambda: all(s.idle for s in publication.sessions))
                self._sort_out(publication)
            except WeightSyncError as error:
                failure = error
        self._agree(failure)

    def _commit(self) -> None:
        """Activate the open version and make its snapshot the current one."""
        publication, failure = self._open, None
        if self.sends:
            try:
                if self.commit_policy == "barrier":
                    self._commit_together(publication)
                else:
                    self._commit_in_turn(publication)
            except WeightSyncError as error:
                failure = error
            if failure is None:
                self._replace_snapshot(publication.snapshot)
                self._note_push(publication)
            self._open = None
        self._agree(failure)
        self._current_version = max(self._current_version, self.version if publication is None else publication.version)
        self._filled = True

    def _commit_in_turn(self, publication: Publication) -> None:
        """Commit one engine after the other, first those that have staged everything."""
        if self.group is None:  # no engine activates a version that another one could not stage
            self._wait(publication, lambda: all(s.idle for s in publication.sessions))
            self._sort_out(publication)
        waiting, active = list(publication.sessions), []
        while waiting or active:
            # Begin with the next engine once the previous one has resumed, failed, or takes long
            is_free = all(monotonic() - s.commit_began > STRAGGLER_SECONDS for s in active)
            ready = next((s for s in waiting if s.idle), None)
            if ready is not None and is_free:
                waiting.remove(ready)
                if ready.error is None:
                    self._add_commit(ready, publication.snapshot)
                    active.append(ready)
            else:
                watched = active if ready is not None else [*waiting, *active]
                limit = monotonic() + _POLL_SECONDS
                self._wait(publication, lambda w=watched, t=limit: any(s.idle for s in w) or monotonic() > t)
            for session in [s for s in active if s.idle]:
                active.remove(session)
                if session.error is None:
                    self._note_filled(session, publication.snapshot)
            self._sort_out(publication)

    def _commit_together(self, publication: Publication) -> None:
        """Pause all engines once all have staged everything, load them, and resume them together."""
        nothing_more = lambda session: None  # noqa: E731
        load = lambda session: self._load(session, publication.snapshot)  # noqa: E731
        for add in (nothing_more, self._add_pause, load, self._add_resume):
            for session in publication.sessions:
                add(session)
            self._wait(publication, lambda: all(s.idle for s in publication.sessions))
            self._sort_out(publication)
        for session in publication.sessions:
            self._note_filled(session, publication.snapshot)

    def _add_commit(self, session: Session, snapshot: Snapshot) -> None:
        self._add_pause(session)
        self._load(session, snapshot)
        self._add_resume(session)

    def _add_pause(self, session: Session) -> None:
        if session.commit_began:  # the weights are streamed into a paused engine
            return

        def pause(engine: WeightTarget) -> None:
            if engine.start_count != session.start_count:
                raise EngineError("it was restarted during the push")
            session.paused, session.paused_at = True, monotonic()
            engine.pause(self.in_flight, timeout=self.timeout)

        session.commit_began = monotonic()
        session.add("pausing", pause)

    def _add_resume(self, session: Session) -> None:
        def resume(engine: WeightTarget) -> None:
            if session.error is not None:
                with suppress(Exception):  # report the first failure; the next push aborts again
                    engine.update_weights("abort", timeout=min(self.timeout, ABORT_SECONDS))
            if session.paused:
                engine.resume()
                session.paused = False
            session.still_seconds = monotonic() - session.paused_at

        session.add("resuming", resume, always=True)

    def _wait(self, publication: Publication, predicate: Callable[[], bool]) -> None:
        """Wait for sessions; an interrupt cancels the push."""
        try:
            wait_until(publication.sessions, predicate, self._changed)
        except BaseException as error:
            self._cancel(publication, "the push", error)
            self._open = None
            raise

    def _sort_out(self, publication: Publication) -> None:
        """Report failed members to the group, or cancel the push of plain engines."""
        failed = [s for s in publication.sessions if s.error is not None and s.idle]
        if not failed:
            return
        publication.sessions = [s for s in publication.sessions if s not in failed]
        publication.failed += failed
        publication.snapshot.tainted = True
        if self.group is not None:
            self._clean_up(failed, wait=False)
            for session in failed:
                session.peer.filled = None
                self.group.mark_failed(session.peer.engine, session.error.__cause__)
        if self.group is None or not publication.sessions:
            error = failed[0].error
            self._cancel(publication, error.purpose, error.__cause__)
            raise self._explained(publication.version, error) from error.__cause__

    def _cancel(self, publication: Publication, purpose: str, cause: BaseException) -> None:
        """End all sessions of a failed push, and free its snapshot."""
        for session in publication.sessions:
            session.cancel(purpose, cause)
        self._clean_up([*publication.sessions, *publication.failed], wait=True)
        if publication.snapshot is not None:
            publication.snapshot.tainted = True
            self._release(publication.snapshot)
        self._open = None

    def _clean_up(self, sessions: Sequence[Session], wait: bool) -> None:
        """Cancel the update in engines that failed, and resume those that are still paused."""
        cleaners = []
        for session in sessions:
            session.peer.disconnect()
            # A new session, because a hung engine's calls run on a new thread
            cleaner = Session(session.peer, min(self.timeout, ABORT_SECONDS), self._changed)
            cleaner.add("aborting the update", lambda e, s=cleaner: e.update_weights("abort", timeout=s.timeout))
            cleaner.add("resuming", lambda e, s=session: e.resume() if s.paused else None, always=True)
            cleaners.append(cleaner)
        if wait:
            wait_until(cleaners, lambda: all(c.idle for c in cleaners), self._changed)

    def _discard_open(self) -> None:
        """Drop a version that was published and never committed."""
        if self._open is not None:
            self._cancel(self._open, "a newer push", EngineError("a newer version replaced it"))

    def _wait_for_targets(self) -> list[WeightTarget]:
        """Return the engines to push to. A group without any may be restarting its members."""
        if self.group is None:
            return self.engines
        deadline = monotonic() + self.timeout
        while not (targets := self.group.targets()):
            if monotonic() > deadline:
                raise WeightSyncError(
                    f"no member of the {type(self.group).__name__} could take weights within timeout={self.timeout:g} "
                    "s; see its events for the causes"
                )
            sleep(_POLL_SECONDS)
        return list(targets)

    def _initial_snapshot(self) -> Snapshot:
        """Take the snapshot of weights that were never pushed, if training has not changed them."""
        if self._filled or self.sharded or _change_counts(self._trained) != self._initial_counts:
            raise WeightSyncError(
                f"there is no snapshot of version {self.version}; call initialize() before training, or push again"
            )
        snapshot = self._take_snapshot(self.version, (), keep=True)
        if _change_counts(self._trained) != self._initial_counts:
            self._release(snapshot)
            raise WeightSyncError("training changed the model during its first fill; call initialize() before training")
        return snapshot

    def _replace_snapshot(self, snapshot: Snapshot) -> None:
        if self._snapshot is not None:
            self._release(self._snapshot)
        self._snapshot = snapshot

    def _drop_snapshots(self) -> None:
        self._discard_open()
        if self._snapshot is not None:
            self._snapshot.tainted = True
            self._release(self._snapshot)
            self._snapshot = None

    def _note_filled(self, session: Session, snapshot: Snapshot) -> None:
        engine = session.peer.engine
        session.peer.filled = (snapshot.version, engine.start_count)
        self._current_version = max(self._current_version, snapshot.version)
        if self.group is not None:
            self.group.mark_filled(engine, snapshot.version)

    def _peer(self, engine: WeightTarget) -> Peer:
        return self._peers.setdefault(id(engine), Peer(engine, len(self._peers)))

    def _agree(self, failure: Exception | None) -> None:
        """Raise the failure of the sending rank, on all ranks if they push together."""
        if self.sharded:
            message = [str(failure) if failure else None]
            torch.distributed.broadcast_object_list(message, src=0)
            if message[0] is not None and failure is None:
                failure = WeightSyncError(f"rank 0 could not send: {message[0]}")
        if failure is not None:
            raise failure

    def _explained(self, version: int, error: BaseException) -> WeightSyncError:
        """Return an error with the failed step, the engine, the cause, the current versions and the fix."""
        cause = error.__cause__ if isinstance(error, PeerError) else error
        where = f"{error.peer} failed at {error.purpose}" if isinstance(error, PeerError) else "the trainer failed"
        states = [
            f"{peer.name} has version {peer.engine.version}"
            if peer.engine.failed_version is None
            else f"{peer.name} has parts of version {peer.engine.failed_version} and refuses to sample"
            for peer in self._peers.values()
        ]
        return WeightSyncError(
            f"version {version} of the weights did not arrive: {where}: {type(cause).__name__}: {cause}. "
            f"Now {'; '.join(states)}. {self._remedy(cause)}"
        )

    def _remedy(self, cause: BaseException | None) -> str:
        if isinstance(cause, EngineDeadError):
            return "Call the engine's restart() and push again, or use an EnginePool, which restarts its members"
        if isinstance(cause, EngineTimeoutError):
            return f"Push again; if the engine is alive but slow, raise timeout={self.timeout:g}"
        return "Push again after fixing the cause; the push sends everything"


def _change_counts(model: nn.Module) -> list[int]:
    """Return how often each tensor of the model was changed in place."""
    return [tensor._version for tensor in [*model.parameters(), *model.buffers()]]
