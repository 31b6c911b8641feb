"""Clock that never goes back, so that times of several processes can be compared, and a histogram of durations."""

from __future__ import annotations

import math
import time
from collections import Counter

PER_DECADE = 20  # buckets per decade; the error of a quantile is at most 6 %
SMALLEST = 1e-6  # seconds; shorter durations count as this
_EPOCH = time.time() - time.monotonic()


def now() -> float:
    """Return the seconds since the epoch; later changes of the system's clock have no effect on this process."""
    return _EPOCH + time.monotonic()


class Histogram:
    """Histogram of durations, in buckets spaced by a constant ratio of 1.12.

    Attributes:
        buckets: bucket -> number of durations in it.
        n: number of durations.
        total: sum of the durations in seconds.
        longest: longest duration in seconds.
    """

    def __init__(self):
        self.buckets: Counter[int] = Counter()
        self.n, self.total, self.longest = 0, 0.0, 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration ``times`` times."""
        self.buckets[round(PER_DECADE * math.log10(max(seconds, SMALLEST)))] += times
        self.n += times
        self.total += seconds * times
        self.longest = max(self.longest, seconds)

    def merge(self, other: Histogram) -> None:
        """Add the durations of another histogram."""
        self.buckets.update(other.buckets)
        self.n, self.total = self.n + other.n, self.total + other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, q: float) -> float:
        """Return the ``q``-quantile of the durations in seconds, ``q`` in [0, 1]; NaN without durations."""
        if not 0 <= q <= 1:
            raise ValueError(f"q={q} must be in [0, 1]")
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= q * self.n and seen < self.n:
                return min(10 ** (bucket / PER_DECADE), self.longest)
        return self.longest if self.n else math.nan
