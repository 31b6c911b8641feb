"""Integrals of a number over time, counted at its changes: requests inside an engine, groups in a queue."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from threading import Lock
from typing import NamedTuple

from torchrl_rloo.runtime.clock import now


class Reading(NamedTuple):
    """Integrals since the start of an :class:`Occupancy`, in seconds.

    Attributes:
        seconds: time.
        busy: time in which the number was above 0.
        total: integral of the number; divided by ``seconds``, its mean.
    """

    seconds: float = 0.0
    busy: float = 0.0
    total: float = 0.0

    def since(self, before: Reading) -> Reading:
        """Return the difference to an earlier reading, or this one if the counter started again in between."""
        if self.seconds < before.seconds:
            return self
        return Reading(*(new - old for new, old in zip(self, before, strict=True)))


class Occupancy:
    """Number that changes now and then, and its integrals over time. It may be changed on any thread."""

    def __init__(self, clock: Callable[[], float] = now):
        self._clock, self._lock = clock, Lock()
        self.number = 0
        self._start = self._counted_to = clock()
        self._busy = self._total = 0.0

    def add(self, change: int) -> None:
        """Change the number."""
        with self._lock:
            self._count()
            self.number += change

    def set(self, number: int) -> None:
        """Set the number."""
        with self._lock:
            self._count()
            self.number = number

    def read(self) -> Reading:
        """Return the integrals up to now."""
        with self._lock:
            self._count()
            return Reading(self._counted_to - self._start, self._busy, self._total)

    def _count(self) -> None:
        time = self._clock()
        if self.number:
            self._busy += time - self._counted_to
            self._total += (time - self._counted_to) * self.number
        self._counted_to = time


class OccupancyMeter:
    """Metrics of several engines' occupancy between two calls."""

    def __init__(self) -> None:
        self._before: dict[Hashable, Reading] = {}

    def take(self, readings: Mapping[Hashable, Reading]) -> dict[str, float]:
        """Return ``engine/busy``, ``engine/busy_min`` and ``engine/in_flight`` of engines that reported since.

        Readings are those since each engine's start, by a key that stays.
        """
        parts = [reading.since(self._before.get(key, Reading())) for key, reading in readings.items()]
        self._before = dict(readings)
        parts = [part for part in parts if part.seconds > 0]
        if not parts:
            return {}
        shares = [part.busy / part.seconds for part in parts]
        return {
            "engine/busy": sum(shares) / len(shares),
            "engine/busy_min": min(shares),
            "engine/in_flight": sum(part.total / part.seconds for part in parts) / len(parts),
        }
