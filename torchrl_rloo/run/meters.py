"""Metrics, counters and times of the parts and phases of a step."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torchrl_rloo.runtime.clock import now
from torchrl_rloo.runtime.lookup import snake_case


def meters(*parts: Any) -> dict[str, float]:
    """Gather the metrics of parts: ``part.metrics()``, and ``part.counts`` as ``count/<part>/<name>``.

    Parts without either are ignored. Names of counters start with the name of their part, such as
    ``"tools/python/failed"``; the class's name is added to a name of one word. Two parts are never counted together:
    the names of a second one of the same kind get a number, such as ``feedback_2``.

    Raises:
        ValueError: if parts of different kinds have a counter of the same name.

    Example:
        >>> class Search:
        ...     counts = {"calls": 2}
        >>> meters(Search(), Search(), object())
        {'count/search/calls': 2, 'count/search_2/calls': 2}
    """
    found: dict[str, float] = {}
    kinds: Counter[str] = Counter()
    for part in {id(part): part for part in parts}.values():
        metrics: Callable[[], Mapping[str, float]] | None = getattr(part, "metrics", None)
        found.update(metrics() if callable(metrics) else {})
        if not hasattr(part, "counts"):
            continue
        # Number the parts of a kind in their order, whether or not they have counted anything yet
        kind = getattr(part, "part", type(part).__name__)
        kinds[kind] += 1
        number = "" if kinds[kind] == 1 else f"_{kinds[kind]}"
        for name, count in dict(part.counts).items():  # a copy, because other threads keep counting
            owner, _, rest = (name if "/" in name else f"{snake_case(kind)}/{name}").partition("/")
            if (key := f"count/{owner}{number}/{rest}") in found:
                raise ValueError(
                    f"{type(part).__name__} and a part before it both count {key!r}; rename one of the two"
                )
            found[key] = count
    return found


def timings(*parts: Any) -> dict[str, float]:
    """Gather the timings of parts since their last call, ``part.timings()``; parts without are ignored.

    Example:
        >>> class Search:
        ...     def timings(self):
        ...         return {"time/search": 0.5}
        >>> timings(Search(), object())
        {'time/search': 0.5}
    """
    found: dict[str, float] = {}
    for part in {id(part): part for part in parts}.values():
        take = getattr(part, "timings", None)
        found.update(take() if callable(take) else {})
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its finished children, over all threads."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


class StepTimer:
    """Timer of the wall-clock seconds of named phases of a step."""

    def __init__(self, clock: Callable[[], float] = now):
        self._clock, self._start = clock, clock()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to a phase."""
        start = self._clock()
        try:
            yield
        finally:
            name = f"time/{phase}"
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - start

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase since the last :meth:`take`."""
        return self._phases[f"time/{phase}"]

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase and of the step since the last call, and start the next step."""
        end = self._clock()
        taken = self._phases | {"time/step": end - self._start}
        self._phases, self._start = {}, end
        return taken
