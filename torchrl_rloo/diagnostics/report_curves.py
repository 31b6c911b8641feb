"""Training curves as a PNG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_rloo.diagnostics.report_panels import ENDS, Panel, choose_panels, panel_names
from torchrl_rloo.runtime.files import atomic_write, make_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_COLORS = ("#1f5fa8", "#c8553d", "#3b8a5a", "#8a5fb0", "#b08a2e", "#4a4a4a")
_LABEL = 80  # characters shown of a metric's name


def plot_curves(history: Sequence[Row], path: str | Path, *, panels: Sequence[Sequence[str]] | None = None) -> Path:
    """Plot training curves as a PNG.

    Args:
        history: one dictionary per entry with ``step`` and metrics. A metric may be missing, None or NaN in some.
        path: PNG file to write; its directory is created if missing.
        panels: metrics of each panel, by name or pattern (``"eval/*"``). None takes the usual RLOO panels, without
            metrics that never change, or one panel per metric if the history has none of them.

    Returns:
        ``path``.

    Raises:
        ValueError: if the history has no finite metric, or none for one of ``panels``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes half a second
    from matplotlib.figure import Figure

    # Choose panels and lay them out in rows of at most three
    names = _numeric_names(history)
    constant = {name for name in names if _is_constant(history, name)}
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


def _numeric_names(history: Sequence[Row]) -> list[str]:
    """Return the metrics with at least one finite value, in order of appearance."""
    names: dict[str, None] = {}
    for entry in history:
        names.update(dict.fromkeys(name for name, value in entry.items() if name != "step" and _is_finite(value)))
    return list(names)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_constant(history: Sequence[Row], name: str) -> bool:
    values = [entry[name] for entry in history if _is_finite(entry.get(name))]
    return len(values) > 1 and min(values) == max(values)


def _draw(axes: Axes, panel: Panel, shown: Sequence[str], names: Sequence[str], history: Sequence[Row]) -> None:
    # Draw a curve for each metric, smoothed where single values are noisy, with a band for its interval
    drawn: list[float] = []
    for index, name in enumerate(shown):
        color, label = _COLORS[index % len(_COLORS)], _label(name)
        entries = [entry for entry in history if _is_finite(entry.get(name))]
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
