"""Record of where conversations spend their time, counted when they change their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torchrl_rloo.runtime.clock import Histogram, now

STATES = ("engine", "tools", "environment", "rewards", "group", "place")
_INDEX = {state: index for index, state in enumerate(STATES)}
_WIDTH_S = 1 / 256  # narrowest bin of a profile
_MAX_BINS = 512


class Profile:
    """Number of conversations in each state over time, in a bounded number of bins.

    Bins begin at multiples of their width, so that profiles of several processes can be added. Their width doubles
    whenever there would be too many of them.
    """

    def __init__(self) -> None:
        self.width = _WIDTH_S
        self.bins: dict[int, list[float]] = {}

    def add(self, start: float, end: float, numbers: list[int]) -> None:
        """Add an interval in which the numbers of conversations did not change."""
        index, last = int(start / self.width), int(end / self.width)
        if index == last and index in self.bins:  # almost always
            self._fill(self.bins[index], end - start, numbers)
            return
        while end - start > _MAX_BINS * self.width:
            self._coarsen()
        for index in range(int(start / self.width), int(end / self.width) + 1):
            seconds = min(end, (index + 1) * self.width) - max(start, index * self.width)
            self._fill(self.bins.setdefault(index, [0.0] * len(STATES)), seconds, numbers)
        while len(self.bins) > _MAX_BINS:
            self._coarsen()

    @staticmethod
    def _fill(cells: list[float], seconds: float, numbers: list[int]) -> None:
        for state, number in enumerate(numbers):
            if number:
                cells[state] += seconds * number

    def merge(self, other: Profile) -> None:
        """Add the conversations of another profile."""
        while self.width < other.width:
            self._coarsen()
        factor = round(self.width / other.width)
        for index, cells in other.bins.items():
            self._add_bin(index // factor, cells)
        while len(self.bins) > _MAX_BINS:
            self._coarsen()

    def numbers(self, start: float, end: float) -> list[tuple[float, list[float]]]:
        """Return the begin of each bin between two times, and its mean number of conversations by state."""
        indices = range(int(start / self.width), int(end / self.width) + 1)
        empty = [0.0] * len(STATES)
        return [(i * self.width, [cell / self.width for cell in self.bins.get(i, empty)]) for i in indices]

    def _coarsen(self) -> None:
        bins, self.bins = self.bins, {}
        self.width *= 2
        for index, cells in bins.items():
            self._add_bin(index // 2, cells)

    def _add_bin(self, index: int, cells: list[float]) -> None:
        held = self.bins.get(index)
        self.bins[index] = list(cells) if held is None else [a + b for a, b in zip(held, cells, strict=True)]


@dataclass
class ActivityWindow:
    """Activity between two calls of :meth:`Activity.take`, or the sum over several processes."""

    idle: float = 0.0
    shares: list[float] = field(default_factory=lambda: [0.0] * len(STATES))
    latency: dict[str, Histogram] = field(default_factory=dict)
    profile: Profile = field(default_factory=Profile)

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
        self.profile.merge(other.profile)

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
        self._numbers = [0] * len(STATES)
        self._window = ActivityWindow()

    def move(self, before: str | None, after: str | None) -> float:
        """Note that a conversation changes its state, and return the time. None is no state."""
        time = self._count()
        if before is not None:
            self._numbers[_INDEX[before]] -= 1
        if after is not None:
            self._numbers[_INDEX[after]] += 1
        return time

    def record(self, kind: str, seconds: float) -> None:
        """Count a duration."""
        self._window.latency.setdefault(kind, Histogram()).add(seconds)

    def numbers(self) -> dict[str, int]:
        """Return the number of conversations in each state now."""
        return dict(zip(STATES, self._numbers, strict=True))

    def take(self) -> ActivityWindow:
        """Return what happened since the last call."""
        self._count()
        window, self._window = self._window, ActivityWindow()
        return window

    def _count(self) -> float:
        start, end = self._counted_to, self._clock()
        self._counted_to = end
        numbers, window = self._numbers, self._window
        if not (total := sum(numbers)):
            window.idle += end - start
        elif end > start:
            part, shares = (end - start) / total, window.shares
            for state, number in enumerate(numbers):
                if number:
                    shares[state] += part * number
            window.profile.add(start, end, numbers)
        return end


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
