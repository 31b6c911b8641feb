"""Counters of rollout workers, which the driver adds to those of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl.envs import EnvBase

from torchrl_rloo.envs.stepping import transforms_of

Counts = dict[tuple[int, str], int]  # by index of the part and name


def counting_parts(env: EnvBase) -> list[Any]:
    """Return the environment and its transforms that have counters, in an order that all copies share."""
    return [part for part in (getattr(env, "base_env", env), *transforms_of(env)) if hasattr(part, "counts")]


class WorkerCounts:
    """Counters of the parts of a worker since its start. A copied part may start with those of the original.

    Args:
        parts: parts with ``counts``.
    """

    def __init__(self, parts: Sequence[Any]):
        self._parts, self._first = parts, {}
        self._first = self.read()

    def read(self) -> Counts:
        """Return the counters that changed since the start."""
        found = {
            (index, name): number - self._first.get((index, name), 0)
            for index, part in enumerate(self._parts)
            for name, number in dict(part.counts).items()
        }
        return {key: number for key, number in found.items() if number or key[0] == 0}


def add_counts(parts: Sequence[Any], counts: Counts, counted: Mapping[tuple[int, str], int]) -> None:
    """Add what a worker counted since its last report to the same parts of the driver.

    Args:
        parts: parts of the driver, in the order of those of the worker. The first one takes what the driver lacks.
        counts: counters of the worker.
        counted: counters of its last report.
    """
    for (index, name), number in counts.items():
        if new := number - counted.get((index, name), 0):
            part = parts[index if index < len(parts) else 0]
            if hasattr(part, "add_counts"):
                part.add_counts({name: new})
            else:
                part.counts[name] = part.counts.get(name, 0) + new
