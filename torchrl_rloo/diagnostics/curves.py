"""Curves of a run: metrics by step, panels that share axes, and their pictures as SVG."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

Row = Mapping[str, Any]

ENDS = ("low", "high")  # suffixes of the metrics that bound an interval
_DETAILS = ("_length", "_clipped_ratio", "sampled_entropy", "sampled_kl", "sampled_distinct")
_DETAILS += ("sampled_distinct_answers", "sampled_ngram_overlap", "/failed", "/abstained")
EVAL_DETAILS = (
    "eval/failed",
    "eval/abstained",
    *(f"eval/*{end}" for end in _DETAILS),
)  # held-out metrics that are no scores
_LARGEST = float(np.finfo(np.float32).max)


class Series:
    """Finite values of each metric by step, from several lists of entries with ``step``."""

    def __init__(self, *histories: Sequence[Row]):
        columns: dict[str, dict[int, float]] = {}
        for entry in (entry for history in histories for entry in history):
            for name, value in entry.items():
                if name != "step" and is_finite(value):
                    columns.setdefault(name, {})[entry["step"]] = float(value)
        self._columns = {
            name: (np.array(sorted(column), dtype=np.int64), np.array([column[step] for step in sorted(column)]))
            for name, column in columns.items()
        }

    @property
    def names(self) -> list[str]:
        """Names of the metrics with a finite value, in order of appearance."""
        return list(self._columns)

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step with a value; None if there is none."""
        ends = [(int(steps[0]), int(steps[-1])) for steps, _ in self._columns.values()]
        return (min(first for first, _ in ends), max(last for _, last in ends)) if ends else None

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a metric, in order of the steps; empty if there is none."""
        return self._columns.get(name, (np.zeros(0, dtype=np.int64), np.zeros(0)))

    def is_constant(self, name: str) -> bool:
        """Return whether a metric has several values, and all are equal."""
        values = self.column(name)[1]
        return len(values) > 1 and values.min() == values.max()


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and abs(value) <= np.finfo(np.float64).max


# Panels


@dataclass(frozen=True)
class Panel:
    """Curves that share axes: metrics that match any of ``patterns``, except those that match ``!pattern``."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    points: bool = False  # mark every value of a metric that is rarely measured
    smoothed: bool = False
    share: bool = False  # show the whole range 0..1 if the values lie in it
    least: int = 1  # smallest number of metrics; with fewer, omit the panel
    constant: bool = False  # keep metrics that never change, as that is news


_DEFAULT_PANELS = (
    Panel("Mean reward of the batch", "reward", ("reward",), smoothed=True, constant=True),
    Panel(
        "Held-out evaluation",
        "score",
        ("eval/greedy", "eval/*", *(f"!{name}" for name in EVAL_DETAILS), "!eval/tasks/*", "!eval/*/tasks/*"),
        points=True,
        share=True,
        constant=True,
    ),
    Panel("Mean score of each reward function", "score", ("rewards/*/mean",), least=2),
    Panel("Mean reward of each task", "reward", ("tasks/*/reward",)),
    Panel("Mean reward of each role", "reward", ("roles/*/reward",)),
    Panel("Held-out entropy and KL", "nats per token", ("eval/*sampled_entropy", "eval/*sampled_kl"), points=True),
    Panel(
        "Held-out diversity of a prompt's samples",
        "share",
        ("eval/*sampled_distinct*", "eval/*sampled_ngram_overlap"),
        points=True,
        share=True,
    ),
    Panel("Held-out evaluation of each task", "score", ("eval/tasks/*/greedy",), points=True, share=True),
    Panel("Groups with equal rewards", "share of groups", ("frac_reward_zero_std",), share=True),
    Panel("Policy entropy", "nats per token", ("entropy",)),
    Panel("Mean completion length", "tokens", ("completions/mean_length", "eval/*_length")),
    Panel("Truncated completions", "share of rows", ("completions/clipped_ratio", "eval/*_clipped_ratio"), share=True),
    Panel("Gradient norm before clipping", "L2 norm", ("grad_norm",)),
    Panel("Clipped rows or tokens", "share of rows or tokens", ("clip_ratio/region_mean", "clip_ratio/*")),
    Panel("Log-prob gap of sampler and trainer", "nats per token", ("parity/mean", "parity/max"), points=True),
    Panel("KL to the reference policy", "nats", ("kl", "kl/*")),
    Panel("Staleness of the rows", "policy versions", ("staleness",)),
    Panel("Time of a step", "seconds", ("time/step", "time/collect", "time/train", "time/sync", "time/eval")),
    Panel("Sampled tokens", "tokens per second", ("tokens_per_second",)),
)


def choose_panels(
    names: Sequence[str], panels: Sequence[Sequence[str]] | None, constant: Collection[str] = ()
) -> list[Panel]:
    """Return the panels to draw.

    Example:
        >>> [panel.title for panel in choose_panels(["reward", "entropy", "grad_norm"], None, constant=["entropy"])]
        ['Mean reward of the batch', 'Gradient norm before clipping']
    """
    if not names:
        raise ValueError("history has no metric with a finite value; pass at least one")
    if panels is None:
        moving = [name for name in names if name not in constant]
        usual = [p for p in _DEFAULT_PANELS if len(panel_names(names, p, constant)) >= p.least]
        return usual or [Panel(name, "", (name,)) for name in match_names(moving or names, ("*",))]
    for patterns in panels:
        if not match_names(names, patterns):
            raise ValueError(f"panels requires {list(patterns)}, but the history has only {list(names)}")
    return [Panel(", ".join(patterns), "", tuple(patterns), constant=True) for patterns in panels]


def panel_names(names: Sequence[str], panel: Panel, constant: Collection[str] = ()) -> list[str]:
    """Return the metrics that a panel draws as lines, in the order of its patterns."""
    found = match_names(names, panel.patterns)
    found = found if panel.constant else [name for name in found if name not in constant]
    place = {name: next(i for i, p in enumerate(panel.patterns) if fnmatchcase(name, p)) for name in found}
    return sorted(found, key=place.get)


def match_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the metrics to draw as lines; interval bounds are drawn as a band instead."""
    bounds = interval_bounds(names)
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return [
        name
        for name in names
        if name not in bounds
        and any(fnmatchcase(name, pattern) for pattern in wanted)
        and not any(fnmatchcase(name, pattern) for pattern in unwanted)
    ]


def interval_bounds(names: Iterable[str]) -> set[str]:
    """Return the names among ``names`` that bound the interval of another one."""
    names = set(names)
    return {bound for name in names for end in ENDS if (bound := f"{name}_{end}") in names}


def select_definitions(names: Collection[str], definitions: Mapping[str, str]) -> dict[str, str]:
    """Return the definitions of the metrics in ``names``, by name as defined, such as ``stop/<reason>``."""
    found = ((k, text, re.compile(_pattern(k))) for k, text in definitions.items())
    return {k: text for k, text, pattern in found if any(pattern.fullmatch(name) for name in names)}


def _pattern(name: str) -> str:
    parts = re.split(r"(<[^<>]*>)", name)
    return "".join(
        f"({p[1:-1]})" if p.startswith("<") and "|" in p else "[^/]+" if p.startswith("<") else re.escape(p)
        for p in parts
    )


# Pictures


_WIDTH, _HEIGHT = 420, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 10, 8, _HEIGHT - 22  # edges of the axes
_BINS = 400  # largest number of places of a curve
_COLORS = 8  # classes of colors in the style


def render_charts(series: Series, panels: Sequence[Sequence[str]] | None) -> tuple[str, dict[str, float]]:
    """Return the panels as HTML, and the metrics outside of them that never change, with their values."""
    names = series.names
    constant = {name for name in names if series.is_constant(name)}
    chosen = [(panel, panel_names(names, panel, constant)) for panel in choose_panels(names, panels, constant)]
    charts = [_chart(series, panel, shown or panel_names(names, panel)) for panel, shown in chosen]
    flat = constant - {name for _, shown in chosen for name in shown} - interval_bounds(names)
    return "\n".join(charts), {name: float(series.column(name)[1][0]) for name in names if name in flat}


@dataclass(frozen=True)
class _Curve:
    """Positions, values and bounds of a line."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


def _curve(series: Series, name: str) -> _Curve:
    """Return a metric with the bounds of its interval, or of its values in each bin of steps."""
    steps, values = series.column(name)
    values = np.clip(values, -_LARGEST, _LARGEST)
    width = bin_width(int(steps[0]), int(steps[-1]), _BINS)
    if len(steps) > _BINS:
        return _Curve(*downsample(steps, values, width))
    ends = [series.column(f"{name}_{end}") for end in ENDS]
    if all(np.array_equal(its_steps, steps) for its_steps, _ in ends):
        return _Curve(steps, values, *(np.clip(bound, -_LARGEST, _LARGEST) for _, bound in ends))
    return _Curve(steps, values)


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
    mean = np.add.reduceat(values, starts) / counts
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return np.add.reduceat(steps.astype(np.float64), starts) / counts, mean, low, high


def _chart(series: Series, panel: Panel, names: Sequence[str]) -> str:
    """Return a panel: a picture, and a legend with the last value of each curve."""
    curves = [_curve(series, name) for name in names]
    ranges = [part for curve in curves for part in (curve.y, curve.low, curve.high) if part is not None]
    low, high = min(float(part.min()) for part in ranges), max(float(part.max()) for part in ranges)
    if panel.share and low >= 0 and high <= 1:
        low, high = -0.02, 1.02
    else:
        pad = 0.08 * (high - low) or 0.1 * abs(high) or 0.5
        low, high = low - pad, high + pad
    first, last = series.steps
    pad = 0.01 * (last - first) or 0.5
    axes = _Axes(first - pad, last + pad, low, high)
    lines = [_line(curve, axes, panel, number % _COLORS) for number, curve in enumerate(curves)]
    legend = "".join(
        f'<li class="c{number % _COLORS}"><b></b>{html.escape(name)} <span>{_figure(series.column(name)[1][-1])}</span>'
        "</li>"
        for number, name in enumerate(names)
    )
    title = html.escape(panel.title)
    return (
        f'<figure class="chart"><figcaption><strong>{title}</strong><span class="unit">{html.escape(panel.unit)}</span>'
        f'</figcaption>\n<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{axes.grid()}'
        f"{''.join(lines)}</svg>\n<ul>{legend}</ul></figure>"
    )


@dataclass(frozen=True)
class _Axes:
    """Ranges of a picture, and its grid."""

    first: float
    last: float
    low: float
    high: float

    def points(self, x: np.ndarray, y: np.ndarray) -> list[str]:
        """Return the places of values as texts."""
        across = _LEFT + (x - self.first) / (self.last - self.first) * (_RIGHT - _LEFT)
        down = _BOTTOM - (y - self.low) / (self.high - self.low) * (_BOTTOM - _TOP)
        return [f"{a:.1f},{b:.1f}" for a, b in zip(across.tolist(), down.tolist(), strict=True)]

    def grid(self) -> str:
        """Return lines and numbers of both axes."""
        marks = []
        for step in _ticks(self.first, self.last, 6, least=1.0):
            (place,) = self.points(np.array([step]), np.array([self.low]))
            marks.append(f'<text class="middle" x="{place.partition(",")[0]}" y="{_HEIGHT - 6}">{step:,.0f}</text>')
        for value in _ticks(self.low, self.high, 5):
            (place,) = self.points(np.array([self.first]), np.array([value]))
            y = float(place.partition(",")[2])
            marks.append(f'<path class="grid" d="M{_LEFT},{y}H{_RIGHT}"/>')
            marks.append(f'<text class="end" x="{_LEFT - 5}" y="{y + 3.5:.1f}">{_figure(value)}</text>')
        return "".join(marks)


def _ticks(low: float, high: float, count: int, least: float = 0.0) -> list[float]:
    """Return at most ``count`` round numbers between two others."""
    size = 10.0 ** math.floor(math.log10((high - low) / count))
    size = max(least, next(size * f for f in (1, 2, 5, 10) if (high - low) / (size * f) <= count))
    return [size * i for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def _line(curve: _Curve, axes: _Axes, panel: Panel, color: int) -> str:
    """Return a curve with its band, with marks where values are few, and smoothed where single values are noisy."""
    parts, places = [], axes.points(curve.x, curve.y)
    if curve.low is not None:
        band = axes.points(curve.x, curve.high) + axes.points(curve.x, curve.low)[::-1]
        parts.append(f'<path class="band" d="M{" ".join(band)}Z"/>')
    if smooth := panel.smoothed and len(places) >= 10:
        means = _running_mean(curve.y, max(3, len(places) // 20))
        parts.append(f'<path class="line" d="M{" ".join(axes.points(curve.x, means))}"/>')
    parts.append(f'<path class="{"noisy" if smooth else "line"}" d="M{" ".join(places)}"/>')
    if panel.points or len(places) < 10:
        for place, step, value in zip(places, curve.x.tolist(), curve.y.tolist(), strict=True):
            x, y = place.split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5"><title>step {step:g}: {_figure(value)}</title></circle>')
    return f'<g class="c{color}">{"".join(parts)}</g>'


def _figure(value: float) -> str:
    return f"{value + 0.0:.4g}" if abs(value) < 1e6 else f"{value:.2g}"


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Average each value with up to ``window - 1`` values before it."""
    return np.array([values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)])
