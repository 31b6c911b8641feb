"""Training curves and self-contained HTML report of a run."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_rloo.files import atomic_write, make_folder, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_COLORS = ("#1f5fa8", "#c8553d", "#3b8a5a", "#8a5fb0", "#b08a2e", "#4a4a4a")
_ENDS = ("low", "high")  # suffixes of the metrics that bound an interval
_LABEL = 80  # characters shown of a metric's name
_SAMPLES = 4  # completions shown per step


@dataclass(frozen=True)
class _Panel:
    """Curves that share axes: metrics that match any of ``patterns``, except those that match ``!pattern``."""

    title: str
    unit: str
    patterns: tuple[str, ...]
    points: bool = False  # mark every value of a metric that is rarely measured
    smoothed: bool = False
    share: bool = False  # show the whole range 0..1 if the values lie in it
    least: int = 1  # smallest number of metrics; with fewer, omit the panel


_DEFAULT_PANELS = (
    _Panel("Mean reward of the batch", "reward", ("reward",), smoothed=True),
    _Panel(
        "Held-out evaluation",
        "score",
        ("eval/*", "!eval/failed", "!eval/abstained", "!eval/tasks/*"),
        points=True,
        share=True,
    ),
    _Panel("Mean score of each reward function", "score", ("rewards/*/mean",), least=2),
    _Panel("Mean reward of each task", "reward", ("tasks/*/reward",)),
    _Panel("Held-out evaluation of each task", "score", ("eval/tasks/*/greedy",), points=True, share=True),
    _Panel("Groups with equal rewards", "share of groups", ("frac_reward_zero_std",), share=True),
    _Panel("Policy entropy", "nats per token", ("entropy",)),
    _Panel("Mean completion length", "tokens", ("completions/mean_length",)),
    _Panel("Gradient norm before clipping", "L2 norm", ("grad_norm",)),
    _Panel("Clipped rows or tokens", "share of rows or tokens", ("clip_ratio/*",)),
    _Panel("Log-prob gap of sampler and trainer", "nats per token", ("parity/mean", "parity/max"), points=True),
    _Panel("KL to the reference policy", "nats", ("kl", "kl/*")),
)


def plot_curves(history: Sequence[Row], path: str | Path, *, panels: Sequence[Sequence[str]] | None = None) -> Path:
    """Plot training curves as a PNG.

    Args:
        history: one dictionary per entry with ``step`` and metrics. A metric may be missing, None or NaN in some.
        path: PNG file to write; its directory is created if missing.
        panels: metrics of each panel, by name or pattern (``"eval/*"``). None takes the usual RLOO panels that the
            history has metrics for, or one panel per metric if it has none of them.

    Returns:
        ``path``.

    Raises:
        ValueError: if the history has no finite metric, or none for one of ``panels``.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes half a second
    from matplotlib.figure import Figure

    # Choose panels and lay them out in rows of at most three
    names = _numeric_names(history)
    chosen = _choose_panels(names, panels)
    columns = min(len(chosen), 3)
    rows = math.ceil(len(chosen) / columns)
    # Draw without pyplot, whose backend and list of open figures are global
    figure = Figure(figsize=(5.0 * columns, 3.2 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    for index, panel in enumerate(chosen):
        _draw(figure.add_subplot(rows, columns, index + 1), panel, names, history)
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


def _choose_panels(names: Sequence[str], panels: Sequence[Sequence[str]] | None) -> list[_Panel]:
    if not names:
        raise ValueError("history has no metric with a finite value; pass at least one")
    if panels is None:
        usual = [panel for panel in _DEFAULT_PANELS if len(_match_names(names, panel.patterns)) >= panel.least]
        return usual or [_Panel(name, "", (name,)) for name in names]
    for patterns in panels:
        if not _match_names(names, patterns):
            raise ValueError(f"panels requires {list(patterns)}, but the history has only {list(names)}")
    return [_Panel(", ".join(patterns), "", tuple(patterns)) for patterns in panels]


def _match_names(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the metrics to draw as lines; interval bounds are drawn as a band instead."""
    bounds = {f"{name}_{end}" for name in names for end in _ENDS}
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return [
        name
        for name in names
        if name not in bounds
        and any(fnmatchcase(name, pattern) for pattern in wanted)
        and not any(fnmatchcase(name, pattern) for pattern in unwanted)
    ]


def _draw(axes: Axes, panel: _Panel, names: Sequence[str], history: Sequence[Row]) -> None:
    # Draw a curve for each metric, smoothed where single values are noisy, with a band for its interval
    drawn: list[float] = []
    for index, name in enumerate(_match_names(names, panel.patterns)):
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
        if all(f"{name}_{end}" in names for end in _ENDS):
            low, high = ([entry.get(f"{name}_{end}", math.nan) for entry in entries] for end in _ENDS)
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


def write_report(
    directory: str | Path,
    *,
    history: Sequence[Row],
    summary: Mapping[str, Any],
    tables: Mapping[str, Sequence[Row]] | None = None,
    definitions: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    panels: Sequence[Sequence[str]] | None = None,
    figures: Mapping[str, str | Path] | None = None,
    title: str = "RLOO run",
) -> Path:
    """Write the self-contained page ``report.html``, with ``curves.png`` and ``summary.json`` next to it.

    Args:
        directory: output directory, created if missing.
        history: one dictionary per entry, see :func:`plot_curves`.
        summary: key figures by name, shown first.
        tables: sample completions by table name; the page shows rows of the first and last ``step`` of each.
        definitions: definitions by metric name, in which ``<a|b>`` stands for one of the words and ``<word>`` for any.
            The page shows those of metrics in the history. None shows none.
        settings: configuration of the run, shown last; None shows none.
        panels: metrics of each panel, see :func:`plot_curves`.
        figures: further PNG files by title; None adds none.
        title: title of the page.

    Returns:
        Path of the page.

    Raises:
        ValueError: if the history has no finite metric, or none for one of ``panels``.
    """
    # Write curves.png and summary.json
    directory = Path(directory)
    curves = plot_curves(history, directory / "curves.png", panels=panels)
    record = {**summary, "settings": settings} if settings else summary
    text = json.dumps(_replace_nan(record), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_text(directory / "summary.json", text + "\n")
    # Assemble the page
    sections = [
        _render_section("Summary", _render_table(summary)),
        _render_section("Curves", _render_image("Training curves", curves)),
        *(_render_section(name, _render_image(name, Path(file))) for name, file in (figures or {}).items()),
        *(_render_section(f"Samples: {name}", _render_samples(rows)) for name, rows in (tables or {}).items() if rows),
    ]
    if shown := _select_definitions(history, definitions or {}):
        sections.append(_render_section("Definitions of metrics", _render_table(shown)))
    if settings:
        sections.append(_render_section("Settings", _render_table(settings)))
    parts = {"TITLE": html.escape(title), "POLICY": _POLICY, "SECTIONS": "\n".join(sections)}
    text = re.sub("|".join(f"%{name}%" for name in parts), lambda found: parts[found[0].strip("%")], _PAGE)
    return write_text(directory / "report.html", text.replace("\0", "\ufffd"))


def _select_definitions(history: Sequence[Row], definitions: Mapping[str, str]) -> dict[str, str]:
    names = {name for entry in history for name in entry}

    def pattern(name: str) -> str:
        parts = re.split(r"(<.*?>)", name)
        words = (f"({p[1:-1]})" if "|" in p else "[^/]+" if p.startswith("<") else re.escape(p) for p in parts)
        return "".join(words)

    return {k: text for k, text in definitions.items() if any(re.fullmatch(pattern(k), name) for name in names)}


def _replace_nan(value: Any) -> Any:
    """Replace values that are not finite, which JSON does not support, by None."""
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _render_section(title: str, content: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}\n</section>"


def _render_image(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def _render_table(pairs: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{html.escape(str(name))}</th><td>{_render_cell(value)}</td></tr>" for name, value in pairs.items()
    )
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _render_cell(value: Any) -> str:
    """Render a value as escaped HTML, since a completion may contain markup."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and set(value) == {"role", "content"}:
        return f"<b>{html.escape(str(value['role']))}</b> {_render_cell(value['content'])}"
    if isinstance(value, Mapping):
        return _render_table(value)
    if isinstance(value, (list, tuple)):
        return "<br>".join(map(_render_cell, value))
    return f"<span>{html.escape(str(value))}</span>"


def _render_samples(rows: Sequence[Row]) -> str:
    steps = sorted({row["step"] for row in rows if "step" in row})
    if not steps:
        return _render_cards(rows)
    parts = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        parts.append(f"<h3>At step {step}</h3>\n{_render_cards([row for row in rows if row.get('step') == step])}")
    return '<div class="compare">\n' + "\n".join(f"<div>{part}</div>" for part in parts) + "\n</div>"


def _render_cards(rows: Sequence[Row]) -> str:
    return "\n".join(_render_table({key: row[key] for key in row if key != "step"}) for row in rows[:_SAMPLES])


_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="%POLICY%">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2em auto;
       padding: 0 1em; }
h1 { font-size: 1.6em; }
h2 { font-size: 1.2em; border-bottom: 1px solid #ddd; padding-bottom: .2em; margin-top: 2em; }
h3 { font-size: 1em; }
img { max-width: 100%; }
table { border-collapse: collapse; margin-bottom: 1em; }
th, td { text-align: left; vertical-align: top; padding: .25em .8em .25em 0; border-bottom: 1px solid #eee; }
th { font-weight: 600; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
td span { white-space: pre-wrap; }
.compare { display: grid; grid-template-columns: repeat(auto-fit, minmax(24em, 1fr)); gap: 0 2em; }
.compare table { width: 100%; background: #f7f7f7; }
.compare th, .compare td { padding: .25em .6em; border: 0; }
.compare th { width: 1%; }
.compare span { font-family: ui-monospace, monospace; font-size: .9em; }
</style>
</head>
<body>
<h1>%TITLE%</h1>
%SECTIONS%
</body>
</html>
"""
