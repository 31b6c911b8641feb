"""Deliveries of one version to engines: steps of each engine on a thread, failures in time, and the commit of all."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from torchrl_rloo.runtime.threads import PackageThread
from torchrl_rloo.weight_update.protocol import EngineError, EngineTimeoutError, InFlight, WeightTarget
from torchrl_rloo.weight_update.transport import Link

ABORT_SECONDS = 10.0  # limit for engines to cancel a failed update
GRACE_SECONDS = 1.0  # wait beyond a time-out for the engine's error, which is more specific
STRAGGLER_SECONDS = 5.0  # a rolling commit takes the next engine if one takes longer
_POLL_SECONDS = 0.25  # longest wait without a look at the clock


class StepError(Exception):
    """Failed step of an engine, with the engine's error as its cause."""

    def __init__(self, engine: str, purpose: str):
        super().__init__(f"{purpose} failed in {engine}")
        self.engine, self.purpose = engine, purpose


@dataclass(eq=False)
class Snapshot:
    """Weights of one version as engines get them, which publishers extend."""

    version: int
    kept: bool = True  # whether it stays valid while the training model changes
    tainted: bool = False  # whether an engine failed with it, so that a late worker may still read its memory


class Peer:
    """Engine whose calls run one after the other on a daemon thread, so that a hung engine holds up nothing else."""

    def __init__(self, engine: WeightTarget, number: int):
        self.engine = engine
        self.name = f"engine {number} ({type(engine).__name__})"
        self.link: Link | None = None  # connection of the transport
        self.connected_to: tuple | None = None  # manifest and start count that the connection is for
        self.loaded: tuple[Snapshot, int] | None = None  # snapshot that it loaded, and its start count at that time
        self._calls: SimpleQueue | None = None  # of the thread, which ends with the queue or with this object
        self._end: Callable[[], Any] = lambda: None

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


class Delivery:
    """One engine's part in a push: steps that run in order on the peer's thread until one fails.

    The publisher's thread adds steps and waits on ``changed``, which all deliveries of a push share. The engine has the
    same ``timeout`` for a step. One that exceeds it by more than a moment hangs: its delivery is abandoned, and nothing
    that its thread does later is counted.
    """

    def __init__(self, peer: Peer, timeout: float, changed: threading.Condition):
        self.peer, self.timeout, self.changed = peer, timeout, changed
        self.start_count = peer.engine.start_count
        self.error: StepError | None = None
        self.completed, self.added = 0, 0  # numbers of steps
        self.is_open = False  # True once the steps include the start of an update
        self.paused = False  # True from the begin of a pause until the engine resumed
        self.commit_began = 0.0  # time at which the pause was added
        self.still_seconds = 0.0  # time from the begin of the pause until the engine resumed
        self.abandoned = False
        self._paused_at = 0.0
        self._since, self._purpose = 0.0, ""  # of the pending step: time at which it could begin, and its purpose

    def add(self, purpose: str, call: Callable[[WeightTarget], Any], *, always: bool = False) -> int:
        """Run a step after the earlier ones, with ``always`` also after a failure, and return the number of steps."""
        with self.changed:
            if self.completed == self.added:
                self._since, self._purpose = monotonic(), purpose
            self.added += 1
            if not self.abandoned:
                self.peer.call(lambda engine: self._run(purpose, call, always, engine))
            return self.added

    def _run(self, purpose: str, call: Callable[[WeightTarget], Any], always: bool, engine: WeightTarget) -> None:
        with self.changed:
            skip = self.abandoned or (self.error is not None and not always)
            if not skip:
                self._since, self._purpose = monotonic(), purpose
        failure = None
        try:
            if not skip:
                call(engine)
        except BaseException as error:  # reported to the publisher's thread
            failure = error
        with self.changed:
            if not self.abandoned:
                self.completed += 1
                self._since = monotonic()
                if failure is not None:
                    self.fail(purpose, failure)
            self.changed.notify_all()

    def add_pause(self, in_flight: InFlight) -> None:
        """Pause the engine, unless an earlier step did."""
        if self.commit_began:
            return

        def pause(engine: WeightTarget) -> None:
            if engine.start_count != self.start_count:
                raise EngineError("it was restarted during the push")
            self.paused, self._paused_at = True, monotonic()
            engine.pause(in_flight, timeout=self.timeout)

        self.commit_began = self._paused_at = monotonic()
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
            self.still_seconds = monotonic() - self._paused_at

        self.add("resuming", resume, always=True)

    def fail(self, purpose: str, cause: BaseException) -> None:
        """Skip the steps that have not begun. The first failure is the one that is reported."""
        with self.changed:
            if self.error is None:
                self.error = StepError(self.peer.name, purpose)
                self.error.__cause__ = cause

    @property
    def idle(self) -> bool:
        """True if all steps have ended, or if the engine hangs."""
        return self.abandoned or self.completed == self.added

    def expire(self) -> None:
        """Fail if the pending step takes too long. Later calls of the engine run on a new thread."""
        if not self.idle and self.seconds_left() <= 0:
            self.fail(self._purpose, EngineTimeoutError(f"no answer within timeout={self.timeout:g} s"))
            self.abandoned = True
            self.peer.abandon_calls()

    def seconds_left(self) -> float:
        """Return the seconds until :meth:`expire` fails."""
        return self._since + self.timeout + GRACE_SECONDS - monotonic()


class Deliveries:
    """Deliveries of one snapshot to several engines, from staging to the last resume.

    ``load`` adds the steps that load the snapshot into a paused engine. ``on_loaded`` is called when an engine has the
    version and has resumed. ``on_failed`` is called with each delivery that fails; None ends the push at the first.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        deliveries: Sequence[Delivery],
        changed: threading.Condition,
        *,
        in_flight: InFlight,
        load: Callable[[Delivery, Any], None],
        on_loaded: Callable[[Peer, Snapshot], None],
        on_failed: Callable[[Delivery], None] | None,
    ):
        self.snapshot, self.active, self.in_flight = snapshot, list(deliveries), in_flight
        self.failed: list[Delivery] = []
        self.began = monotonic()
        self._changed, self._load, self._on_loaded, self._on_failed = changed, load, on_loaded, on_failed

    def settle(self) -> None:
        """Wait until every engine has completed its steps or failed; raise StepError if a failure ends the push."""
        self._wait(lambda: all(delivery.idle for delivery in self.active))
        self._drop_failed()

    def commit(self) -> None:
        """Load one engine after the other, first those that have staged everything."""
        if self._on_failed is None:  # no engine activates a version that another one could not stage
            self.settle()
        waiting, loading = list(self.active), []
        while waiting or loading:
            # Begin with the next engine once the previous one has resumed, failed, or takes long
            is_free = all(monotonic() - delivery.commit_began > STRAGGLER_SECONDS for delivery in loading)
            ready = next((delivery for delivery in waiting if delivery.idle), None)
            if ready is not None and is_free:
                waiting.remove(ready)
                if ready.error is None:
                    ready.add_pause(self.in_flight)
                    self._load(ready, self.snapshot)
                    ready.add_resume()
                    loading.append(ready)
            else:
                self._wait_for_any(loading if ready is not None else [*waiting, *loading])
            for delivery in [delivery for delivery in loading if delivery.idle]:
                loading.remove(delivery)
                if delivery.error is None:
                    self._on_loaded(delivery.peer, self.snapshot)
            self._drop_failed()

    def cancel(self, purpose: str, cause: BaseException, *, wait: bool = True) -> None:
        """Skip all further steps, and leave no engine paused or in the update."""
        for delivery in self.active:
            delivery.fail(purpose, cause)
        self._clean_up([*self.active, *self.failed], wait=wait)
        self.snapshot.tainted = True

    def reached_engine(self) -> bool:
        """Return whether an engine samples with the version."""
        version = self.snapshot.version
        return any(delivery.peer.engine.version == version for delivery in [*self.active, *self.failed])

    def wait_for_steps(self, numbers: Sequence[int]) -> None:
        """Wait until each engine has completed its number of steps or failed."""
        pairs = list(zip(self.active, numbers, strict=True))
        self._wait(lambda: all(d.error is not None or d.completed >= number for d, number in pairs))

    def _wait_for_any(self, deliveries: Sequence[Delivery]) -> None:
        """Wait until one of the deliveries has ended, or for a moment."""
        limit = monotonic() + 0.1
        self._wait(lambda: any(delivery.idle for delivery in deliveries) or monotonic() > limit)

    def _wait(self, predicate: Callable[[], bool]) -> None:
        _wait_until(self.active, predicate, self._changed)

    def _drop_failed(self) -> None:
        """Report engines that failed, and raise the error if it ends the push."""
        failed = [delivery for delivery in self.active if delivery.error is not None and delivery.idle]
        if not failed:
            return
        self.active = [delivery for delivery in self.active if delivery not in failed]
        self.failed += failed
        self.snapshot.tainted = True
        if self._on_failed is not None:
            self._clean_up(failed, wait=False)
            for delivery in failed:
                self._on_failed(delivery)
        if self._on_failed is None or not self.active:
            raise failed[0].error

    def _clean_up(self, deliveries: Sequence[Delivery], *, wait: bool) -> None:
        """Cancel the update in engines, and resume those that are still paused."""
        cleaners = []
        for delivery in deliveries:
            delivery.peer.disconnect()
            # A new delivery, because a hung engine's calls run on a new thread
            cleaner = Delivery(delivery.peer, min(delivery.timeout, ABORT_SECONDS), self._changed)
            cleaner.add("aborting the update", lambda e, t=cleaner.timeout: e.update_weights("abort", timeout=t))
            cleaner.add("resuming", lambda e, d=delivery: e.resume() if d.paused else None, always=True)
            cleaners.append(cleaner)
        if wait:
            _wait_until(cleaners, lambda: all(cleaner.idle for cleaner in cleaners), self._changed)


def _wait_until(deliveries: Sequence[Delivery], predicate: Callable[[], bool], changed: threading.Condition) -> None:
    """Wait until ``predicate`` holds. It must hold once all deliveries have ended or failed."""
    with changed:
        while True:
            for delivery in deliveries:
                delivery.expire()
            if predicate():
                return
            busy = [delivery.seconds_left() for delivery in deliveries if not delivery.idle]
            changed.wait(min([_POLL_SECONDS, *(max(0.0, seconds) + 0.001 for seconds in busy)]))
