"""Publisher: base of updaters of engines, which stage a version, commit it engine by engine, and keep a snapshot."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

from torch import nn

from torchrl_rloo.runtime.ranks import RankError
from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.joint import JointCalls
from torchrl_rloo.weight_update.peers import Peer, PeerError
from torchrl_rloo.weight_update.publication import Publication, Snapshot, explain
from torchrl_rloo.weight_update.rotary import check_engine_frequencies
from torchrl_rloo.weight_update.session import Session, clean_up, wait_until
from torchrl_rloo.weight_update.shards import sharing_ranks
from torchrl_rloo.weight_update.target import (
    EngineError,
    InFlight,
    TargetGroup,
    WeightTarget,
    check_in_flight,
)

Commit = Literal["rolling", "barrier"]
T = TypeVar("T")

_POLL_SECONDS = 0.1  # between looks at a group without members


class Publisher(WeightUpdater):
    """Base class of updaters of engines.

    :meth:`publish` stages a version while engines sample. :meth:`commit` pauses each engine only to load it. With a
    :class:`~torchrl_rloo.weight_update.target.TargetGroup`, a push succeeds if at least one member has the version, and
    members that fail are reported to the group. With plain engines one failure is an error.

    Args:
        model: training model.
        engines: one or more engines, or a group. Ranks that do not send need none.
        sends: True if this rank sends.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        commit: ``"rolling"`` loads one engine after the other while the others sample. ``"barrier"`` pauses all engines
            together once all have staged everything.
        timeout: time limit of a step in seconds.

    Raises:
        ValueError: if there are no engines, an argument is out of range, or an engine has other rotary frequencies.
    """

    def __init__(
        self,
        model: nn.Module,
        engines: WeightTarget | Sequence[WeightTarget] | TargetGroup,
        *,
        sends: bool,
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
        self.sends, self.joint = sends, JointCalls(sharing_ranks(model))
        self._trained = model
        self._initial_counts = _change_counts(model)
        self._lock = threading.RLock()  # orders pushes and fills
        self._peers: dict[int, Peer] = {}
        self._numbers = count()  # of peers
        for engine in self.engines:
            self._peer(engine)
        self._changed = threading.Condition()
        self._open: Publication | None = None
        self._snapshot: Snapshot | None = None  # of the version that engines have
        self._filled = False  # whether any engine has weights of this publisher
        self._attempted: object = None  # change counts of the weights that an earlier initialize sent

    @abstractmethod
    def _take_snapshot(self, version: int, sessions: Sequence[Session], keep: bool) -> Snapshot:
        """Order all ranks to gather the weights once, and add the steps that stage them to the sessions."""

    @abstractmethod
    def _help(self, order: Any) -> None:
        """Gather with rank 0, as it ordered."""

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
        """Send the current weights under a new version to all engines, which stage them and sample on.

        A version that was published before and not committed is dropped. Training may continue after the return.

        Returns:
            The version, which waits for :meth:`commit`.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group. The version is spent.
        """

        def publish() -> int:
            self.version += 1
            self._publish(self.version, keep=True)
            with self._cancelling():
                self._open.settle()
            return self.version

        return self._together(publish)

    def commit(self, version: int) -> None:
        """Activate a published version in all engines that have staged it.

        Raises:
            ValueError: if ``version`` is not the one that was published last, or was committed already.
            WeightSyncError: if an engine failed, or all members of a group.
        """

        def commit() -> None:
            if self._open is None or self._open.version != version:
                have = "none" if self._open is None else self._open.version
                raise ValueError(f"version={version} must be the one that waits for its commit, which is {have}")
            self._commit()

        self._together(commit)

    def push_weights(self) -> int:
        """Publish the current weights, commit them, and return their version.

        If all members of a group fail, nothing could sample with the old weights either. The push then waits for the
        first member that is restarted, once.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group. The version is spent. The next push sends
                everything again.
        """
        return self._together(self._push)

    def _push(self) -> int:
        had_members = self.group is not None and bool(self.group.targets())
        try:
            return super().push_weights()
        except WeightSyncError as error:
            if not had_members or self.group.targets():
                raise
            failure = error
        try:
            return super().push_weights()
        except WeightSyncError:
            raise failure from failure.__cause__

    def _send(self, version: int) -> None:
        self._publish(version, keep=self.group is not None)
        self._commit()

    def initialize(self) -> None:
        """Give all engines the current weights under the current version, if they have none of this publisher.

        If an earlier call failed and the model was trained since, they get a new version: some engine may have the
        other weights. All ranks of a sharded model call it before rank 0 collects.

        Raises:
            WeightSyncError: if an engine failed, or all members of a group.
        """
        self._together(self._initialize)

    def _initialize(self) -> None:
        if self._filled:
            return
        counts = _change_counts(self._trained)
        if self._attempted is not None and self._attempted != counts:
            self._push()
            return
        self._attempted = counts
        self._send(self.version)

    @property
    def filled(self) -> bool:
        """True if engines have weights of this publisher."""
        return self._filled

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint, whose weights the model has."""
        with self._lock:
            super().resume_from(version)
            self._drop_snapshots()
            self._filled, self._attempted = False, None
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
                self._fill(peer, snapshot)
            self._note_filled(peer, snapshot)

    def close(self) -> None:
        """Release the snapshot and the connections. The engines stay open, and a push connects again."""
        with self._lock:
            self._drop_snapshots()
            for peer in self._peers.values():
                peer.disconnect()

    def _together(self, call: Callable[[], T]) -> T | int:
        """Make a call on rank 0, and gather for it on the other ranks of a sharded model."""
        with self._lock:
            if self.sends:
                return self.joint.lead(call, lambda: (self.version, self._current_version, self._filled))
            if self.joint.ranks.size > 1:
                state, failure = self.joint.follow(self._help)
                self.version, self._current_version, self._filled = state
                if failure is not None:
                    raise WeightSyncError(f"rank 0 could not send: {failure}")
            return self.version

    def _publish(self, version: int, keep: bool) -> None:
        """Begin to stage a version."""
        self._discard_open()
        self._drop_closed()
        peers = [self._peer(engine) for engine in self._wait_for_targets()]
        publication = self._open = self._make_publication(version, peers)
        with self._cancelling():
            publication.snapshot = self._take_snapshot(version, publication.sessions, keep)

    def _commit(self) -> None:
        """Activate the open version and make its snapshot the current one."""
        publication = self._open
        with self._cancelling():
            if self.commit_policy == "barrier":
                publication.commit_together()
            else:
                publication.commit_in_turn()
        self._open = None
        self._release_current()
        self._snapshot = publication.snapshot
        self._note_push(publication)
        self._current_version, self._filled = publication.version, True

    def _fill(self, peer: Peer, snapshot: Snapshot) -> None:
        """Send a snapshot to one engine and load it."""
        publication = self._make_publication(snapshot.version, [peer])
        publication.snapshot = snapshot
        (session,) = publication.sessions
        self._stage(session, snapshot)
        publication.add_commit(session)
        wait_until([session], lambda: session.idle, self._changed)
        if session.error is not None:
            snapshot.tainted = True
            clean_up([session], self._changed, wait=False)
            raise self._explained(snapshot.version, session.error) from session.error.__cause__

    def _make_publication(self, version: int, peers: Sequence[Peer]) -> Publication:
        return Publication(
            version,
            [Session(peer, self.timeout, self._changed) for peer in peers],
            self._changed,
            in_flight=self.in_flight,
            load=self._load,
            on_filled=lambda session, snapshot: self._note_filled(session.peer, snapshot),
            on_failed=None if self.group is None else self._note_failed,
        )

    @contextmanager
    def _cancelling(self) -> Iterator[None]:
        """Cancel the open publication at an error, and explain it in a WeightSyncError."""
        publication = self._open
        try:
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, PeerError) else error
            publication.cancel(error.purpose if isinstance(error, PeerError) else "the push", cause)
            # Some engines may have loaded the version and sample with it from now on
            if publication.version in publication.versions():
                self._current_version = publication.version
            if publication.snapshot is not None:
                self._release(publication.snapshot)
            self._open = None
            if isinstance(error, (WeightSyncError, RankError)) or not isinstance(error, Exception):
                raise
            raise self._explained(publication.version, error) from cause

    def _discard_open(self) -> None:
        """Drop a version that was published and never committed."""
        if self._open is not None:
            self._open.cancel("waiting for the commit", EngineError("a newer version replaced it"))
            if self._open.snapshot is not None:
                self._release(self._open.snapshot)
            self._open = None

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
        if self._filled or self.joint.ranks.size > 1 or _change_counts(self._trained) != self._initial_counts:
            raise WeightSyncError(
                f"there is no snapshot of version {self.version}; call initialize() before training, or push again"
            )
        snapshot = self._take_snapshot(self.version, (), keep=True)
        if _change_counts(self._trained) != self._initial_counts:
            self._release(snapshot)
            raise WeightSyncError("training changed the model during its first fill; call initialize() before training")
        return snapshot

    def _release_current(self) -> None:
        """Free the snapshot of the version that engines had until now."""
        if self._snapshot is not None:
            self._release(self._snapshot)
            self._snapshot = None

    def _drop_snapshots(self) -> None:
        self._discard_open()
        if self._snapshot is not None:
            self._snapshot.tainted = True
            self._release_current()

    def _note_filled(self, peer: Peer, snapshot: Snapshot) -> None:
        peer.filled = (snapshot.version, peer.engine.start_count)
        self._current_version = max(self._current_version, snapshot.version)
        if self.group is not None:
            self.group.mark_filled(peer.engine, snapshot.version)

    def _note_failed(self, session: Session) -> None:
        session.peer.filled = None
        self.group.mark_failed(session.peer.engine, session.error.__cause__)

    def _peer(self, engine: WeightTarget) -> Peer:
        if id(engine) not in self._peers:
            check_engine_frequencies(self._trained, engine.context_length)
            self._peers[id(engine)] = Peer(engine, next(self._numbers))
        return self._peers[id(engine)]

    def _drop_closed(self) -> None:
        """Forget members that left the group."""
        for key, peer in list(self._peers.items()):
            if self.group is not None and getattr(peer.engine, "closed", False):
                self._peers.pop(key).disconnect()

    def _explained(self, version: int, error: BaseException) -> WeightSyncError:
        return explain(version, error, list(self._peers.values()), self.group, self.timeout)


def _change_counts(model: nn.Module) -> list[int]:
    """Return how often each tensor of the model was changed in place."""
    return [tensor._version for tensor in [*model.parameters(), *model.buffers()]]
