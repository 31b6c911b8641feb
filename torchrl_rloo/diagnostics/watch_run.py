"""State of a run's folder for the live page: curves, facts, health, samples and links, as plain data."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_rloo.diagnostics.report_facts import describe_settings, measure, total_steps
from torchrl_rloo.diagnostics.report_health import HEALTH_FILE, read_events
from torchrl_rloo.diagnostics.report_verdict import evaluation_changes, verdict
from torchrl_rloo.diagnostics.waiting import join_entries, limiting_sentence, summarize_waits, waiting_rows
from torchrl_rloo.diagnostics.watch_files import (
    Document,
    LineFile,
    parse_objects,
    read_last_lines,
    sample_lines,
)
from torchrl_rloo.diagnostics.watch_series import BINS, Series
from torchrl_rloo.runtime.masking import mask_command, mask_settings

TRANSCRIPT = re.compile(r"[\w.-]{1,100}\.html")  # names of the pages that are linked
TRANSCRIPT_LINK = re.compile(r"transcripts/[\w.-]{1,100}\.html#row=\d{1,9}")
_CURVES = ("metrics", "timings")
_DOCUMENTS = ("settings", "evaluation", "summary", "launch")
_SAMPLES = 4  # rows of a table
_LINKS = 50
_EVENTS = 50
_WAITS = 20  # steps of which the table of waits is the mean
_CHARACTERS = 1500  # shown of a sample's text
_COLUMNS = 30  # shown of a sample
_LONGEST_NAME = 200  # characters of a setting's name, and so the depth to which settings are shown


class WatchedRun:
    """Folder of a run or of an evaluation, read while it is written.

    Args:
        directory: folder; files may appear later.
        name: name of the run on the page.

    Attributes:
        series: metrics and timings that were read so far.
        shown: the same, or those of a sample of all steps until the files of a long run are read.
    """

    def __init__(self, directory: Path, name: str):
        self.directory, self.name, self.series = directory, name, Series()
        self.shown = self.series
        self._curves = {kind: LineFile(directory / f"{kind}.jsonl") for kind in _CURVES}
        self._health_file = LineFile(directory / HEALTH_FILE)
        self._health: list[Mapping[str, Any]] = []
        self._restarts: tuple[int, ...] = (0,) * len(_CURVES)
        self._documents = {name: Document(directory / f"{name}.json") for name in _DOCUMENTS}

    def update(self, limit: int = 1 << 24) -> int:
        """Read what is new, about ``limit`` bytes of each file, and return how many bytes are left.

        The first update of a long run reads a sample of its steps only.
        """
        if self.shown is self.series and not self.series.names:
            size = sum(file.size() for file in self._curves.values())
            if size > limit:
                self.shown = self._preview()
                return size
        blocks = {kind: file.read(limit) for kind, file in self._curves.items()}
        restarts = tuple(file.restarts for file in self._curves.values())
        if restarts != self._restarts:  # a resumed run dropped its last steps: read everything again
            self._restarts = restarts
            self.series.clear()
            for kind, file in self._curves.items():
                self._curves[kind] = LineFile(file.path)
            self._restarts = (0,) * len(_CURVES)
            blocks = {kind: file.read(limit) for kind, file in self._curves.items()}
        for kind, block in blocks.items():
            self.series.add_lines(block, kind)
        pending = sum(file.pending for file in self._curves.values())
        if not pending:
            self.shown = self.series
        before = self._health_file.restarts
        block = self._health_file.read(limit)
        if self._health_file.restarts != before:
            self._health = []
        self._health += parse_objects(block.split(b"\n"))[0]
        return pending

    def _preview(self) -> Series:
        """Return the metrics and timings of some steps from first to last, so that a page need not wait for all."""
        preview = Series(generation=-1)  # the page replaces its curves when all is read
        for kind, file in self._curves.items():
            preview.add(sample_lines(file.path, BINS), kind)
        return preview

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the run or of the evaluation, empty before they are written."""
        found = self._documents["settings"].read()
        return mask_settings(found or _mapping(self._documents["evaluation"].read().get("settings")))

    def facts(self) -> dict[str, Any]:
        """Return what changes with the steps, and with the clock."""
        steps, total, measured = self.shown.steps, total_steps(self.settings), measure(self.shown)
        step = None if steps is None else steps[1]
        seconds = measured.pop("step", None)
        return {
            "step": step,
            "total": total,
            "seconds": seconds,
            **measured,
            "left": None if None in (total, step, seconds) else max(0, total - step) * seconds,
            "age": self._age(),
            "reward": (self.shown.last("reward") or [None])[0],
        }

    def sections(self) -> dict[str, Any]:
        """Return what changes rarely: settings, health, evaluations, samples, links, faults."""
        settings, events = self.settings, read_events(self._health)
        waits = self._waits()
        sentences = verdict(self.shown, events, waits["sentence"] if waits else "") if self.shown.names else ()
        shown = {**describe_settings(settings)}
        launch = self._documents["launch"].read()
        if command := launch.get("command") or self._documents["summary"].read().get("command"):
            shown["Command"] = mask_command(str(command))[:_CHARACTERS]
        if versions := _mapping(launch.get("versions")):
            shown["Versions"] = ", ".join(f"{n} {v}" for n, v in list(versions.items())[:_COLUMNS])[:_CHARACTERS]
        return {
            "name": self.name,
            "facts": shown,
            "settings": dict(_flatten(settings)),
            "verdict": list(sentences),
            "health": [event.to_dict() for event in events[:_EVENTS]],
            "evaluations": [*self._changes(), *self._evaluation()],
            "samples": self._samples(),
            "waits": waits,
            "links": _page_links(self.directory),
            "faults": self._faults(),
        }

    def _age(self) -> float | None:
        """Return the seconds since the run last wrote metrics."""
        try:
            return max(0.0, time.time() - self._curves["metrics"].path.stat().st_mtime)
        except OSError:
            return None

    def _changes(self) -> list[dict[str, Any]]:
        return [
            {"name": c.name, "steps": c.steps, "first": _finite(c.first), "last": _finite(c.last)}
            | {"difference": _finite(c.difference)}
            for c in evaluation_changes(self.shown)
        ]

    def _evaluation(self) -> list[dict[str, Any]]:
        """Return the metrics of a folder that ``torchrl-rloo evaluate`` wrote."""
        metrics = _mapping(self._documents["evaluation"].read().get("metrics"))
        names = [n for n in metrics if f"{n}_low" in metrics and f"{n}_high" in metrics]
        return [
            {"name": str(n), "last": _finite([metrics[n], metrics[f"{n}_low"], metrics[f"{n}_high"]])} for n in names
        ]

    def _samples(self) -> list[dict[str, Any]]:
        """Return rows of the newest step of each table."""
        tables: dict[str, list[Mapping[str, Any]]] = {}
        rows = read_last_lines(self.directory / "completions.jsonl") or read_last_lines(
            self.directory / "samples.jsonl"
        )
        for row in rows:
            tables.setdefault(str(row.get("table", "completions"))[:100], []).append(row)
        newest = {name: rows[-1].get("step") for name, rows in tables.items()}
        return [
            {
                "table": name,
                "step": newest[name] if type(newest[name]) is int else None,
                "rows": [_plain_row(r) for r in rows if r.get("step") == newest[name]][:_SAMPLES],
            }
            for name, rows in tables.items()
        ]

    def _waits(self) -> dict[str, Any] | None:
        """Return the table of waits over the newest steps; None before the first timings."""
        found = (read_last_lines(self.directory / f"{kind}.jsonl") for kind in _CURVES)
        metrics, timings = ([row for row in rows if type(row.get("step")) is int] for rows in found)
        return describe_waits(join_entries(metrics, timings)[-_WAITS:])

    def _faults(self) -> list[str]:
        damaged = self.series.damaged
        return [f"{damaged:,} damaged lines of metrics or timings were skipped"] if damaged else []


def _page_links(directory: Path) -> list[list[str]]:
    """Return label and address of the pages of a folder: the report and transcripts."""
    files = _files(directory)
    return [[n.removesuffix(".html"), n] for n in ("report.html", "transcripts.html") if n in files] + transcript_links(
        directory
    )


def transcript_links(directory: Path) -> list[list[str]]:
    """Return label and address of the transcripts in a run's folder, newest first."""
    names = sorted((n for n in _files(directory / "transcripts") if TRANSCRIPT.fullmatch(n)), reverse=True)
    return [[_label(name), f"transcripts/{name}"] for name in names[:_LINKS]]


def describe_waits(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the table of waits as plain data, with the sentence about the limit; None without timings.

    Args:
        entries: metrics and timings of each step, see :func:`join_entries`.
    """
    if not entries or (summary := summarize_waits(entries)) is None:
        return None
    rows = [list(row) for row in waiting_rows(entries)]
    return {"heads": ["who", "does", "share or number"], "rows": rows, "sentence": limiting_sentence(summary)}


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs at or below each path; the path itself if there is none yet.

    Raises:
        FileNotFoundError: if a path is no folder.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is no folder; name the output_dir of a run")
        below = [path] if _is_run(path) else [p for p in _folders(path, depth=3) if _is_run(p)]
        found |= dict.fromkeys(below or [path])
    return list(found)


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return short names that differ: the ends of the paths.

    Example:
        >>> run_names([Path("out/rloo/seed0"), Path("out/grpo/seed0")])
        ['rloo/seed0', 'grpo/seed0']
    """
    parts = [folder.absolute().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(part) for part in parts]


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("metrics.jsonl", "evaluation.json"))


def _folders(path: Path, depth: int) -> list[Path]:
    try:
        below = sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink())
    except OSError:
        return []
    return [f for p in below for f in (p, *(_folders(p, depth - 1) if depth > 1 else ()))]


def _files(path: Path) -> list[str]:
    """Return the names of the regular files in a folder; none if it is missing or a link."""
    try:
        return [] if path.is_symlink() else [p.name for p in path.iterdir() if p.is_file() and not p.is_symlink()]
    except OSError:
        return []


def _label(name: str) -> str:
    found = re.fullmatch(r"step_(\d+)\.html", name)
    return f"step {int(found[1])}" if found else name.removesuffix(".html")


def _plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample's columns as short texts, and its link if it is one to a transcript."""
    shown = [name for name in row if name not in ("step", "table", "transcript")][:_COLUMNS]
    texts = {str(name)[:100]: _short(row[name]) for name in shown}
    link = row.get("transcript")
    is_link = isinstance(link, str) and TRANSCRIPT_LINK.fullmatch(link)
    return {"columns": texts, "link": link if is_link else None}


def _short(value: Any) -> str:
    """Return a value as text, cut in the middle, without keys and passwords."""
    try:
        text = (
            f"{value:.4g}" if type(value) is float else str(value if isinstance(value, str) else mask_settings(value))
        )
    except RecursionError:  # nested too deep to be shown
        return "\u2026"
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS // 2]} \u2026 {text[-_CHARACTERS // 2 :]}"


def _finite(values: Sequence[Any]) -> list[float | None]:
    """Return numbers for JSON, and None for those that are not finite."""
    return [float(v) if type(v) in (int, float) and v - v == 0 else None for v in values]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested settings by dotted name, as text without keys and passwords."""
    pairs = []
    for name, item in value.items():
        dotted = f"{prefix}{name}"[:_LONGEST_NAME]
        if isinstance(item, Mapping) and item and len(dotted) < _LONGEST_NAME:
            pairs += _flatten(item, f"{dotted}.")
        else:
            pairs.append((dotted, _short(item)))
    return pairs


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
