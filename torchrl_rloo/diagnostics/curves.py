"""Curves of a run: metrics by step, panels that share axes, their picture, and their data for a page."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrl_rloo.runtime.files import atomic_write, make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

ENDS = ("low", "high")  # suffixes of the metrics that bound an interval
_DETAILS = ("_length", "_clipped_ratio", "sampled_entropy", "sampled_kl", "sampled_distinct")
_DETAILS += ("sampled_distinct_answers", "sampled_ngram_overlap", "/failed", "/abstained")
EVAL_DETAILS = tuple(f"eval/*{end}" for end in _DETAILS)  # held-out metrics that are no scores
_BINS = 1600  # largest number of values of a curve in a page
_LARGEST = float(np.finfo(np.float32).max)
_COLORS = ("#1f5fa8", "#c8553d", "#3b8a5a", "#8a5fb0", "#b08a2e", "#4a4a4a")
_LABEL = 80  # characters shown of a metric's name


class Series:
    """Finite values of each metric by step, from several lists of entries with ``step``."""

    def __init__(self, *histories: Sequence[Row]):
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for entry in (entry for history in histories for entry in history):
            for name, value in entry.items():
                if name != "step" and is_finite(value):
                    steps, values = columns.setdefault(name, ([], []))
                    steps.append(entry["step"])
                    values.append(float(value))
        self._columns = {name: _sorted(*column) for name, column in columns.items()}

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

    def bins(self) -> dict[str, Any]:
        """Return the values in bins of equal width for the charts of a page, packed.

        ``series`` has, by name, the index of its positions in ``xs``, packed means and, if a bin has several values,
        the lowest and the highest.
        """
        if self.steps is None:
            return {"width": 1, "start": None, "xs": [], "series": {}}
        width = bin_width(*self.steps, _BINS)
        places, xs, series = {}, [], {}
        for name, (steps, values) in self._columns.items():
            x, mean, least, most = downsample(steps, values, width)
            place = places.setdefault(x.tobytes(), len(xs))
            if place == len(xs):
                xs.append(_pack(x, np.float64))
            series[name] = [place, _pack(mean)] + ([_pack(least), _pack(most)] if len(x) < len(steps) else [])
        return {"width": width, "start": None, "xs": xs, "series": series}


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and abs(value) <= np.finfo(np.float64).max


def _sorted(steps: list[int], values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.array(steps, dtype=np.int64), kind="stable")
    return np.array(steps, dtype=np.int64)[order], np.array(values)[order]


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


def define(names: Iterable[str], definitions: Mapping[str, str]) -> dict[str, str]:
    """Return the definition of each metric by its own name, for those that have one."""
    patterns = [(re.compile(_pattern(k)), text) for k, text in definitions.items()]
    found = ((name, next((text for p, text in patterns if p.fullmatch(name)), None)) for name in names)
    return {name: text for name, text in found if text is not None}


def _pattern(name: str) -> str:
    parts = re.split(r"(<[^<>]*>)", name)
    return "".join(
        f"({p[1:-1]})" if p.startswith("<") and "|" in p else "[^/]+" if p.startswith("<") else re.escape(p)
        for p in parts
    )


def chart_data(
    series: Series, panels: Sequence[Sequence[str]] | None, definitions: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the charts of a page show: panels, definitions of metrics, metrics that never change, and values."""
    names = series.names
    constant = {name for name in names if series.is_constant(name)}
    chosen = choose_panels(names, panels, constant)
    shown = [
        {"title": p.title, "unit": p.unit, "names": panel_names(names, p, constant) or panel_names(names, p)}
        | {"points": p.points, "smoothed": p.smoothed, "share": p.share}
        for p in chosen
    ]
    flat = constant - {name for panel in shown for name in panel["names"]} - interval_bounds(names)
    return {
        "panels": shown,
        "definitions": define(names, definitions),
        "constants": {name: [series.column(name)[1][0]] for name in names if name in flat},
        "runs": [{"bins": series.bins()}],
    }


# Picture


def plot_curves(history: Sequence[Row], path: str | Path, *, panels: Sequence[Sequence[str]] | None = None) -> Path:
    """Plot training curves as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes half a second
    from matplotlib.figure import Figure

    # Choose panels and lay them out in rows of at most three
    names = list(dict.fromkeys(n for row in history for n, value in row.items() if n != "step" and is_finite(value)))
    series = Series(history)
    constant = {name for name in names if series.is_constant(name)}
    chosen = choose_panels(names, panels, constant)
    columns = min(len(chosen), 3)
    rows = math.ceil(len(chosen) / columns)
    # Draw without pyplot, whose backend and list of open figures are global
    figure = Figure(figsize=(5.0 * columns, 3.2 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for index, panel in enumerate(chosen):
        shown = panel_names(names, panel, constant) or panel_names(names, panel)
        _draw(figure.add_subplot(rows, columns, index + 1), panel, shown, names, history)
    return save_figure(figure, Path(path))


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure as a PNG, create its directory if missing, and return the path."""
    make_folder(path.parent)
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _draw(axes: Axes, panel: Panel, shown: Sequence[str], names: Sequence[str], history: Sequence[Row]) -> None:
    # Draw a curve for each metric, smoothed where single values are noisy, with a band for its interval
    drawn: list[float] = []
    for index, name in enumerate(shown):
        color, label = _COLORS[index % len(_COLORS)], _label(name)
        entries = [entry for entry in history if is_finite(entry.get(name))]
        steps, values = [entry["step"] for entry in entries], [entry[name] for entry in entries]
        drawn += values
        if panel.smoothed and len(values) >= 10:
            window = max(3, len(values) // 20)
            axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.35, label=label)
            axes.plot(steps, _running_mean(values, window), color=color, linewidth=2, label=f"mean of last {window}")
        else:
            marker = "o" if panel.points or len(values) < 10 else None
            axes.plot(steps, values, color=color, linewidth=1.4, marker=marker, markersize=4, label=label)
        if all(f"{name}_{end}" in names for end in ENDS):
            low, high = ([entry.get(f"{name}_{end}", math.nan) for entry in entries] for end in ENDS)
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    # Scale, label and style the axes
    if panel.share and 0 <= min(drawn) and max(drawn) <= 1:
        axes.set_ylim(-0.03, 1.03)
    else:
        axes.margins(y=0.12)
    axes.set_title(_label(panel.title), fontsize=11, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(panel.unit)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": 2} if len(axes.lines) > 3 else {}
    axes.legend(fontsize=8, frameon=True, framealpha=0.85, edgecolor="none", **place)
    _style(axes, [entry["step"] for entry in history])


def _label(name: str) -> str:
    """Return a name as Matplotlib shows it: no formula, no control characters, not hidden by an underscore."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in name[:_LABEL]).replace("$", r"\$")
    return f" {text}" if text[:1] in ("_", "") else text


def _style(axes: Axes, steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    pad = 0.02 * (max(steps) - min(steps)) or 0.5
    axes.set_xlim(min(steps) - pad, max(steps) + pad)  # equal in all panels
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Average each value with up to ``window - 1`` values before it."""
    return [math.fsum(values[max(0, end - window) : end]) / min(end, window) for end in range(1, len(values) + 1)]
