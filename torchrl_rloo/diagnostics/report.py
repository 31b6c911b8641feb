"""Self-contained HTML report of a run, and its summary as JSON and Markdown."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_rloo.diagnostics.pages import read_static, render_page
from torchrl_rloo.diagnostics.report_curves import plot_curves
from torchrl_rloo.diagnostics.report_facts import headline, package_versions, run_facts
from torchrl_rloo.diagnostics.report_health import HEALTH_FILE, HealthEvent, read_events
from torchrl_rloo.diagnostics.report_markdown import markdown_report
from torchrl_rloo.diagnostics.report_panels import select_definitions
from torchrl_rloo.diagnostics.report_verdict import evaluation_changes, verdict
from torchrl_rloo.diagnostics.statistics.evaluation import Interval
from torchrl_rloo.diagnostics.waiting import join_entries
from torchrl_rloo.diagnostics.watch_files import read_last_lines
from torchrl_rloo.diagnostics.watch_page import CHART_SCRIPTS, CHART_STYLES, PAGE_FOLDER, chart_sections
from torchrl_rloo.diagnostics.watch_run import TRANSCRIPT_LINK, describe_waits, transcript_links
from torchrl_rloo.diagnostics.watch_series import BINS, Series
from torchrl_rloo.runtime.files import write_text
from torchrl_rloo.runtime.masking import mask_settings

Row = Mapping[str, Any]

_SAMPLES = 4  # completions shown per step
_EVENTS = 30  # health events shown


def write_report(
    directory: str | Path,
    *,
    history: Sequence[Row],
    summary: Mapping[str, Any],
    timings: Sequence[Row] = (),
    tables: Mapping[str, Sequence[Row]] | None = None,
    definitions: Mapping[str, str] | None = None,
    settings: Mapping[str, Any] | None = None,
    panels: Sequence[Sequence[str]] | None = None,
    figures: Mapping[str, str | Path] | None = None,
    command: str | None = None,
    title: str | None = None,
) -> Path:
    """Write the self-contained page ``report.html``, with ``report.md``, ``curves.png`` and ``summary.json``.

    The page starts with facts of the run and a verdict in two sentences. It also shows events of the health rules and
    links transcripts, if they are in ``directory``.

    Args:
        directory: output directory of the run, created if missing.
        history: one dictionary per entry, see :func:`plot_curves`.
        summary: key figures by name.
        timings: like ``history``, with values that depend on the clock.
        tables: sample completions by table name; the page shows rows of the first and last ``step`` of each.
        definitions: definitions by metric name, in which ``<a|b>`` stands for one of the words and ``<word>`` for any.
            The page shows those of metrics in the history. None shows none.
        settings: configuration of the run, shown last; None shows none.
        panels: metrics of each panel, see :func:`plot_curves`.
        figures: further PNG files by title; None adds none.
        command: command line of the run; its secrets are masked. None shows none.
        title: title of the page. None takes algorithm, task and model of ``settings``.

    Returns:
        Path of the page.

    Raises:
        ValueError: if the history has no finite metric, or none for one of ``panels``.
    """
    # Write curves.png and summary.json
    directory, settings = Path(directory), mask_settings(settings or {})
    curves = plot_curves(history, directory / "curves.png", panels=panels)
    series = Series()
    series.add([dict(row) for row in history], "metrics")
    series.add([dict(row) for row in timings], "timings")
    facts = run_facts(series, settings, command, package_versions())
    record = {**summary, **({"command": facts["Command"]} if command else {})}
    record |= {"settings": settings} if settings else {}
    text = json.dumps(_replace_nan(record), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_text(directory / "summary.json", text + "\n")
    # Judge the run
    title = headline(settings) if title is None else title
    events = read_events(read_last_lines(directory / HEALTH_FILE))[:_EVENTS]
    waits = describe_waits(join_entries(history, timings))
    sentences, changes = verdict(series, events, waits["sentence"] if waits else ""), evaluation_changes(series)
    links = transcript_links(directory)
    write_text(directory / "report.md", markdown_report(title, facts, sentences, changes, events, links))
    # Assemble the page
    charts = chart_sections([series], panels, definitions or {})
    sections = [
        _render_section("Verdict", "\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)),
        _render_section("Run", _render_table(facts)),
        *_render_events(events),
        *_render_changes(changes),
        *_render_summary(summary, changes),
        _render_section("Curves", _render_charts(curves)),
        *_render_waits(waits, sentences),
        *(_render_section(name, _render_image(name, Path(file))) for name, file in (figures or {}).items()),
        *(_render_section(f"Samples: {name}", _render_samples(rows)) for name, rows in (tables or {}).items() if rows),
        *([_render_section("Transcripts", _render_links(links))] if links else []),
    ]
    # Fold what is looked up rather than read
    if charts["constants"]:
        flat = {name: values[0] for name, values in charts["constants"].items()}
        sections.append(_render_folded("Metrics that never changed", _render_table(flat)))
    if shown := select_definitions({name for entry in history for name in entry}, definitions or {}):
        sections.append(_render_folded("Definitions of metrics", _render_table(shown)))
    if settings:
        sections.append(_render_folded("Settings", _render_table(settings)))
    page = render_page(
        read_static(PAGE_FOLDER, ["report.html"]),
        title=title,
        script=read_static(PAGE_FOLDER, (*CHART_SCRIPTS, "report.js")),
        style=read_static(PAGE_FOLDER, (*CHART_STYLES, "report.css")),
        data=charts | {"runs": [{"bins": series.bins(limit=2 * BINS)}]},
        SECTIONS="\n".join(sections),
    )
    return write_text(directory / "report.html", page.replace("\0", "\ufffd"))


def _replace_nan(value: Any) -> Any:
    """Replace values that are not finite, which JSON does not support, by None."""
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _render_section(title: str, content: str) -> str:
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}\n</section>"


def _render_folded(title: str, content: str) -> str:
    return f"<section>\n<details>\n<summary><h2>{html.escape(title)}</h2></summary>\n{content}\n</details>\n</section>"


def _render_charts(curves: Path) -> str:
    return f'<div id="charts" class="charts"></div>\n<noscript>{_render_image("Training curves", curves)}</noscript>'


def _render_image(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def _render_events(events: Sequence[HealthEvent]) -> list[str]:
    notes = []
    for event in events:
        over = event.cleared is not None
        when = f"steps {event.step} to {event.cleared}" if over else f"since step {event.step}"
        name = "over" if over else event.severity
        text = f"{event.rule}, {when}. {event.sentence}"
        notes.append(
            f'<div class="note {name}"><span class="badge">{name}</span>{html.escape(text)} '
            f'<span class="remedy">{html.escape(event.remedy)}</span></div>'
        )
    return [_render_section("Health", "\n".join(notes))] if notes else []


def _render_changes(changes: Sequence[Any]) -> list[str]:
    if not changes:
        return []
    rows = [
        (c.name, f"{_interval(c.first)} at step {c.steps[0]:,}", f"{_interval(c.last)} at step {c.steps[1]:,}")
        + (_interval(c.difference),)
        for c in changes
    ]
    note = "In parentheses: 95 % intervals over the prompts; that of the difference takes both as independent."
    table = _render_grid(("metric", "first", "last", "difference"), rows)
    return [_render_section("Held-out evaluation", f'{table}\n<p class="faint">{note}</p>')]


def _render_summary(summary: Mapping[str, Any], changes: Sequence[Any]) -> list[str]:
    """Render the key figures that the facts and the table of evaluations lack."""
    known = {"cpu_seconds", *(f"{change.name}_{when}" for change in changes for when in ("before", "after"))}
    shown = {name: value for name, value in summary.items() if name not in known}
    return [_render_section("Summary", _render_table(shown))] if shown else []


def _interval(values: Interval) -> str:
    bounds = "" if math.isnan(values.low + values.high) else f" ({values.low:.3g} to {values.high:.3g})"
    return f"{values.mean:.3g}{bounds}"


def _render_waits(waits: Mapping[str, Any] | None, told: Sequence[str]) -> list[str]:
    """Render the table of waits with its sentence, unless that is told above, or nothing without timings."""
    if waits is None:
        return []
    whos = ["", *(row[0] for row in waits["rows"])]
    rows = [("" if who == before else who, *rest) for before, (who, *rest) in zip(whos, waits["rows"], strict=False)]
    sentence = "" if waits["sentence"] in told else f"<p>{html.escape(waits['sentence'])}</p>\n"
    return [_render_section("Who waits for whom", sentence + _render_grid(waits["heads"], rows))]


def _render_grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table whose rows begin with their titles."""
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
    for title, *cells in rows:
        lines.append(f"<th>{html.escape(title)}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="grid">{body}</table></div>'


def _render_links(links: Sequence[Sequence[str]]) -> str:
    return ", ".join(f'<a href="{html.escape(address)}">{html.escape(label)}</a>' for label, address in links)


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
    return "\n".join(_render_card(row) for row in rows[:_SAMPLES])


def _render_card(row: Row) -> str:
    link = row.get("transcript")
    is_link = isinstance(link, str) and TRANSCRIPT_LINK.fullmatch(link)
    shown = {key: row[key] for key in row if key != "step" and not (is_link and key == "transcript")}
    address = f'<p><a href="{link}">transcript, token by token</a></p>' if is_link else ""
    return f'<div class="card">{_render_table(shown)}{address}</div>'
