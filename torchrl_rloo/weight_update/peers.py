"""Calls of several engines at once, none of which can hang the caller."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from queue import SimpleQueue
from time import monotonic
from typing import Any

import torch

from torchrl_rloo.modules.engines.base import Engine, EngineTimeoutError

GRACE_SECONDS = 1.0  # beyond a time-out: the engine's own error says more than ours


class PeerError(Exception):
    """A call of an engine failed; its cause is the engine's own error.

    Attributes:
        peer: the engine's name.
        doing: what the call was for.
    """

    def __init__(self, peer: str, doing: str):
        super().__init__(f"{doing} failed in {peer}")
        self.peer, self.doing = peer, doing


class Peer:
    """An engine and its calls, one after the other on a daemon thread.

    Args:
        engine: called.
        number: of the engine among its updater's.
    """

    def __init__(self, engine: Engine, number: int):
        self.engine = engine
        self.name = f"engine {number} ({type(engine).__name__})"
        self._calls: SimpleQueue | None = None

    def call(self, function: Callable[[Engine], Any]) -> Future:
        """Calls ``function`` with the engine once its earlier calls have ended."""
        if self._calls is None:
            self._calls = SimpleQueue()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            threading.Thread(target=_serve, args=(self._calls, device), name="engine calls", daemon=True).start()
            self._end = weakref.finalize(self, self._calls.put, None)
        future: Future = Future()
        self._calls.put((function, self.engine, future))
        return future

    def forget_calls(self) -> None:
        """Lets the next call go ahead, on a new thread, whatever becomes of the earlier ones."""
        if self._calls is not None:
            self._end()
            self._calls = None


def _serve(calls: SimpleQueue, device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)  # each thread has its own, and an engine may share ours
    while (call := calls.get()) is not None:
        function, engine, future = call
        try:
            result = function(engine)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        del call, function, engine, future  # or they would live until the next call


class Round:
    """One call of each of several engines, under way.

    Args:
        peers: the engines.
        calls: for each of them, called with the engine.
        doing: what for, as an error says it.
        timeout: seconds from now that they may take, as the engines were told too.
    """

    def __init__(self, peers: Sequence[Peer], calls: Sequence[Callable[[Engine], Any]], doing: str, timeout: float):
        self._peers, self._doing, self._timeout = peers, doing, timeout
        self._deadline = monotonic() + timeout + GRACE_SECONDS
        self._futures = [peer.call(call) for peer, call in zip(peers, calls, strict=True)]

    def wait(self) -> list[Any]:
        """What the calls returned.

        Raises:
            PeerError: as soon as one failed, or the time is over.
        """
        done, late = wait(self._futures, max(0.0, self._deadline - monotonic()), FIRST_EXCEPTION)
        for peer, future in zip(self._peers, self._futures, strict=True):
            if future in done and (error := future.exception()) is not None:
                raise PeerError(peer.name, self._doing) from error
        if late:
            slow = [peer for peer, future in zip(self._peers, self._futures, strict=True) if future in late]
            for peer in slow:
                peer.forget_calls()
            error = EngineTimeoutError(f"no answer within timeout={self._timeout:g} s")
            raise PeerError(", ".join(peer.name for peer in slow), self._doing) from error
        return [future.result() for future in self._futures]
