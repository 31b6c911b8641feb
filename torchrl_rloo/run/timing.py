"""Timing of the phases of a step."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torchrl_rloo.runtime.clock import now

_KEPT_STEPS = 8
_MAX_SPANS = 256  # phases of a step that are kept with their times


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children, over all threads."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


class StepTimes(NamedTuple):
    """Phases of one step, in seconds since the epoch.

    Attributes:
        start: begin of the step.
        end: end of the step.
        phases: name, begin and end of each phase, in the order of their ends; the first ones if there are many.
    """

    start: float
    end: float
    phases: list[tuple[str, float, float]]


class StepTimer:
    """Timer of the wall-clock seconds of named phases.

    Args:
        clock: function that returns the time in seconds.

    Attributes:
        recent: times of the last steps, oldest first.
        phase: name of the phase that runs now; None between two.
        on_phase: function called with the name of each phase that begins, and with None at its end.

    Example:
        >>> timer = StepTimer()
        >>> with timer("collect"):
        ...     pass
        >>> sorted(timer.take())
        ['time/collect', 'time/step']
    """

    def __init__(self, clock: Callable[[], float] = now):
        self._clock, self._start = clock, clock()
        self._phases: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self.recent: deque[StepTimes] = deque(maxlen=_KEPT_STEPS)
        self.phase: str | None = None
        self.on_phase: Callable[[str | None], None] | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        outer, start = self.phase, self._clock()
        self._enter(phase)
        try:
            yield
        finally:
            name, end = f"time/{phase}", self._clock()
            self._phases[name] = self._phases.get(name, 0.0) + end - start
            if len(self._spans) < _MAX_SPANS:
                self._spans.append((phase, start, end))
            self._enter(outer)

    def _enter(self, phase: str | None) -> None:
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase since the last :meth:`take`.

        Raises:
            KeyError: if the phase was not timed.
        """
        return self._phases[f"time/{phase}"]

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and of the step since the last call, and start the next step."""
        end = self._clock()
        taken = self._phases | {"time/step": end - self._start}
        self.recent.append(StepTimes(self._start, end, self._spans))
        self._phases, self._spans, self._start = {}, [], end
        return taken
