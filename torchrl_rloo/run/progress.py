"""Progress displays of a run: a bar on a terminal, lines in a log file, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

_PHASE_PERIOD_S = 0.2  # shortest time between two phases that a bar shows


class Silent:
    """Display that shows nothing; base of the others."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show that ``step`` is done, with its headline metrics."""

    def show_phase(self, phase: str | None) -> None:
        """Show what the run does now; None between two phases."""

    def write(self, text: str) -> None:
        """Print text on separate lines."""

    def close(self) -> None:
        """Close the display and leave its last state visible."""


def make_progress(progress: bool | None, total: int | None) -> Silent:
    """Make the display for the current stderr, by default a bar on a terminal and plain lines elsewhere.

    True shows a bar even if stderr is not a terminal, as in a notebook. False shows nothing.
    """
    if progress is False:
        return Silent()
    if progress or sys.stderr.isatty():
        return Bar(total, sys.stderr)
    return Lines(total, sys.stderr)


class Bar(Silent):
    """Display with a tqdm bar."""

    def __init__(self, total: int | None, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._bar: tqdm | None = None
        self._phase_shown_at = 0.0

    def show(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None:  # after the first step, so that the bar of a resumed run starts there
            self._bar = tqdm(total=self._total, initial=step, unit="step", file=self._stream, dynamic_ncols=True)
        self._bar.set_postfix_str("  ".join(_figures(values)), refresh=False)
        self._bar.update(step - self._bar.n)

    def show_phase(self, phase: str | None) -> None:
        if self._bar is None or phase is None:
            return
        now = time.monotonic()
        refresh = now - self._phase_shown_at >= _PHASE_PERIOD_S  # short phases would only flicker
        self._phase_shown_at = now if refresh else self._phase_shown_at
        self._bar.set_description_str(phase, refresh=refresh)

    def write(self, text: str) -> None:
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Lines(Silent):
    """Display of plain lines for the first and last step, steps with more metrics, and about 20 others.

    If the total is unknown, every tenth step has a line.
    """

    def __init__(self, total: int | None, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._every = max(1, total // 20) if total is not None else 10
        self._first: tuple[int, float] | None = None  # step and time (s)
        self._last_shown: int | None = None
        self._fewest_values = 1_000_000
        self._pending: str | None = None

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Print the line if it is due, or else keep it for the end of the run."""
        if self._first is None:
            self._first = (step, time.monotonic())
        line = "  ".join([self._position(step), *_figures(values), *self._pace(step)])
        has_more = len(values) > self._fewest_values
        due = self._last_shown is None or step % self._every == 0 or step == self._total or has_more
        self._fewest_values = min(self._fewest_values, len(values))
        if due and step != self._last_shown:
            self._print(line, step)
        elif step != self._last_shown:
            self._pending = line

    def write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._pending is not None:  # the run stopped between two lines
            self.write(self._pending)
            self._pending = None

    def _print(self, line: str, step: int) -> None:
        self.write(line)
        self._last_shown = step
        self._pending = None

    def _position(self, step: int) -> str:
        return f"step {step}" if self._total is None else f"step {step}/{self._total}"

    def _pace(self, step: int) -> Sequence[str]:
        first_step, first_time = self._first
        if step <= first_step:
            return []
        seconds = (time.monotonic() - first_time) / (step - first_step)
        pace = [f"{_figure(seconds)} s/step"]
        if self._total is not None and step < self._total:
            pace.append(f"eta {duration((self._total - step) * seconds)}")
        return pace


def _figures(values: Mapping[str, float]) -> list[str]:
    return [f"{name} {_figure(value)}" for name, value in values.items()]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Format seconds as ``45s``, ``2m31s`` or ``3h07m``."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
