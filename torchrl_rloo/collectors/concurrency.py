"""Limits on the number of conversations in flight: a fixed one, or one that follows the engine's own signals."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from math import inf

from torchrl_rloo.engines.base import EngineLoad

_FULL_CACHE = 0.9  # share of the key-value cache above which no request is added
_GROWTH, _DECREASE = 1.25, 0.75  # factors of the limit at a free and at a full engine


class AdaptiveConcurrency:
    """Limit on conversations in flight that follows the engine.

    The limit starts at ``minimum``. It grows by a quarter while it is reached, no request waits in the engine, and at
    least 10 % of the key-value cache is free. It shrinks by a quarter after the engine preempted a request. Otherwise,
    it stays: waiting requests fill places that become free, but more of them gain nothing.

    Args:
        minimum: smallest limit.
        maximum: largest limit.
        period: seconds between two looks at the engine.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> limit = AdaptiveConcurrency(minimum=4, maximum=64)
        >>> limit.update(EngineLoad(running=4, waiting=0, kv_usage=0.1, preemptions=0, tokens=10), in_flight=4)
        5
        >>> limit.update(EngineLoad(running=5, waiting=0, kv_usage=1.0, preemptions=2, tokens=20), in_flight=5)
        4
    """

    def __init__(self, minimum: int = 8, maximum: int = 1024, *, period: float = 0.5):
        if not 1 <= minimum <= maximum:
            raise ValueError(f"minimum={minimum} and maximum={maximum} must satisfy 1 <= minimum <= maximum")
        if not period > 0:
            raise ValueError(f"period={period} must be above 0 seconds")
        self.minimum, self.maximum, self.period = minimum, maximum, period
        self.limit = minimum
        self._preemptions: int | None = None

    def update(self, load: EngineLoad, in_flight: int) -> int:
        """Return the limit after one look at the engine.

        Args:
            load: load of the engine.
            in_flight: number of conversations in flight.
        """
        preempted = self._preemptions is not None and load.preemptions > self._preemptions
        first = self._preemptions is None and load.preemptions > 0
        self._preemptions = load.preemptions
        if preempted or first:
            self.limit = int(self.limit * _DECREASE)
        elif in_flight >= self.limit and not load.waiting and load.kv_usage < _FULL_CACHE:
            self.limit = max(self.limit + 1, int(self.limit * _GROWTH))
        self.limit = min(max(self.limit, self.minimum), self.maximum)
        return self.limit


class Slots:
    """Places for conversations, used on one event loop. Waiting conversations enter in their order.

    ``async with slots:`` waits for a place and holds it.

    Args:
        limit: number of places; None disables the limit.
        load: function that returns the engine's load; required with :class:`AdaptiveConcurrency`.

    Attributes:
        in_flight: number of places in use.
    """

    def __init__(self, limit: int | AdaptiveConcurrency | None, load: Callable[[], EngineLoad] | None = None):
        self._adaptive = limit if isinstance(limit, AdaptiveConcurrency) else None
        self._load, self._limit = load, inf if limit is None else limit
        if self._adaptive is not None:
            if load is None:
                raise ValueError(
                    "max_in_flight=AdaptiveConcurrency requires a policy over an AsyncEngine, which reports its load; "
                    "use a number"
                )
            self._limit = self._adaptive.limit
        self.in_flight = 0
        self._waiting: deque[asyncio.Future] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> float:
        """Current number of places; infinite without a limit."""
        return self._limit

    async def __aenter__(self) -> None:
        if self.in_flight >= self._limit or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            self._watch()
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # the place was granted before the cancellation
                    self._leave()
                raise
        else:
            self.in_flight += 1

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self.in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.in_flight < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def _watch(self) -> None:
        """Look at the engine at intervals while conversations wait."""
        if self._adaptive is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._adaptive.period, self._adapt)

    def _adapt(self) -> None:
        self._timer = None
        self._limit = self._adaptive.update(self._load(), self.in_flight)
        self._admit()
        if self._waiting:
            self._watch()
