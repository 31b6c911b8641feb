"""Record of where conversations spend their time, counted when they change their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torchrl_rloo.runtime.clock import Histogram, now

STATES = ("engine", "tools", "environment", "rewards", "group", "place")
_INDEX = {state: index for index, state in enumerate(STATES)}


@dataclass
class ActivityWindow:
    """Activity between two calls of :meth:`Activity.take`, or the sum over several processes."""

    idle: float = 0.0
    shares: list[float] = field(default_factory=lambda: [0.0] * len(STATES))
    latency: dict[str, Histogram] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Length of the window; over several processes the sum of theirs."""
        return self.idle + sum(self.shares)

    def merge(self, other: ActivityWindow) -> None:
        """Add the window of another process, or a later one."""
        self.idle += other.idle
        self.shares = [a + b for a, b in zip(self.shares, other.shares, strict=True)]
        for kind, histogram in other.latency.items():
            self.latency.setdefault(kind, Histogram()).merge(histogram)

    def timings(self) -> dict[str, float]:
        """Return ``wait/worker/<state>``, which sum to 1, and ``time/<kind>/<mean|p90|max>``; none of no time."""
        found = {}
        if (seconds := self.seconds) > 0:
            found = {f"wait/worker/{state}": share / seconds for state, share in zip(STATES, self.shares, strict=True)}
            found["wait/worker/idle"] = self.idle / seconds
        for kind, histogram in self.latency.items():
            found[f"time/{kind}/mean"] = histogram.total / histogram.n
            found[f"time/{kind}/p90"] = histogram.quantile(0.9)
            found[f"time/{kind}/max"] = histogram.longest
        return found


class Activity:
    """Record of where conversations spend their time. All calls are made on one thread."""

    def __init__(self, clock: Callable[[], float] = now):
        self._clock = clock
        self._counted_to = clock()
        self._numbers, self._total = [0] * len(STATES), 0
        self._window = ActivityWindow()
        # Integral of the time of one conversation, and its value when the share of each state was last counted
        self._integral, self._counted_at = 0.0, [0.0] * len(STATES)

    def move(self, before: str | None, after: str | None) -> float:
        """Note that a conversation changes its state, and return the time. None is no state."""
        time = self._advance()
        if before != after:
            if before is not None:
                self._change(_INDEX[before], -1)
            if after is not None:
                self._change(_INDEX[after], 1)
        return time

    def record(self, kind: str, seconds: float) -> None:
        """Count a duration."""
        self._window.latency.setdefault(kind, Histogram()).add(seconds)

    def numbers(self) -> dict[str, int]:
        """Return the number of conversations in each state now."""
        return dict(zip(STATES, self._numbers, strict=True))

    def take(self) -> ActivityWindow:
        """Return what happened since the last call."""
        self._advance()
        for state in range(len(STATES)):
            self._change(state, 0)
        window, self._window = self._window, ActivityWindow()
        return window

    def _advance(self) -> float:
        start, end = self._counted_to, self._clock()
        self._counted_to = end
        if self._total:
            self._integral += (end - start) / self._total
        else:
            self._window.idle += end - start
        return end

    def _change(self, state: int, change: int) -> None:
        """Change the number of conversations in a state, and count its share until now."""
        self._window.shares[state] += self._numbers[state] * (self._integral - self._counted_at[state])
        self._counted_at[state] = self._integral
        self._numbers[state] += change
        self._total += change


class Presence:
    """State of one conversation in an :class:`Activity`."""

    def __init__(self, activity: Activity):
        self.activity, self.state = activity, None

    def enter(self, state: str) -> float:
        """Change the state, and return the time."""
        time = self.activity.move(self.state, state)
        self.state = state
        return time

    def leave(self) -> float:
        """Leave the record, and return the time."""
        time = self.activity.move(self.state, None)
        self.state = None
        return time


_PRESENT: ContextVar[Presence | None] = ContextVar("present", default=None)


def set_present(presence: Presence) -> None:
    """Make a conversation the one of the current task, for :func:`spending`."""
    _PRESENT.set(presence)


@contextmanager
def spending(state: str) -> Iterator[None]:
    """Count the time of the context, and its duration, for the conversation of the current task, if it has one."""
    presence = _PRESENT.get()
    if presence is None or presence.state is None:
        yield
        return
    before = presence.state
    start = presence.enter(state)
    try:
        yield
    finally:
        presence.activity.record(state, presence.enter(before) - start)
