"""WeightUpdater, and Publisher: it stages a version in engines, commits it, and fills new engines from a snapshot."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from time import monotonic, sleep
from typing import Any

from torch import nn

from torchrl_rloo.runtime.ranks import RankError
from torchrl_rloo.weight_update.delivery import Deliveries, Delivery, Peer, Snapshot, StepError
from torchrl_rloo.weight_update.protocol import (
    EngineDeadError,
    EngineTimeoutError,
    InFlight,
    TargetGroup,
    WeightTarget,
    check_in_flight,
)
from torchrl_rloo.weight_update.rotary import check_engine_frequencies
from torchrl_rloo.weight_update.shards import sharing_ranks
from torchrl_rloo.weight_update.source import GatherError

_POLL_SECONDS = 0.1  # between looks at a group without members


class WeightSyncError(RuntimeError):
    """Failed push. The message names the engine, the tensors, the version, the cause and the fix."""


class WeightUpdater(ABC):
    """Base class of senders of the training model's weights to a sampler.

    A version names one set of weights. It is spent when a push begins and never used again, also if the push fails.
    TorchRL's ``WeightSyncScheme`` has no version, and its ``send()`` waits for ever on a receiver that failed.

    If ranks train one model, each makes an updater. Rank 0 has the samplers; its calls :meth:`push_weights` and
    :meth:`initialize` need the same call on the other ranks if the model is sharded.

    Attributes:
        version: last version spent. 0 names the initial weights.
        training_model: model whose weights are sent; None if unknown.
    """

    version: int = 0
    training_model: nn.Module | None = None
    _current_version: int = 0

    @property
    def current_version(self) -> int:
        """Highest version that a sampler has."""
        return self._current_version

    def push_weights(self) -> int:
        """Send the current weights under a new version, and return it once a sampler has them.

        Raises:
            RuntimeError: if the weights did not arrive. The version is spent. Samplers keep their old weights or refuse
                to sample.
        """
        self.version += 1
        self._send(self.version)
        self._current_version = self.version
        return self.version

    def join(self) -> int:
        """Take part in a push of rank 0 on another rank, and return the version that samplers then have.

        A failed push raises on rank 0 alone, which may go on with the old weights.
        """
        with suppress(WeightSyncError):
            self.push_weights()
        return self.current_version

    @property
    def filled(self) -> bool:
        """True if :meth:`initialize` would send nothing."""
        return False

    @property
    def shares_weights(self) -> bool:
        """True if the samplers use the tensors of the training model."""
        return False

    @abstractmethod
    def _send(self, version: int) -> None:
        """Send the current weights as ``version`` and return once a sampler has them."""

    def initialize(self) -> None:  # noqa: B027
        """Give samplers that were never filled the current weights under the current version.

        Call it before training. A sampler in this process needs nothing, since a checkpoint has its weights.

        Raises:
            RuntimeError: if the weights did not arrive.
        """

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint, whose weights the model has, unless more versions are spent already.

        Samplers count as unfilled until :meth:`initialize` or the next push.

        Raises:
            ValueError: if ``version`` is negative.
        """
        if version < 0:
            raise ValueError(f"version={version} must be at least 0")
        self.version = self._current_version = max(version, self.version)  # spent versions stay spent


def _joint(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method a call of all ranks of a sharded model: rank 0 runs it, and the others gather as it orders."""

    @wraps(method)
    def call(self: Publisher, *args: Any) -> Any:
        with self._lock:
            if self._leads:  # within another joint call
                return method(self, *args)
            return self._lead(method, *args) if self.sends else self._follow()

    return call


class Publisher(WeightUpdater):
    """Base class of updaters of engines, which has all state of versions: spent, current, and its snapshot.

    A push stages a version while engines sample, then pauses each engine only to load it. With a ``TargetGroup``, it
    succeeds if at least one member has the version, and members that fail are reported to the group. With plain engines
    one failure is an error.

    A subclass says what a snapshot is, and which steps stage and load it. Only ranks that send need engines.
    """

    def __init__(
        self,
        model: nn.Module,
        engines: WeightTarget | Sequence[WeightTarget] | TargetGroup,
        *,
        sends: bool,
        in_flight: InFlight,
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
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        self.in_flight, self.timeout = in_flight, timeout
        self.sends, self.ranks = sends, sharing_ranks(model)
        self.training_model = model
        self._initial_counts = _change_counts(model)
        self._lock = threading.RLock()  # orders pushes and fills
        self._leads = False  # True during a joint call of rank 0
        self._peers: dict[int, Peer] = {}  # by the id of the engine
        self._numbers = count()  # of peers
        for engine in self.engines:
            self._peer(engine)
        self._changed = threading.Condition()
        self._open: Deliveries | None = None  # of the push in progress
        self._snapshot: Snapshot | None = None  # of the version that engines have
        self._filled = False  # whether any engine has weights of this publisher
        self._attempted: object = None  # change counts of the weights that an earlier initialize sent

    @abstractmethod
    def _new_snapshot(self, version: int, keep: bool) -> Snapshot:
        """Return an empty snapshot, which stays valid while the model changes if ``keep``."""

    @abstractmethod
    def _gather(self, snapshot: Any, deliveries: Deliveries) -> None:
        """Order all ranks to gather the weights once into the snapshot, and add the steps that stage them."""

    @abstractmethod
    def _help(self, order: Any) -> None:
        """Gather with rank 0, as it ordered."""

    @abstractmethod
    def _add_staging(self, delivery: Delivery, snapshot: Any) -> None:
        """Add the steps that stage a complete snapshot."""

    @abstractmethod
    def _add_load(self, delivery: Delivery, snapshot: Any) -> None:
        """Add the steps that load the snapshot into a paused engine and confirm it."""

    @abstractmethod
    def _release(self, snapshot: Any) -> None:
        """Free a snapshot that no engine needs any more."""

    def _note_push(self, deliveries: Deliveries) -> None:  # noqa: B027
        """Record measurements of a successful push."""

    @_joint
    def push_weights(self) -> int:
        """Send the current weights under a new version, and return it once a member or all engines have them.

        If all members of a group fail, nothing could sample with the old weights either. The push then waits for the
        first member that is restarted, once.
        """
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

    @_joint
    def initialize(self) -> None:
        """Give all engines the current weights under the current version, if they have none of this publisher.

        If an earlier call failed and the model was trained since, they get a new version: some engine may have the
        other weights. All ranks of a sharded model call it before rank 0 collects.
        """
        if self._filled:
            return
        counts = _change_counts(self.training_model)
        if self._attempted is not None and self._attempted != counts:
            self.push_weights()
            return
        self._attempted = counts
        self._send(self.version)

    def fill(self, engine: WeightTarget) -> None:
        """Give one engine the version that the others have, from the snapshot and without the training model.

        It may be called from any thread while the model trains, and waits for a push in flight. Before the first push
        the snapshot is taken from the model, unless training has changed it since the publisher was made.
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
            has_it = peer.loaded == (snapshot, engine.start_count) and engine.version == snapshot.version
            if has_it and engine.failed_version is None:
                self._note_loaded(peer, snapshot)
                return
            deliveries = self._deliver(snapshot, [peer], on_failed=None)
            self._add_staging(deliveries.active[0], snapshot)
            try:
                deliveries.commit()
            except StepError as error:
                deliveries.cancel(error.purpose, error.__cause__, wait=False)
                raise self._explained(snapshot.version, error) from error.__cause__

    @property
    def filled(self) -> bool:
        """True if engines have weights of this publisher."""
        return self._filled

    def resume_from(self, version: int) -> None:
        """Continue the numbering of a checkpoint, whose weights the model has."""
        with self._lock:
            super().resume_from(version)
            self._drop_snapshot()
            self._filled, self._attempted = False, None
            self._initial_counts = _change_counts(self.training_model)

    def close(self) -> None:
        """Release the snapshot and the connections. The engines stay open, and a push connects again."""
        with self._lock:
            self._drop_snapshot()
            for peer in self._peers.values():
                peer.disconnect()

    def _send(self, version: int) -> None:
        """Send the current weights to all engines, which stage and then load them, and keep their snapshot."""
        self._drop_closed()
        peers = [self._peer(engine) for engine in self._wait_for_targets()]
        keep = self.group is not None  # to fill members from
        with self._cancelling(version):
            snapshot = self._new_snapshot(version, keep)
            self._open = self._deliver(snapshot, peers, on_failed=self._note_failed if keep else None)
            self._gather(snapshot, self._open)
            self._open.commit()
        deliveries, self._open = self._open, None
        self._release_current()
        self._snapshot = snapshot
        self._note_push(deliveries)
        self._current_version, self._filled = version, True

    def _deliver(
        self, snapshot: Snapshot, peers: Sequence[Peer], on_failed: Callable[[Delivery], None] | None
    ) -> Deliveries:
        return Deliveries(
            snapshot,
            [Delivery(peer, self.timeout, self._changed) for peer in peers],
            self._changed,
            in_flight=self.in_flight,
            load=self._add_load,
            on_loaded=self._note_loaded,
            on_failed=on_failed,
        )

    @contextmanager
    def _cancelling(self, version: int) -> Iterator[None]:
        """Cancel the open version at an error, and explain it in a WeightSyncError."""
        try:
            yield
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, StepError) else error
            if self._open is not None:
                self._open.cancel(error.purpose if isinstance(error, StepError) else "the push", cause)
                # Some engines may have loaded the version and sample with it from now on
                if self._open.reached_engine():
                    self._current_version = version
                self._release(self._open.snapshot)
                self._open = None
            if isinstance(error, (WeightSyncError, RankError)) or not isinstance(error, Exception):
                raise
            raise self._explained(version, error) from cause

    def _lead(self, method: Callable[..., Any], *args: Any) -> Any:
        """Make a joint call on rank 0, which may order any number of gathers in it, and end it on all ranks.

        An error that leaves the ranks out of step ends no call: it must end rank 0, and with it the connections of the
        others.
        """
        self._leads = True
        try:
            result = method(self, *args)
        except (WeightSyncError, ValueError) as error:
            self._tell(False, (self.version, self._current_version, self._filled, str(error)))
            raise
        finally:
            self._leads = False
        self._tell(False, (self.version, self._current_version, self._filled, None))
        return result

    def _follow(self) -> int:
        """Take part in a joint call of rank 0, and take over its versions at the end."""
        if self.ranks.size > 1:
            while (message := self.ranks.broadcast(lambda: None))[0]:
                with suppress(GatherError):  # rank 0 knows of it, and decides
                    self._help(message[1])
            self.version, self._current_version, self._filled, failure = message[1]
            if failure is not None:
                raise WeightSyncError(f"rank 0 could not send: {failure}")
        return self.version

    def _tell(self, is_order: bool, content: Any) -> None:
        """Send an order to gather, or the end of a joint call, to the other ranks."""
        if self.ranks.size > 1:
            self.ranks.broadcast(lambda: (is_order, content))

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
        if self._filled or self.ranks.size > 1 or _change_counts(self.training_model) != self._initial_counts:
            raise WeightSyncError(
                f"there is no snapshot of version {self.version}; call initialize() before training, or push again"
            )
        snapshot = self._new_snapshot(self.version, keep=True)
        try:
            self._gather(snapshot, self._deliver(snapshot, (), on_failed=None))
            if _change_counts(self.training_model) != self._initial_counts:
                raise WeightSyncError(
                    "training changed the model during its first fill; call initialize() before training"
                )
        except BaseException:
            self._release(snapshot)
            raise
        return snapshot

    def _release_current(self) -> None:
        """Free the snapshot of the version that engines had until now."""
        if self._snapshot is not None:
            self._release(self._snapshot)
            self._snapshot = None

    def _drop_snapshot(self) -> None:
        if self._snapshot is not None:
            self._snapshot.tainted = True
            self._release_current()

    def _note_loaded(self, peer: Peer, snapshot: Snapshot) -> None:
        peer.loaded = (snapshot, peer.engine.start_count)
        self._current_version = max(self._current_version, snapshot.version)
        if self.group is not None:
            self.group.mark_filled(peer.engine, snapshot.version)

    def _note_failed(self, delivery: Delivery) -> None:
        delivery.peer.loaded = None
        self.group.mark_failed(delivery.peer.engine, delivery.error.__cause__)

    def _peer(self, engine: WeightTarget) -> Peer:
        if id(engine) not in self._peers:
            check_engine_frequencies(self.training_model, engine.context_length)
            self._peers[id(engine)] = Peer(engine, next(self._numbers))
        return self._peers[id(engine)]

    def _drop_closed(self) -> None:
        """Forget members that left the group."""
        for key, peer in list(self._peers.items()):
            if self.group is not None and getattr(peer.engine, "closed", False):
                self._peers.pop(key).disconnect()

    def _explained(self, version: int, error: BaseException) -> WeightSyncError:
        """Return an error with the failed step, the engine, the cause, the current versions and the fix."""
        cause = error.__cause__ if isinstance(error, StepError) else error
        where = f"{error.engine} failed at {error.purpose}" if isinstance(error, StepError) else "the trainer failed"
        states = [
            f"{peer.name} has version {peer.engine.version}"
            if peer.engine.failed_version is None
            else f"{peer.name} has parts of version {peer.engine.failed_version} and refuses to sample"
            for peer in self._peers.values()
        ]
        if self.group is not None:
            remedy = f"The {type(self.group).__name__} restarts or refills its members; the next push sends everything"
        elif isinstance(cause, EngineDeadError):
            remedy = "Call the engine's restart() and push again, or use an EnginePool, which restarts its members"
        elif isinstance(cause, EngineTimeoutError):
            remedy = f"Push again; if the engine is alive but slow, raise timeout={self.timeout:g}"
        else:
            remedy = "Push again after fixing the cause; the push sends everything"
        return WeightSyncError(
            f"version {version} of the weights did not arrive: {where}: {type(cause).__name__}: {cause}. "
            f"Now {'; '.join(states)}. {remedy}"
        )


def _change_counts(model: nn.Module) -> list[int]:
    """Return how often each tensor of the model was changed in place."""
    return [tensor._version for tensor in [*model.parameters(), *model.buffers()]]
