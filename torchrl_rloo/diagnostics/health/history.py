"""History of the metrics of a run in bounded memory: the start, the latest values, and the extremes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

START = 5  # first values, whose median is the start of a metric
RECENT = 5  # latest values, whose median is the present of a metric
WINDOW = 50  # latest values that are kept


class Series:
    """Finite values of one metric: the first ``START``, the latest ``WINDOW``, and the range of the moving median."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.low, self.high = math.inf, -math.inf

    def append(self, value: float) -> None:
        """Add the value of a step."""
        self.count += 1
        self.window.append(value)
        if len(self.first) < START:
            self.first.append(value)
        if self.count >= RECENT:
            recent = self.recent(RECENT)
            self.low, self.high = min(self.low, recent), max(self.high, recent)

    def recent(self, n: int) -> float:
        """Return the median of the latest ``n`` values."""
        values = list(self.window)
        return statistics.median(values[-n:])

    def state_dict(self) -> dict[str, Any]:
        """Return the values kept."""
        extremes = {"low": self.low, "high": self.high}
        return {"first": list(self.first), "window": list(self.window), "count": self.count} | extremes

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`state_dict`."""
        self.first, self.count = list(state["first"]), state["count"]
        self.window = deque(state["window"], maxlen=WINDOW)
        self.low, self.high = state["low"], state["high"]


class History:
    """Metrics of the current step and of the steps before it, as the conditions of rules read them.

    Args:
        patterns: names of the metrics to keep, with ``*`` for any text.

    Example:
        >>> history = History(["reward"])
        >>> for step, reward in enumerate([0.0, 0.1, 0.0, 0.1, 0.1, 0.6, 0.7, 0.8]):
        ...     history.append(step, {"reward": reward, "other": 1.0})
        >>> history.now("reward"), history.start("reward"), history.recent("reward")
        (0.8, 0.1, 0.6)
    """

    def __init__(self, patterns: Iterator[str] | list[str]) -> None:
        self._patterns = tuple(dict.fromkeys(patterns))
        self._kept: dict[str, bool] = {}  # whether a name matches a pattern
        self._series: dict[str, Series] = {}
        self._matches: dict[str, list[str]] = {}
        self.step = 0
        self.current: dict[str, float] = {}

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; those that are not finite are only part of :attr:`current`."""
        self.step, self.current = step, {}
        for name, value in metrics.items():
            kept = self._kept.get(name)
            if kept is None:
                kept = self._kept[name] = any(fnmatchcase(name, pattern) for pattern in self._patterns)
            if not kept:
                continue
            value = self.current[name] = float(value)
            if math.isfinite(value):
                if name not in self._series:
                    self._series[name] = Series()
                    self._matches.clear()
                self._series[name].append(value)

    def now(self, name: str) -> float | None:
        """Return the value of the current step, which may not be finite; None if it has none."""
        return self.current.get(name)

    def count(self, name: str) -> int:
        """Return the number of finite values so far."""
        return self._series[name].count if name in self._series else 0

    def start(self, name: str) -> float | None:
        """Return the median of the first ``START`` values; None before there are that many."""
        series = self._series.get(name)
        return None if series is None or series.count < START else statistics.median(series.first)

    def first(self, name: str) -> float | None:
        """Return the first value; None if there is none."""
        return self._series[name].first[0] if name in self._series else None

    def recent(self, name: str, n: int = RECENT) -> float | None:
        """Return the median of the latest ``n`` values, at most ``WINDOW``; None before there are that many."""
        series = self._series.get(name)
        return None if series is None or series.count < n else series.recent(n)

    def window(self, name: str, n: int = WINDOW) -> list[float]:
        """Return the latest values, oldest first, at most ``n`` and ``WINDOW``."""
        return list(self._series[name].window)[-n:] if name in self._series else []

    def highest(self, name: str) -> float | None:
        """Return the highest median of ``RECENT`` consecutive values; None before there are that many."""
        return self._series[name].high if self.count(name) >= RECENT else None

    def lowest(self, name: str) -> float | None:
        """Return the lowest median of ``RECENT`` consecutive values; None before there are that many."""
        return self._series[name].low if self.count(name) >= RECENT else None

    def matching(self, pattern: str) -> list[str]:
        """Return the names of all metrics so far that match a pattern, in alphabetical order."""
        if pattern not in self._matches:
            self._matches[pattern] = sorted(name for name in self._series if fnmatchcase(name, pattern))
        return self._matches[pattern]

    def state_dict(self) -> dict[str, Any]:
        """Return the values kept, as plain values."""
        return {"step": self.step, "series": {name: series.state_dict() for name, series in self._series.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`state_dict`."""
        self.step, self.current = state["step"], {}
        self._series, self._matches = {}, {}
        for name, saved in state["series"].items():
            self._series[name] = Series()
            self._series[name].load_state_dict(saved)
