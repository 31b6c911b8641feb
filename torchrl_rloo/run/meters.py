"""Metrics, counters and timings of the parts of a training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

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
