"""Metrics of a run in columns, and their values in bins for a picture of any number of steps."""

from __future__ import annotations

import base64
import io
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from torchrl_rloo.diagnostics.watch_files import parse_objects

BINS = 800  # largest number of values of a curve, about the pixels of a wide chart
_NAMES = 4000  # largest number of metrics of a run
_NAME_LENGTH = 300  # characters
LARGEST_STEP = 2**53  # JavaScript represents integers up to here exactly
_LARGEST = float(np.finfo(np.float32).max)
_FAST = 1 << 18  # bytes from which a block is worth the faster parser


class Series:
    """Values of each metric by step, in columns of 16 bytes a value.

    Args:
        generation: first :attr:`generation`.

    Attributes:
        generation: number that changes whenever values that were read before may have changed.
        damaged: number of lines that were no record of a step.
    """

    def __init__(self, generation: int = 0):
        self.generation, self.damaged = generation, 0
        self._steps: dict[str, array] = {}
        self._values: dict[str, array] = {}
        self._ranges: dict[str, tuple[float, float]] = {}  # lowest and highest value
        self._last: dict[str, int] = {}  # last step by source

    @property
    def names(self) -> list[str]:
        """Names of the metrics with a finite value, in order of appearance."""
        return list(self._steps)

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step with a value; None if there is none."""
        if not self._steps:
            return None
        return min(column[0] for column in self._steps.values()), max(column[-1] for column in self._steps.values())

    def clear(self) -> None:
        """Drop all values."""
        self._steps, self._values, self._ranges, self._last, self.damaged = {}, {}, {}, {}, 0
        self.generation += 1

    def add_lines(self, block: bytes, source: str = "") -> None:
        """Add lines of JSON; lines that are no record of a step are counted in :attr:`damaged`.

        Args:
            block: whole lines.
            source: name of the file, as a run has several files with the same steps.
        """
        columns = _read_columns(block) if len(block) >= _FAST else None
        if columns is not None:
            steps, values = columns
            self._note_steps(steps, source)
            for name, column in values.items():
                self._append(name, steps, column)
            return
        records, damaged = parse_objects(block.split(b"\n"))
        self.damaged += damaged
        self.add(records, source)

    def add(self, records: Sequence[Mapping[str, Any]], source: str = "") -> None:
        """Add records with a ``step`` and numbers; other values are ignored, and records without a step counted."""
        kept = [r for r in records if type(r.get("step")) is int and abs(r["step"]) <= LARGEST_STEP]
        self.damaged += len(records) - len(kept)
        # Make columns in the order of the records, as records differ in their names
        columns: dict[str, tuple[list[int], list[Any]]] = {}
        for record in kept:
            for name, value in record.items():
                steps, values = columns.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
        steps, _ = columns.pop("step", ([], []))
        self._note_steps(np.array(steps, dtype=np.int64), source)
        for name, (steps, values) in columns.items():
            self._append(name, np.array(steps, dtype=np.int64), _floats(values))

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a metric, in order of the steps; empty if there is none."""
        steps = np.array(self._steps.get(name, ()), dtype=np.int64)
        values = np.array(self._values.get(name, ()), dtype=np.float64)
        if (steps[1:] < steps[:-1]).any():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        return steps, values

    def last(self, name: str, count: int = 1) -> list[float]:
        """Return the last values of a metric, at most ``count``."""
        return list(self._values.get(name, ())[-count:])

    def is_constant(self, name: str) -> bool:
        """Return whether a metric has several values, and all are equal."""
        low, high = self._ranges[name]
        return low == high and len(self._values[name]) > 1

    def complete_until(self) -> int | None:
        """Return the step from which values may still be added; None before the first."""
        return min(self._last.values(), default=None)

    def bins(
        self, *, low: int | None = None, high: int | None = None, limit: int = BINS, width: int | None = None,
        since: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Return all metrics in bins of equally many steps, as plain data for a page.

        Args:
            low: first step; None takes the first of the run.
            high: last step; None takes the last of the run.
            limit: largest number of bins.
            width: steps of the bins that the page has; None if it has none.
            since: first step that the page lacks. The result has only the bins from there on if ``width`` is still
                right.

        Returns:
            ``width``, ``start`` (first step that the bins replace, None for all), ``xs`` (packed positions) and
            ``series`` by name: index in ``xs``, packed means and, if a bin has several values, lowest and highest.
        """
        if self.steps is None:
            return {"width": 1, "start": None, "xs": [], "series": {}}
        low, high = (given if given is not None else own for given, own in zip((low, high), self.steps, strict=True))
        right = bin_width(low, high, limit)
        start = (since // right) * right if width == right and since is not None else None
        first = low if start is None else max(low, start)
        found, xs, series = {}, [], {}
        for name in self.names:
            steps, values = self._slice(name, first, high)
            if not len(steps):
                continue
            x, mean, least, most = downsample(steps, values, right)
            key = x.tobytes()
            if key not in found:
                found[key] = len(xs)
                xs.append(_pack(x, np.float64))
            series[name] = [found[key], _pack(mean)] + ([_pack(least), _pack(most)] if len(x) < len(steps) else [])
        return {"width": right, "start": start, "xs": xs, "series": series}

    def _slice(self, name: str, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        steps = np.frombuffer(self._steps[name], dtype=np.int64)
        if (steps[1:] < steps[:-1]).any():
            steps, values = self.column(name)
        else:
            values = np.frombuffer(self._values[name], dtype=np.float64)
        begin, end = np.searchsorted(steps, (low, high + 1))
        return steps[begin:end].copy(), values[begin:end].copy()  # a view would lock the columns

    def _note_steps(self, steps: np.ndarray, source: str) -> None:
        if not len(steps):
            return
        last = self._last.get(source)
        if (steps[1:] < steps[:-1]).any() or (last is not None and steps[0] < last):
            self.generation += 1  # an earlier step got a value
        self._last[source] = max(int(steps.max()), steps[0] if last is None else last)

    def _append(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Add the finite values of a metric."""
        finite = np.isfinite(values)
        if not finite.any() or len(name) > _NAME_LENGTH or (name not in self._steps and len(self._steps) >= _NAMES):
            return
        kept = values[finite]
        self._steps.setdefault(name, array("q")).frombytes(steps[finite].tobytes())
        self._values.setdefault(name, array("d")).frombytes(kept.tobytes())
        low, high = self._ranges.get(name, (math.inf, -math.inf))
        self._ranges[name] = min(low, float(kept.min())), max(high, float(kept.max()))


def _floats(values: Iterable[Any]) -> np.ndarray:
    """Return numbers as float64, and NaN for everything else."""
    plain = [value if type(value) is float else _number(value) for value in values]
    return np.array(plain, dtype=np.float64)


def _number(value: Any) -> float:
    try:
        return float(value) if type(value) is int else math.nan
    except OverflowError:
        return math.nan


def _read_columns(block: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """Return steps and columns of numbers of a large block, or None if a line is damaged or of another form."""
    import pyarrow  # imported here because only long runs need it
    from pyarrow import json, types

    try:
        table = json.read_json(io.BytesIO(block))
        steps = table.column("step")
        if not types.is_int64(steps.type) or steps.null_count or len(set(table.column_names)) != table.num_columns:
            return None
        numbers = [f.name for f in table.schema if types.is_integer(f.type) or types.is_floating(f.type)]
        columns = {n: table.column(n).cast("float64").to_numpy() for n in numbers if n != "step"}
        steps = steps.to_numpy()
    except (pyarrow.ArrowException, KeyError, ValueError):
        return None
    return (steps, columns) if np.abs(steps).max(initial=0) <= LARGEST_STEP else None


def bin_width(low: int, high: int, limit: int) -> int:
    """Return the least power of 2 with at most ``limit`` bins from ``low`` to ``high``, and so a stable one.

    Example:
        >>> bin_width(0, 99_999, 800)
        128
    """
    width = 1
    while high // width - low // width + 1 > limit:
        width *= 2
    return width


def downsample(steps: np.ndarray, values: np.ndarray, width: int) -> tuple[np.ndarray, ...]:
    """Return mean step, mean, minimum and maximum of the values in each bin of ``width`` steps.

    Example:
        >>> [part.tolist() for part in downsample(np.array([1, 2, 3, 6]), np.array([1.0, 5.0, 3.0, 7.0]), 4)]
        [[2.0, 6.0], [3.0, 7.0], [1.0, 7.0], [5.0, 7.0]]
    """
    bins = steps // width
    starts = np.flatnonzero(np.concatenate(([True], bins[1:] != bins[:-1])))
    counts = np.diff(np.concatenate((starts, [len(bins)])))
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    with np.errstate(over="ignore"):  # the mean of huge values is clipped to them
        mean = np.clip(np.add.reduceat(values, starts) / counts, low, high)
    return np.add.reduceat(steps.astype(np.float64), starts) / counts, mean, low, high


def _pack(values: np.ndarray, dtype: type = np.float32) -> str:
    """Encode numbers as base64 of their little-endian bytes."""
    if dtype is np.float32:
        values = np.clip(values, -_LARGEST, _LARGEST)
    return base64.b64encode(values.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode("ascii")
