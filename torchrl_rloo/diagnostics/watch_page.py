"""Live page: its data from the folders of runs, as increments, and its text."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrl_rloo.diagnostics.metrics import DEFINITIONS
from torchrl_rloo.diagnostics.pages import read_static, render_page
from torchrl_rloo.diagnostics.report_panels import Panel, choose_panels, define, interval_bounds, panel_names
from torchrl_rloo.diagnostics.watch_run import WatchedRun, find_runs, run_names
from torchrl_rloo.diagnostics.watch_series import BINS, LARGEST_STEP, Series
from torchrl_rloo.runtime.files import make_folder, write_text

PAGE_FOLDER = Path(__file__).parent / "live_page"
CHART_SCRIPTS = ("uPlot-1.6.32.min.js", "charts.js")
CHART_STYLES = ("uPlot-1.6.32.min.css", "charts.css")
BYTES_PER_UPDATE = 1 << 25  # read of each file of a run in one update
_FILE_BINS = 2 * BINS  # of a file, which cannot load finer curves


class LivePage:
    """Data of the live page of several runs.

    Args:
        folders: folders of runs, or folders that have them below.

    Attributes:
        runs: the runs, in the order of the page.

    Raises:
        FileNotFoundError: if a folder does not exist.
    """

    def __init__(self, folders: Sequence[Path]):
        found = find_runs(folders)
        self.runs = [WatchedRun(f, name) for f, name in zip(found, run_names(found), strict=True)]
        self._lock = threading.Lock()

    def update(self, known: Mapping[str, Any] | None = None, *, limit: int = BYTES_PER_UPDATE) -> dict[str, Any]:
        """Read what the runs wrote, and return what the page lacks.

        Args:
            known: what the page has: ``sections`` (id) and ``runs`` with ``generation``, ``width`` and ``next`` each.
                None takes a new page.
            limit: bytes to read of each file.

        Returns:
            ``runs`` with facts and new bins, ``sections`` if they changed, and ``pending``, the bytes left to read.
        """
        known = known or {}
        with self._lock:
            pending = sum(run.update(limit) for run in self.runs)
            had = known.get("runs") if isinstance(known.get("runs"), list) else []
            states = [_run_state(run, had[i] if i < len(had) else None) for i, run in enumerate(self.runs)]
            sections = self._sections()
            stamp = hashlib.sha256(json.dumps(sections).encode()).hexdigest()[:16]
        answer = {"runs": states, "stamp": stamp, "pending": pending}
        return answer if known.get("sections") == stamp else answer | {"sections": sections}

    def detail(self, low: int, high: int) -> dict[str, Any]:
        """Return the curves between two steps, as fine as a chart can show."""
        with self._lock:
            return {"runs": [{"bins": run.shown.bins(low=low, high=high)} for run in self.runs]}

    def read_all(self) -> None:
        """Read the files of all runs to their ends."""
        with self._lock:
            for run in self.runs:
                while run.update(BYTES_PER_UPDATE):
                    pass

    def whole(self) -> dict[str, Any]:
        """Return all data for a page that cannot request more."""
        with self._lock:
            states = [{"facts": run.facts(), "bins": run.shown.bins(limit=_FILE_BINS)} for run in self.runs]
            return {"runs": states, "stamp": "", "pending": 0, "sections": self._sections()}

    def _sections(self) -> dict[str, Any]:
        return {"runs": [run.sections() for run in self.runs]} | chart_sections([run.shown for run in self.runs])


def _run_state(run: WatchedRun, known: Any) -> dict[str, Any]:
    """Return facts and bins of a run; only the bins from the page's last complete step on, if it has the others."""
    width = since = None
    if isinstance(known, Mapping) and known.get("generation") == run.shown.generation:
        width, since = known.get("width"), known.get("next")
    same = type(width) is int and type(since) is int and abs(since) <= LARGEST_STEP
    bins = run.shown.bins(width=width if same else None, since=since if same else None)
    position = {"generation": run.shown.generation, "next": run.shown.complete_until()}
    return {"facts": run.facts(), "bins": bins, **position}


def chart_sections(
    series: Sequence[Series],
    panels: Sequence[Sequence[str]] | None = None,
    definitions: Mapping[str, str] = DEFINITIONS,
) -> dict[str, Any]:
    """Return which charts a page shows: panels, other metrics by prefix, constant metrics, and definitions.

    Args:
        series: metrics of each run.
        panels: metrics of each panel, by name or pattern. None takes the usual ones.
        definitions: definitions by name of metric.
    """
    names = list(dict.fromkeys(name for one in series for name in one.names))
    holders = {name: [one for one in series if one.last(name)] for name in names}
    constant = {name for name in names if all(one.is_constant(name) for one in holders[name])}
    bounds = interval_bounds(names)
    chosen = choose_panels(names, panels, constant) if names else []
    shown = [
        {"title": p.title, "unit": p.unit, "names": _lines(names, p, constant, len(series))}
        | {"points": p.points, "smoothed": p.smoothed, "share": p.share}
        for p in chosen
    ]
    drawn = {name for panel in shown for name in panel["names"]}
    others: dict[str, list[str]] = {}
    for name in names:
        if name not in drawn | bounds | constant:
            others.setdefault(name.partition("/")[0] if "/" in name else "other", []).append(name)
    flat = {n: [one.last(n)[0] if one.last(n) else None for one in series] for n in names if n in constant - drawn}
    return {
        "panels": shown,
        "others": [{"title": title, "names": group} for title, group in others.items()],
        "constants": {name: values for name, values in flat.items() if name not in bounds},
        "definitions": _defined(tuple(names), tuple(definitions.items())),
    }


def _lines(names: Sequence[str], panel: Panel, constant: set[str], runs: int) -> list[str]:
    return panel_names(names, panel, constant, runs) or panel_names(names, panel, runs=runs)


@lru_cache(maxsize=8)
def _defined(names: tuple[str, ...], definitions: tuple[tuple[str, str], ...]) -> dict[str, str]:
    return define(names, dict(definitions))


def live_text(title: str) -> str:
    """Return the page that asks its server for data."""
    return _render(title, {"live": True, "bases": None}, connect="'self'")


def write_live_page(path: str | Path, folders: Sequence[str | Path]) -> Path:
    """Write the live page with all curves and samples as one file that needs no server.

    Args:
        path: HTML file to write; its directory is created if missing.
        folders: folders of runs, or folders that have them below.

    Returns:
        ``path``.

    Raises:
        FileNotFoundError: if a folder does not exist.
    """
    path, page = Path(path), LivePage([Path(folder) for folder in folders])
    page.read_all()
    # Link transcripts by their place relative to the page
    there = path.absolute().parent
    bases = [f"./{quote(os.path.relpath(run.directory.absolute(), there))}/" for run in page.runs]
    make_folder(path.parent)
    return write_text(path, _render(page_title(page), {"live": False, "bases": bases, "data": page.whole()}))


def page_title(page: LivePage) -> str:
    """Return the names of a page's runs as its title."""
    names = [run.name for run in page.runs]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _render(title: str, data: Mapping[str, Any], connect: str = "") -> str:
    return render_page(
        read_static(PAGE_FOLDER, ["page.html"]),
        title=title,
        script=read_static(PAGE_FOLDER, (*CHART_SCRIPTS, "sections.js", "page.js")),
        style=read_static(PAGE_FOLDER, (*CHART_STYLES, "page.css")),
        data=data,
        connect=connect,
    )
