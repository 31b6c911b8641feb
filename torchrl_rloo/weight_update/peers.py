"""Peer: an engine whose calls run in order on a thread, so that a hung engine holds up nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

from torchrl_rloo.runtime.threads import PackageThread
from torchrl_rloo.weight_update.target import WeightTarget
from torchrl_rloo.weight_update.transport import Link


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
