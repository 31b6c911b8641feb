"""Concurrent calls of engines with time limits, and EngineUpdaterBase, which restarts dead engines."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from torchrl_rloo._threads import PackageThread
from torchrl_rloo.weight_update.base import WeightSyncError, WeightUpdater
from torchrl_rloo.weight_update.target import (
    EngineError,
    EngineTimeoutError,
    InFlight,
    WeightTarget,
    check_in_flight,
    is_dead,
)

GRACE_SECONDS = 1.0  # wait beyond a time-out for the engine's error, which is more specific


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
        number: index of the engine in its updater.
    """

    def __init__(self, engine: WeightTarget, number: int):
        self.engine = engine
        self.name = f"engine {number} ({type(engine).__name__})"
        self._calls: SimpleQueue | None = None

    def call(self, function: Callable[[WeightTarget], Any]) -> Future:
        """Call ``function`` with the engine after its earlier calls."""
        if self._calls is None:
            self._calls = SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._end = weakref.finalize(self, self._calls.put, None)
            PackageThread(_serve, self._calls, device, name="engine calls", stop=self._end).start()
        future: Future = Future()
        self._calls.put((function, self.engine, future))
        return future

    def abandon_calls(self) -> None:
        """Start the next call on a new thread, because earlier ones may still hang."""
        if self._calls is not None:
            self._end()
            self._calls = None


def _serve(calls: SimpleQueue, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own, and an engine may use the caller's
    while (call := calls.get()) is not None:
        function, engine, future = call
        try:
            result = function(engine)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del call, function, engine, future  # otherwise they live until the next call


class Round:
    """Concurrent calls of several engines, one each.

    Args:
        peers: engines to call.
        calls: one function per engine, called with it.
        purpose: purpose of the calls, for errors.
        timeout: seconds from now that the calls may take. The engines have the same limit.
    """

    def __init__(
        self, peers: Sequence[Peer], calls: Sequence[Callable[[WeightTarget], Any]], purpose: str, timeout: float
    ):
        self._peers, self._purpose, self._timeout = peers, purpose, timeout
        self._deadline = monotonic() + timeout + GRACE_SECONDS
        self._futures = [peer.call(call) for peer, call in zip(peers, calls, strict=True)]

    def wait(self) -> list[Any]:
        """Return the results of the calls.

        Raises:
            PeerError: as soon as one call fails or the time is over.
        """
        done, late = wait(self._futures, max(0.0, self._deadline - monotonic()), FIRST_EXCEPTION)
        for peer, future in zip(self._peers, self._futures, strict=True):
            if future in done and (error := future.exception()) is not None:
                raise PeerError(peer.name, self._purpose) from error
        if late:
            slow = [peer for peer, future in zip(self._peers, self._futures, strict=True) if future in late]
            for peer in slow:
                peer.abandon_calls()
            error = EngineTimeoutError(f"no answer within timeout={self._timeout:g} s")
            raise PeerError(", ".join(peer.name for peer in slow), self._purpose) from error
        return [future.result() for future in self._futures]


class EngineUpdaterBase(WeightUpdater):
    """Base class of updaters of engines, with argument checks, restarts, and one outcome for all ranks.

    Args:
        engines: one or more engines. Ranks that do not send need none.
        sends: True if this rank sends.
        sharded: True if the model's ranks push together, so that all fail if one fails.
        in_flight: treatment of running requests, see :meth:`WeightTarget.pause`.
        timeout: time limit in seconds.
        max_restarts: largest number of :meth:`restart` calls. None disables the limit.

    Raises:
        ValueError: if there are no engines or an argument is out of range.
    """

    def __init__(
        self,
        engines: WeightTarget | Sequence[WeightTarget],
        *,
        sends: bool,
        sharded: bool,
        in_flight: InFlight,
        timeout: float,
        max_restarts: int | None,
    ):
        self.engines = [engines] if isinstance(engines, WeightTarget) else list(engines)
        if sends and not self.engines:
            raise ValueError("engines=[] must have at least one engine on the rank that sends")
        check_in_flight(in_flight)
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be above 0 seconds")
        if max_restarts is not None and max_restarts < 0:
            raise ValueError(f"max_restarts={max_restarts} must be at least 0; use None for no limit")
        self.in_flight, self.timeout, self.max_restarts = in_flight, timeout, max_restarts
        self.sharded, self.restarts = sharded, 0
        self._version = 0  # version of the last push, successful or not
        self._peers = [Peer(engine, number) for number, engine in enumerate(self.engines)]

    def restart(self) -> int:
        """Restart dead engines, and push the current weights to all engines with the version of the last push.

        Returns:
            Number of engines that were dead.

        Raises:
            EngineError: if ``max_restarts`` is exceeded.
            WeightSyncError: if an engine does not start, or the weights did not arrive.
        """
        if self.max_restarts is not None and self.restarts >= self.max_restarts:
            raise EngineError(
                f"engines died more than max_restarts={self.max_restarts} times; fix the cause, or raise the limit"
            )
        self.restarts += 1
        dead, failure = [engine for engine in self.engines if is_dead(engine)], None
        try:
            for engine in dead:
                engine.restart()
        except EngineError as error:
            failure = WeightSyncError(f"a dead engine did not restart: {error}")
            failure.__cause__ = error
        self._agree(failure)
        self.push_weights(self._version)
        return len(dead)

    def _agree(self, failure: Exception | None) -> None:
        """Raise the failure of the sending rank, on all ranks if they push together."""
        if self.sharded:
            message = [str(failure) if failure else None]
            torch.distributed.broadcast_object_list(message, src=0)
            if message[0] is not None and failure is None:
                failure = WeightSyncError(f"rank 0 could not send: {message[0]}")
        if failure is not None:
            raise failure
