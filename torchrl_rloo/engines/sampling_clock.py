"""Clock of sampling time, for the deadlines of requests."""

from __future__ import annotations

import time
from collections.abc import Callable


class SamplingClock:
    """Clock that stands still during pauses.

    Args:
        clock: function that returns the time in seconds.

    Example:
        >>> now = [1.0]
        >>> clock = SamplingClock(lambda: now[0])
        >>> clock.stop()
        >>> now[0] = 5.0
        >>> clock.start()
        >>> now[0] = 6.0
        >>> clock.read()
        2.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._stopped_at = clock, None
        self.paused_seconds = 0.0  # sum of all pauses that have ended

    def read(self) -> float:
        """Return the time in seconds, without that of pauses."""
        return (self._clock() if self._stopped_at is None else self._stopped_at) - self.paused_seconds

    def stop(self) -> None:
        """Begin a pause, unless one has begun."""
        if self._stopped_at is None:
            self._stopped_at = self._clock()

    def start(self) -> None:
        """End a pause if there is one."""
        if self._stopped_at is not None:
            self.paused_seconds += self._clock() - self._stopped_at
            self._stopped_at = None
