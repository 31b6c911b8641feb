"""Conditions that several rules share: limits, comparisons with the start, and growth of counters."""

from __future__ import annotations

import math

from torchrl_rloo.diagnostics.health.history import RECENT, History
from torchrl_rloo.diagnostics.health.rule import Condition, Evidence


def above(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is above a limit.

    Example:
        >>> history = History(["kl"])
        >>> for step in range(5):
        ...     history.append(step, {"kl": 3.0})
        >>> above("kl", 2.0)(history), below("kl", 2.0)(history)
        ({'kl': 3.0}, None)
    """

    def condition(history: History) -> Evidence | None:
        recent = history.recent(name, n)
        return {name: recent} if recent is not None and recent > limit else None

    return condition


def below(name: str, limit: float, n: int = RECENT) -> Condition:
    """Return the condition that the median of the latest ``n`` values is below a limit."""

    def condition(history: History) -> Evidence | None:
        recent = history.recent(name, n)
        return {name: recent} if recent is not None and recent < limit else None

    return condition


def grown(name: str, factor: float, plus: float = 0.0) -> Condition:
    """Return the condition that a metric is above ``factor`` times its start, and above its start by ``plus``."""

    def condition(history: History) -> Evidence | None:
        start, recent = history.start(name), history.recent(name)
        if start is None or recent is None or recent <= factor * start or recent <= start + plus:
            return None
        return compared(name, start, recent)

    return condition


def shrunk(name: str, factor: float) -> Condition:
    """Return the condition that a metric is below ``factor`` times its start."""

    def condition(history: History) -> Evidence | None:
        start, recent = history.start(name), history.recent(name)
        if start is None or recent is None or recent >= factor * start:
            return None
        return compared(name, start, recent)

    return condition


def both(first: Condition, second: Condition) -> Condition:
    """Return the condition that two conditions hold, with the evidence of both."""

    def condition(history: History) -> Evidence | None:
        found = first(history)
        other = None if found is None else second(history)
        return None if other is None else {**found, **other}

    return condition


def not_finite(*names: str) -> Condition:
    """Return the condition that one of several metrics is NaN or infinite at the current step."""

    def condition(history: History) -> Evidence | None:
        values = {name: history.now(name) for name in names}
        return {name: v for name, v in values.items() if v is not None and not math.isfinite(v)} or None

    return condition


def counted(pattern: str, limit: float, per: str, n: int = 10) -> Condition:
    """Return the condition that counters grew by more than a share of another counter over the latest ``n`` steps.

    Args:
        pattern: names of the counters, with ``*`` for any text; their growth is added.
        limit: share of the growth of ``per``, above which the condition holds.
        per: name or pattern of the counters to divide by.
        n: number of steps.
    """

    def condition(history: History) -> Evidence | None:
        total = sum(growth(history, name, n) for name in history.matching(per))
        failed = sum(growth(history, name, n) for name in history.matching(pattern))
        if total <= 0 or failed / total <= limit:
            return None
        return {pattern: failed, per: total}

    return condition


def growth(history: History, name: str, n: int = 10) -> float:
    """Return by how much a counter grew over the latest ``n`` steps; one that is new began at 0."""
    values = history.window(name, n + 1)
    if not values:
        return 0.0
    return values[-1] - (values[0] if history.count(name) > len(values) or len(values) > n else 0.0)


def compared(name: str, start: float, recent: float) -> Evidence:
    """Return the evidence of a metric that departed from its start."""
    return {name: recent, f"{name} at the start": start}
