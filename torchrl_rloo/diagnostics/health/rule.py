"""Rules about the metrics of a run, the history that they read, and their events."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

START = 5  # first values, whose median is the start of a metric
RECENT = 5  # latest values, whose median is the present of a metric
WINDOW = 50  # latest values that are kept


class Series:
    """Finite values of one metric: the first ``START``, the latest ``WINDOW``, and the highest moving median."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.count = 0
        self.high = -math.inf

    def append(self, value: float) -> None:
        """Add the value of a step."""
        self.count += 1
        self.window.append(value)
        if len(self.first) < START:
            self.first.append(value)
        if self.count >= RECENT:
            self.high = max(self.high, self.recent(RECENT))

    def recent(self, n: int) -> float:
        """Return the median of the latest ``n`` values."""
        values = list(self.window)
        return statistics.median(values[-n:])

    def state_dict(self) -> dict[str, Any]:
        """Return the values kept."""
        return {"first": list(self.first), "window": list(self.window), "count": self.count, "high": self.high}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of :meth:`state_dict`."""
        self.first, self.count, self.high = list(state["first"]), state["count"], state["high"]
        self.window = deque(state["window"], maxlen=WINDOW)


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

    def __init__(self, patterns: Iterable[str]) -> None:
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


# Rules


SEVERITIES = ("info", "warn", "stop")

Evidence = Mapping[str, float]
Condition = Callable[[History], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """A condition on the metrics of a run, what it means, and what helps.

    Attributes:
        name: name in settings and logs.
        condition: function from the history of the metrics to the evidence, values by name, or None if the condition
            does not hold. It must be pure: it reads nothing else and keeps nothing.
        metrics: names of the metrics that it reads, with ``*`` for any text.
        sentence: what is wrong, in one sentence.
        remedy: what to do about it.
        severity: ``"info"`` for a fact, ``"warn"`` for a likely failure, ``"stop"`` for a failure that no run recovers
            from.
        patience: consecutive evaluations with evidence before the rule fires.
        recovery: consecutive evaluations without evidence before it clears.
        at: metrics of which a step must have one for an evaluation of the rule. Empty takes the first of ``metrics``.

    Raises:
        ValueError: if a field is out of range.

    Example:
        >>> short = lambda history: {"length": now} if (now := history.now("completions/mean_length")) < 3 else None
        >>> rule = Rule("short", short, ("completions/mean_length",), "Completions are short.", "Read some.")
        >>> rule.severity
        'warn'
    """

    name: str
    condition: Condition
    metrics: tuple[str, ...]
    sentence: str
    remedy: str
    severity: Literal["info", "warn", "stop"] = "warn"
    patience: int = 1
    recovery: int = 10
    at: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity={self.severity!r} of rule {self.name!r} must be one of {SEVERITIES}")
        if not self.metrics or isinstance(self.metrics, str):
            raise ValueError(f"metrics={self.metrics!r} of rule {self.name!r} must be a tuple of at least one name")
        if self.patience < 1 or self.recovery < 1:
            raise ValueError(
                f"patience={self.patience} and recovery={self.recovery} of rule {self.name!r} must be at least 1"
            )
        if not self.name or self.name in SEVERITIES:
            raise ValueError(f"name={self.name!r} of a rule must be a text other than {SEVERITIES}")


@dataclass(frozen=True)
class Event:
    """A rule that fired or cleared at a step; ``since`` is the first step of the evidence."""

    step: int
    rule: str
    severity: str
    state: Literal["fired", "cleared"]
    sentence: str
    remedy: str
    evidence: Evidence
    since: int

    def record(self) -> dict[str, Any]:
        """Return the event as a line of ``health.jsonl``; values that are not finite become None."""
        evidence = {name: value if math.isfinite(value) else None for name, value in self.evidence.items()}
        names = ("step", "rule", "severity", "state", "sentence", "remedy")
        return {name: getattr(self, name) for name in names} | {"evidence": evidence}

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.3g}" for name, value in self.evidence.items())
        if self.state == "cleared":
            return f"step {self.step}: {self.rule} is over"
        shown = f" ({values})" if values else ""
        return f"step {self.step}, {self.severity}, {self.rule}: {self.sentence}{shown} {self.remedy}"
