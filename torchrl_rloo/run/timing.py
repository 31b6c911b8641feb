"""Timing of the phases of a step."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children, over all threads."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


class StepTimer:
    """Timer of the wall-clock seconds of named phases.

    Example:
        >>> timer = StepTimer()
        >>> with timer("collect"):
        ...     pass
        >>> sorted(timer.take())
        ['time/collect', 'time/step']
    """

    def __init__(self):
        self._phases: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            name = f"time/{phase}"
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase since the last :meth:`take`.

        Raises:
            KeyError: if the phase was not timed.
        """
        return self._phases[f"time/{phase}"]

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and of the step since the last call, and start the next step."""
        now = time.perf_counter()
        taken = self._phases | {"time/step": now - self._start}
        self._phases, self._start = {}, now
        return taken
