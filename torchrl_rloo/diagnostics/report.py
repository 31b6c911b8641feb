"""Self-contained HTML report of a run with a verdict, and its summary as JSON."""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrl_rloo.diagnostics.curves import EVAL_DETAILS, Series, match_names, render_charts, select_definitions
from torchrl_rloo.diagnostics.pages import read_static, render_page
from torchrl_rloo.diagnostics.waiting import Waits, join_entries, summarize_waits
from torchrl_rloo.functional.statistics import Interval
from torchrl_rloo.images.parts import image_label
from torchrl_rloo.images.shown import thumbnail
from torchrl_rloo.runtime.files import SAFE_FLAGS, make_folder, write_text
from torchrl_rloo.runtime.masking import mask_command, mask_settings

Row = Mapping[str, Any]

LAUNCH_FILE = "launch.json"
_FOLDER = Path(__file__).parent / "report_page"
_REFRESH = '<meta http-equiv="refresh" content="20">'  # of the page of an unfinished run
_SAMPLES = 4  # completions shown per step
_PICTURES = 8  # images shown of a completion
_EVENTS = 30  # health events shown
_LINKS = 50  # transcripts linked
_PACKAGES = ("torchrl_rloo", "torch", "torchrl", "tensordict", "transformers", "vllm", "ray", "peft")
_RECENT = 20  # steps of which the speed is the median
_TRANSCRIPT = re.compile(r"[\w.-]{1,100}\.html")  # names of the pages that are linked
_TRANSCRIPT_LINK = re.compile(r"transcripts/[\w.-]{1,100}\.html#row=\d{1,9}")
HEALTH_FILE = "health.jsonl"
SEVERITIES = ("stop", "warn", "info")  # most urgent first
_LONGEST = 1000  # characters of a sentence
_TAIL = 1 << 18  # bytes of the file that are read
_LEAST = 10  # steps from which rewards are compared
_HEADLINES = ("eval/greedy", "eval/sampled")


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
    finished: bool = True,
) -> Path:
    """Write the self-contained page ``report.html``, with ``summary.json``.

    The page starts with a verdict in two sentences and facts of the run. It also shows events of the health rules and
    links transcripts, if they are in ``directory``. The page of an unfinished run reloads itself, and comes without
    the other file.

    Args:
        directory: output directory of the run, created if missing.
        history: one dictionary per entry, with ``step`` and metrics.
        summary: key figures by name.
        timings: like ``history``, with values that depend on the clock.
        tables: sample completions by table name; the page shows rows of the first and last ``step`` of each.
        definitions: definitions by metric name, in which ``<a|b>`` stands for one of the words and ``<word>`` for any.
            The page shows those of metrics in the history. None shows none.
        settings: configuration of the run, shown last; None shows none.
        panels: metrics of each panel, with ``*`` for any text and ``!`` before those to leave out. None takes the
            usual panels that the history has metrics for.
        figures: PNG files by title; None adds none.
        command: command line of the run; its secrets are masked. None shows none.
        title: title of the page. None takes algorithm, task and model of ``settings``.
        finished: False while the run continues.

    Returns:
        Path of the page.

    Raises:
        ValueError: if the history has no finite metric, or none for one of ``panels``.
    """
    directory, settings = Path(directory), mask_settings(settings or {})
    make_folder(directory)
    series = Series(history, timings)
    charts, flat = render_charts(series, panels)
    facts = run_facts(series, settings, command)
    # Judge the run
    title = headline(settings) if title is None else title
    events = read_health(directory / HEALTH_FILE)[:_EVENTS]
    waits = summarize_waits(join_entries(history, timings))
    sentences, changes = verdict(series, events, waits.sentence if waits else ""), evaluation_changes(series)
    links = transcript_links(directory)
    if finished:
        record = {**summary, **({"command": facts["Command"]} if command else {})}
        record |= {"settings": settings} if settings else {}
        text = json.dumps(_replace_nan(record), indent=2, ensure_ascii=False, allow_nan=False, default=str)
        write_text(directory / "summary.json", text + "\n")
    # Assemble the page; what is looked up rather than read is folded
    told = {"cpu_seconds", *(f"{change.name}_{when}" for change in changes for when in ("before", "after"))}
    shown = {name: value for name, value in summary.items() if name not in told}
    logged = {name for entry in (*history, *timings) for name in entry}
    folded = {
        "Metrics that never changed": flat,
        "Definitions of metrics": select_definitions(logged, definitions or {}),
        "Settings": settings,
    }
    sections = [
        _section("Verdict", "\n".join(f"<p>{html.escape(sentence)}</p>" for sentence in sentences)),
        _section("Run", _table(facts)),
        _section("Health", "\n".join(map(_event, events))) if events else "",
        _section("Held-out evaluation", _changes(changes)) if changes else "",
        _section("Summary", _table(shown)) if shown else "",
        _section("Curves", f'<div class="charts">\n{charts}\n</div>'),
        _section("Who waits for whom", _waits(waits, sentences)) if waits else "",
        *(_section(name, _image(name, Path(file))) for name, file in (figures or {}).items()),
        *(_section(f"Samples: {name}", _samples(rows)) for name, rows in (tables or {}).items() if rows),
        _section("Transcripts", _links(links)) if links else "",
        *(_section(name, _table(pairs), folded=True) for name, pairs in folded.items() if pairs),
    ]
    page = render_page(
        read_static(_FOLDER, ["report.html"]),
        title=title,
        style=read_static(_FOLDER, ["report.css"]),
        REFRESH="" if finished else _REFRESH,
        SECTIONS="\n".join(filter(None, sections)),
    )
    return write_text(directory / "report.html", page.replace("\0", "\ufffd"))


def _replace_nan(value: Any) -> Any:
    """Replace values that are not finite, which JSON does not support, by None."""
    if isinstance(value, Mapping):
        return {str(key): _replace_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Sections of the page; each function escapes the texts that it gets


def _section(title: str, content: str, folded: bool = False) -> str:
    head = f"<h2>{html.escape(title)}</h2>"
    if folded:
        return f"<section>\n<details>\n<summary>{head}</summary>\n{content}\n</details>\n</section>"
    return f"<section>\n{head}\n{content}\n</section>"


def _image(name: str, file: Path) -> str:
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def _event(event: HealthEvent) -> str:
    over = event.cleared is not None
    when = f"steps {event.step} to {event.cleared}" if over else f"since step {event.step}"
    name, text = "over" if over else event.severity, f"{event.rule}, {when}. {event.sentence}"
    return (
        f'<div class="note {name}"><span class="badge">{name}</span>{html.escape(text)} '
        f'<span class="remedy">{html.escape(event.remedy)}</span></div>'
    )


def _changes(changes: Sequence[Change]) -> str:
    rows = []
    for change in changes:
        ends = zip((change.first, change.last), change.steps, strict=True)
        shown = [f"{_interval(values)} at step {step:,}" for values, step in ends]
        rows.append([change.name, *shown, _interval(change.difference)])
    note = "In parentheses: 95 % intervals over the prompts; that of the difference takes both as independent."
    return f'{_grid(("metric", "first", "last", "difference"), rows)}\n<p class="faint">{note}</p>'


def _interval(values: Interval) -> str:
    bounds = "" if math.isnan(values.low + values.high) else f" ({values.low:.3g} to {values.high:.3g})"
    return f"{values.mean:.3g}{bounds}"


def _waits(waits: Waits, told: Sequence[str]) -> str:
    """Render the table of waits with its sentence, unless the verdict has told it."""
    whos = ["", *(row[0] for row in waits.rows)]
    rows = [("" if who == before else who, *rest) for before, (who, *rest) in zip(whos, waits.rows, strict=False)]
    sentence = "" if waits.sentence in told else f"<p>{html.escape(waits.sentence)}</p>\n"
    return sentence + _grid(("who", "does", "share or number"), rows)


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table whose rows begin with their titles."""
    lines = ["".join(f"<th>{html.escape(head)}</th>" for head in heads)]
    for title, *cells in rows:
        lines.append(f"<th>{html.escape(title)}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table class="grid">{body}</table></div>'


def _links(links: Sequence[Sequence[str]]) -> str:
    return ", ".join(f'<a href="{html.escape(address)}">{html.escape(label)}</a>' for label, address in links)


def _table(pairs: Mapping[str, Any]) -> str:
    rows = (f"<tr><th>{html.escape(str(name))}</th><td>{_cell(value)}</td></tr>" for name, value in pairs.items())
    return "<table>\n" + "\n".join(rows) + "\n</table>"


def _cell(value: Any) -> str:
    """Render a value as escaped HTML, since a completion may contain markup."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping) and value.get("type") == "image" and isinstance(value.get("url"), str):
        return _picture(value["url"])
    if isinstance(value, Mapping) and set(value) == {"role", "content"}:
        return f"<b>{html.escape(str(value['role']))}</b> {_cell(value['content'])}"
    if isinstance(value, Mapping):
        return _table(value)
    if isinstance(value, (list, tuple)):
        return "<br>".join(map(_cell, value))
    return f"<span>{html.escape(str(value))}</span>"


def _picture(path: str) -> str:
    """Render an image of a store as a thumbnail, or as a text if it is missing or changed."""
    label, small = html.escape(image_label(path)), thumbnail(path)
    return f'<img src="{small}" alt="{label}" title="{label}">' if small else f"<span>{label}, cannot be shown</span>"


def _samples(rows: Sequence[Row]) -> str:
    steps = sorted({row["step"] for row in rows if "step" in row})
    if not steps:
        return "\n".join(map(_card, rows[:_SAMPLES]))
    parts = []
    for step in dict.fromkeys((steps[0], steps[-1])):
        cards = [_card(row) for row in rows if row.get("step") == step][:_SAMPLES]
        parts.append(f"<div><h3>At step {step}</h3>\n" + "\n".join(cards) + "</div>")
    return '<div class="compare">\n' + "\n".join(parts) + "\n</div>"


def _card(row: Row) -> str:
    link = row.get("transcript")
    is_link = isinstance(link, str) and _TRANSCRIPT_LINK.fullmatch(link)
    shown = {key: row[key] for key in row if key != "step" and not (is_link and key == "transcript")}
    if isinstance(images := row.get("images"), list) and all(isinstance(path, str) for path in images):
        shown["images"] = [{"type": "image", "url": path} for path in images[:_PICTURES]]
    address = f'<p><a href="{link}">transcript, token by token</a></p>' if is_link else ""
    return f'<div class="card">{_table(shown)}{address}</div>'


# Facts


def headline(settings: Mapping[str, Any]) -> str:
    """Return a title with algorithm, task and model, for those that the settings name.

    Example:
        >>> headline({"task": {"name": "addition"}, "model": {"name": "embedded"}, "algorithm": "rloo"})
        'rloo on addition (embedded)'
    """
    facts = describe_settings(settings)
    model, task, algorithm = (facts.get(name, "") for name in ("Model", "Task", "Algorithm"))
    if not (task and algorithm):
        return "RLOO run"
    return f"{algorithm} on {task}" + (f" ({model})" if model else "")


def describe_settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return task, model, algorithm and more of a run's settings, for those that it has."""
    mixture = _at(settings, "task", "mixture")
    found = {
        "Task": ", ".join(map(str, mixture)) if isinstance(mixture, Mapping) else _at(settings, "task", "name"),
        "Prompts": _at(settings, "data", "source"),
        "Model": _at(settings, "model", "name"),
        "Algorithm": _at(settings, "algorithm"),
    }
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def run_facts(series: Series, settings: Mapping[str, Any], command: str | None = None) -> dict[str, str]:
    """Return the facts of a run as texts by title."""
    found = describe_settings(settings) | ({"Command": mask_command(command)} if command else {})
    seconds, tokens, cpu, rate = (
        series.column(name)[1] for name in ("time/step", "num_tokens", "cpu_seconds", "tokens_per_second")
    )
    if series.steps is not None:
        planned = _at(settings, "plan", "steps") or _at(settings, "train", "steps")
        found["Steps"] = f"{series.steps[1]:,}" + (f" of {planned:,}" if type(planned) is int else "")
    if len(seconds):  # without start-up
        found["Time"] = f"{duration(seconds.sum())} of steps" + (f", {duration(cpu[-1])} of CPU" if len(cpu) else "")
    if len(tokens):
        found["Tokens"] = f"{tokens[-1]:,.0f} with prompts"
    if len(rate):
        found["Sampling"] = f"{np.median(rate[-_RECENT:]):,.0f} tokens/s (median of the last steps)"
    return found | {"Versions": ", ".join(f"{name} {version}" for name, version in package_versions().items())}


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that this process has loaded."""
    found = {"Python": ".".join(map(str, sys.version_info[:3]))}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # a checkout on the path
                found[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return found


def write_launch(directory: str | Path, command: str) -> Path:
    """Write command and versions of a run to :data:`LAUNCH_FILE`, for pages that show it while it trains.

    Args:
        directory: directory of the run, created if missing.
        command: command line; its secrets are masked.

    Returns:
        The file.
    """
    directory = Path(directory)
    make_folder(directory)
    record = {"command": mask_command(command), "versions": package_versions()}
    return write_text(directory / LAUNCH_FILE, json.dumps(record, indent=1) + "\n")


def duration(seconds: float) -> str:
    """Return seconds as text.

    Example:
        >>> duration(8.34), duration(754), duration(93_784)
        ('8.3 s', '12 min 34 s', '26 h 3 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _at(settings: Any, *names: str) -> Any:
    for name in names:
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def transcript_links(directory: Path) -> list[tuple[str, str]]:
    """Return label and address of the transcripts in a run's folder, newest first; none if it is missing or a link."""
    folder = directory / "transcripts"
    if folder.is_symlink() or not folder.is_dir():
        return []
    files = [path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink()]
    names = sorted(filter(_TRANSCRIPT.fullmatch, files), reverse=True)[:_LINKS]
    return [(_label(name), f"transcripts/{name}") for name in names]


def _label(name: str) -> str:
    found = re.fullmatch(r"step_(\d+)\.html", name)
    return f"step {int(found[1])}" if found else name.removesuffix(".html")


# Verdict: health events, changes of the held-out scores, and two sentences about them


@dataclass(frozen=True)
class HealthEvent:
    """A rule that fired at a step, and the step at which it cleared; None if it has not."""

    step: int
    rule: str
    severity: str
    sentence: str
    remedy: str
    cleared: int | None = None


def read_events(records: Iterable[Mapping[str, Any]]) -> list[HealthEvent]:
    """Return the events of a health file's records: those that last first, the most urgent first, then the newest.

    Example:
        >>> fired = {"step": 3, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It collapsed."}
        >>> [event.cleared for event in read_events([fired, fired | {"step": 9, "state": "cleared"}])]
        [9]
    """
    ended: list[HealthEvent] = []
    lasting: dict[str, HealthEvent] = {}
    for record in records:
        step, rule, severity = (record.get(name) for name in ("step", "rule", "severity"))
        if type(step) is not int or not isinstance(rule, str):
            continue
        before = lasting.pop(rule[:_LONGEST], None)
        if record.get("state") == "cleared" and before is not None:
            ended.append(replace(before, cleared=step))
        elif record.get("state") == "fired":
            texts = (str(record.get("sentence") or rule)[:_LONGEST], str(record.get("remedy") or "")[:_LONGEST])
            event = HealthEvent(step, rule[:_LONGEST], severity if severity in SEVERITIES else "info", *texts)
            lasting[event.rule] = before or event

    def urgency(event: HealthEvent) -> tuple[int, int]:
        return SEVERITIES.index(event.severity), -event.step

    return sorted(lasting.values(), key=urgency) + sorted(ended, key=urgency)


def read_health(path: Path) -> list[HealthEvent]:
    """Return the events at the end of a health file, without damaged lines; none if it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        return []
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return []
        start = max(0, status.st_size - _TAIL)
        file.seek(start)
        lines = file.read(_TAIL).split(b"\n")
    records = []
    for line in lines[1 if start else 0 : -1]:
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return read_events(record for record in records if isinstance(record, dict))


class Change(NamedTuple):
    """First and last value of a metric with their intervals, and the 95 % interval of their difference."""

    name: str
    steps: tuple[int, int]
    first: Interval
    last: Interval
    difference: Interval

    @property
    def direction(self) -> int:
        """1 if the interval of the difference is above 0, -1 if it is below, 0 if it has 0 or there is none."""
        return int(self.difference.low > 0) - int(self.difference.high < 0)


def difference_interval(first: Interval, last: Interval) -> Interval:
    """Return ``last - first`` with an interval from those of the two means (Newcombe 1998, method 10).

    It takes the two as independent. Evaluations of the same prompts are not, so it is rather too wide.

    Example:
        >>> low, high = difference_interval(Interval(0.2, 0.1, 0.3), Interval(0.8, 0.7, 0.9))[1:]
        >>> round(low, 3), round(high, 3)
        (0.459, 0.741)
    """
    mean = last.mean - first.mean
    low = mean - math.hypot(last.mean - last.low, first.high - first.mean)
    return Interval(mean, low, mean + math.hypot(last.high - last.mean, first.mean - first.low))


def evaluation_changes(series: Series) -> list[Change]:
    """Return the changes of the held-out scores, the headline first; bounds are NaN if none were logged."""
    bounds = {f"{name}_{end}" for name in series.names for end in ("low", "high")}
    hidden = {*bounds, *match_names(series.names, EVAL_DETAILS)}
    names = [name for name in series.names if name.startswith("eval/") and name not in hidden]
    names.sort(key=lambda name: _HEADLINES.index(name) if name in _HEADLINES else len(_HEADLINES))
    return [_evaluation_change(series, name) for name in names]


def _evaluation_change(series: Series, name: str) -> Change:
    steps, means = series.column(name)
    ends = []
    for place in (0, -1):
        bounds = []
        for end in ("low", "high"):
            its_steps, values = series.column(f"{name}_{end}")
            found = np.flatnonzero(its_steps == steps[place])
            bounds.append(float(values[found[place]]) if len(found) else math.nan)
        ends.append(Interval(float(means[place]), *bounds))
    return Change(name, (int(steps[0]), int(steps[-1])), *ends, difference_interval(*ends))


def verdict(series: Series, events: Sequence[HealthEvent] = (), limit: str = "") -> tuple[str, str]:
    """Return two sentences: whether the run learned, with an interval, and what to look at or what it waited for.

    Example:
        >>> scores = ((0, 0.1), (9, 0.8))
        >>> rows = [{"step": i, "eval/greedy": s, "eval/greedy_low": s - 0.1, "eval/greedy_high": s + 0.1}
        ...         for i, s in scores]
        >>> verdict(Series(rows))[0]
        'Learned: eval/greedy rose from 0.1 at step 0 to 0.8 at step 9, by 0.7 (95 % interval 0.559 to 0.841).'
    """
    return _learned(series), _look_at(events, limit)


def _learned(series: Series) -> str:
    changes = [change for change in evaluation_changes(series) if change.steps[0] < change.steps[1]]
    if not changes:
        rewards = series.column("reward")[1]
        part = max(1, len(rewards) // 5)
        if len(rewards) < _LEAST:
            return f"Too early to tell: {len(rewards)} steps have a reward, and fewer than two were evaluated."
        first, last = float(rewards[:part].mean()), float(rewards[-part:].mean())
        return f"Not evaluated on held-out prompts: the mean training reward went from {first:.3g} to {last:.3g}."
    change = changes[0]
    first, last, difference = change.first.mean, change.last.mean, change.difference
    span = f"from {first:.3g} at step {change.steps[0]} to {last:.3g} at step {change.steps[1]}"
    if math.isnan(difference.low + difference.high):
        return f"Unsure: {change.name} went {span}, and no interval was logged."
    bounds = f"95 % interval {difference.low:.3g} to {difference.high:.3g}"
    if change.direction == 0:
        return f"No change shown: {change.name} went {span}, a difference of {difference.mean:.3g} ({bounds})."
    word, verb = ("Learned", "rose") if change.direction > 0 else ("Got worse", "fell")
    return f"{word}: {change.name} {verb} {span}, by {abs(difference.mean):.3g} ({bounds})."


def _look_at(events: Sequence[HealthEvent], limit: str) -> str:
    """Return the most urgent rule that still holds, or what the run waited for."""
    lasting = [event for event in events if event.cleared is None]
    urgent = [event for event in lasting if event.severity != "info"]
    if chosen := urgent or (lasting if not limit else []):
        more = f" ({len(chosen) - 1} more below)" if len(chosen) > 1 else ""
        texts = (text.strip().rstrip(".") + "." for text in (chosen[0].sentence, chosen[0].remedy) if text.strip())
        return f"Look at {chosen[0].rule}{more}: {' '.join(texts)}"
    if limit:
        return limit
    ended = sum(event.severity != "info" for event in events)
    if ended:
        return f"Nothing stands out at the end; {ended} warnings fired and cleared on the way."
    return "No health rule holds."
