"""CollectorWaits: who waits for whom in a collector, between two calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl_rloo.engines.base import EngineError
from torchrl_rloo.engines.occupancy import Occupancy, OccupancyMeter, Reading
from torchrl_rloo.envs.activity import ActivityWindow
from torchrl_rloo.runtime.clock import now


class CollectorWaits:
    """Measurements of a collector: its conversations, its engines, its queue, and the loop that waits for rows.

    Args:
        runner: runner of groups, with ``take_activity`` and ``occupancies``.
        finished: number of finished groups that wait for their delivery.
        policy: policy, whose engine may report its own occupancy.
        clock: function that returns the time in seconds.
    """

    def __init__(self, runner: Any, finished: Occupancy, policy: Any, clock: Callable[[], float] = now):
        self._runner, self._finished, self._engine = runner, finished, getattr(policy, "engine", None)
        self._clock, self._engines, self._queue = clock, OccupancyMeter(), Reading()
        self._waited, self._waiting_since, self._begun = 0.0, None, False

    def begin(self) -> None:
        """Forget the time before the first batch."""
        if not self._begun:
            self._begun = True
            self.take()

    @contextmanager
    def for_rows(self) -> Iterator[None]:
        """Count the time of the context as a wait for rows."""
        start = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - start

    def take(self) -> dict[str, float]:
        """Return the measurements since the last call."""
        window: ActivityWindow = self._runner.take_activity()
        reading = self._finished.read()
        queue, self._queue = reading.since(self._queue), reading
        found = {"time/collect/wait": self._waited} | window.timings() | self._engines.take(self._readings())
        if queue.seconds > 0:
            found["queue/finished_groups"] = queue.total / queue.seconds
        self._waited = 0.0
        return found | self._load()

    def _readings(self) -> Mapping[Hashable, Reading]:
        report = getattr(self._engine, "occupancies", self._runner.occupancies)
        return report()

    def _load(self) -> dict[str, float]:
        """Return what the engine says about itself now."""
        if not hasattr(self._engine, "load"):
            return {}
        try:
            load = self._engine.load()
        except EngineError:  # it is dead or closed
            return {}
        return {
            "engine/running": load.running,
            "engine/waiting": load.waiting,
            "engine/kv_usage": load.kv_usage,
            "engine/preemptions": load.preemptions,
        }
