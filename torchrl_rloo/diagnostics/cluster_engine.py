"""SimulatedEngine: continuous batching in virtual time, without an event per token."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal

from torchrl_rloo.diagnostics.cluster_load import Turn

InFlight = Literal["finish", "continue"]
_ROUNDING = 1e-6  # seconds by which a request may end early, above the rounding of the clock
_OVERLOAD = 1.5  # multiple of the mean load above which a conversation leaves its engine


@dataclass(frozen=True)
class EngineSpeed:
    """Speed and memory of one engine.

    Args:
        rate: function that returns the tokens per second of ``n`` running requests together.
        prefill: tokens per second that it reads. Sampling stands still during that time.
        cache_tokens: tokens that its key-value cache holds.
        max_running: largest number of running requests.
    """

    rate: Callable[[int], float]
    prefill: float = inf
    cache_tokens: float = inf
    max_running: int = 1024


def linear_rate(single_stream: float, saturated: float) -> Callable[[int], float]:
    """Return a rate that grows with the number of requests until it is saturated.

    Args:
        single_stream: tokens per second of a single request.
        saturated: largest number of tokens per second.

    Example:
        >>> rate = linear_rate(50.0, 2000.0)
        >>> rate(1), rate(30), rate(64)
        (50.0, 1500.0, 2000.0)
    """
    return lambda running: min(running * single_stream, saturated)


def table_rate(measured: Sequence[tuple[float, float]]) -> Callable[[int], float]:
    """Return a rate that interpolates measurements, and stays at the last one beyond it.

    Args:
        measured: pairs of running requests and tokens per second, in ascending order.

    Raises:
        ValueError: if the table is empty or not ascending.

    Example:
        >>> rate = table_rate([(1, 60.0), (8, 400.0), (64, 1800.0)])
        >>> rate(1), rate(36), rate(100)
        (60.0, 1100.0, 1800.0)
    """
    points = [(0.0, 0.0), *measured]
    if len(points) < 2 or any(a[0] >= b[0] for a, b in zip(points, points[1:], strict=False)):
        raise ValueError(f"measured={list(measured)} must have ascending positive numbers of requests")

    def rate(running: int) -> float:
        place = bisect_right(points, (running, inf))
        if place == len(points):
            return points[-1][1]
        (n0, r0), (n1, r1) = points[place - 1], points[place]
        return r0 + (r1 - r0) * (running - n0) / (n1 - n0)

    return rate


@dataclass(eq=False, slots=True)
class _Request:
    turn: Turn
    done: asyncio.Future
    held: float  # tokens of the cache, on average over its time
    start: float | None = None  # progress of the engine when it began; None while it waits
    canceled: bool = False
    ended: bool = False


class SimulatedEngine:
    """Engine whose running requests each sample equally many tokens per second. Create it on the event loop.

    The engine keeps one progress: the tokens that a request sampled had it run from the start. A request ends once the
    progress has grown by its tokens. A waiting request begins when the cache has room for its mean size.

    Args:
        speed: speed and memory.

    Attributes:
        version: policy version of its weights.
        running: number of running requests.
        paused: whether it stands still for an update.
        busy_seconds: time in which requests ran.
        still_seconds: time in which it stood still for an update.
        request_seconds: integral of the number of running requests.
        sampled_tokens: tokens sampled so far.
    """

    def __init__(self, speed: EngineSpeed):
        self.speed, self.version, self.running, self.paused = speed, 0, 0, False
        self.busy_seconds = self.still_seconds = self.request_seconds = self.sampled_tokens = 0.0
        self._loop = asyncio.get_running_loop()
        self._held = self._progress = self._debt = 0.0  # debt: seconds of prefill before sampling continues
        self._at = self._loop.time()
        self._admits = True
        self._waiting: deque[_Request] = deque()
        self._ends: list[tuple[float, int, _Request]] = []  # a heap by the progress at the end of each request
        self._marks = [(0.0, 0)]  # progress at which each version began
        self._timer: asyncio.TimerHandle | None = None
        self._begun = 0
        self._drained = asyncio.Event()
        self._rates: dict[int, float] = {}

    async def sample(self, turn: Turn) -> list[tuple[int, int]]:
        """Sample a turn.

        Returns:
            Pairs of a version and the number of tokens that it sampled.
        """
        request = _Request(turn, self._loop.create_future(), turn.context + turn.tokens / 2)
        self._waiting.append(request)
        if not self.paused:
            self.count()
            self._update()
        try:
            return await request.done
        except asyncio.CancelledError:
            request.canceled = True
            if request.start is not None and not request.ended:
                self.count()
                self._leave(request)
                self._update()
            raise

    def count(self) -> None:
        """Count the time since the last change, and let the running requests sample in it."""
        now = self._loop.time()
        seconds, self._at = now - self._at, now
        if self.paused:
            self.still_seconds += seconds
        elif self.running:
            self.busy_seconds += seconds
            self.request_seconds += seconds * self.running
            read = min(seconds, self._debt)
            self._debt -= read
            tokens = (seconds - read) * self._rate_of_one()
            self._progress += tokens
            self.sampled_tokens += tokens * self.running

    def _rate_of_one(self) -> float:
        if self.running not in self._rates:
            self._rates[self.running] = self.speed.rate(self.running) / self.running
        return self._rates[self.running]

    def _leave(self, request: _Request) -> None:
        self.running -= 1
        self._held -= request.held
        if not self.running:
            self._held = self._debt = 0.0

    def _update(self) -> None:
        """End and begin requests that are due, and set the timer. The time must have been counted."""
        if self.paused:
            return
        due = self._progress + (_ROUNDING * self._rate_of_one() if self.running else 0.0)
        while self._ends and (self._ends[0][2].canceled or self._ends[0][0] <= due):
            request = heappop(self._ends)[2]
            if not request.canceled:
                self._leave(request)
                request.ended = True
                if not request.done.cancelled():
                    request.done.set_result(self._versions(request))
        while self._waiting and self._admits and self.running < self.speed.max_running:
            request = self._waiting[0]
            if not request.canceled:
                if self.running and self._held + request.held > self.speed.cache_tokens:
                    break
                self._begin(request)
            self._waiting.popleft()
        if not self.running:
            self._drained.set()
        self._set_timer()

    def _begin(self, request: _Request) -> None:
        self.running += 1
        self._begun += 1
        self._held += request.held
        self._debt += request.turn.prefill / self.speed.prefill
        request.start = self._progress
        heappush(self._ends, (self._progress + request.turn.tokens, self._begun, request))

    def _set_timer(self) -> None:
        """Let the timer fire at the next end or earlier; an early one sets itself again."""
        if not self.running:
            return
        due = self._at + self._debt + max(0.0, self._ends[0][0] - self._progress) / self._rate_of_one()
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self.count()
        self._update()

    def _versions(self, request: _Request) -> list[tuple[int, int]]:
        """Return the versions of a request that ends now, by the progress at which each began."""
        end, place, found = request.start + request.turn.tokens, len(self._marks) - 1, []
        while True:
            start, version = self._marks[place]
            begin = max(start, request.start)
            if tokens := round(end - begin):
                found.append((version, tokens))
            if start <= request.start:
                return found[::-1]
            end, place = begin, place - 1

    async def update(self, version: int, seconds: float, in_flight: InFlight) -> None:
        """Put new weights in use.

        Args:
            version: their version.
            seconds: time that it takes while the engine stands still.
            in_flight: ``"finish"`` first waits for the running requests, and begins none. ``"continue"`` freezes them,
                and they go on under the new version.
        """
        if in_flight == "finish":
            self._admits = False
            while self.running:
                self._drained.clear()
                await self._drained.wait()
        self.count()
        self.paused = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await asyncio.sleep(seconds)
        self.count()
        self.paused, self._admits, self.version = False, True, version
        self._marks.append((self._progress, version))
        self._update()


class SimulatedPool:
    """Engines that act as one: a conversation stays on its engine, unless that has 1.5 times the mean load.

    Args:
        engines: the engines.
    """

    def __init__(self, engines: Sequence[SimulatedEngine]):
        self.engines = list(engines)
        self._loads, self._total, self._least = [0] * len(engines), 0, 0
        self._by_load: dict[int, dict[int, None]] = {0: dict.fromkeys(range(len(engines)))}

    async def sample(self, turn: Turn, home: int | None) -> tuple[int, list[tuple[int, int]]]:
        """Sample a turn on the least loaded engine, or on that of the conversation's last turn.

        Returns:
            Number of the engine, and pairs of a version and the number of tokens that it sampled.
        """
        number = home
        if home is None or self._loads[home] + 1 > _OVERLOAD * (self._total / len(self.engines) + 1):
            number = next(iter(self._by_load[self._least]))
        self._shift(number, 1)
        try:
            return number, await self.engines[number].sample(turn)
        finally:
            self._shift(number, -1)

    def _shift(self, number: int, change: int) -> None:
        """Note that an engine has one request more or less."""
        load = self._loads[number]
        del self._by_load[load][number]
        self._loads[number] = load = load + change
        self._by_load.setdefault(load, {})[number] = None
        self._total += change
        if load < self._least or not self._by_load[self._least]:
            self._least = load
