"""Progress of a run on stderr: one line that each step renews on a terminal, some lines in a log file, or nothing."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping

_CLEAR = "\r\x1b[K"  # the line of a terminal


class Progress:
    """Lines about the steps of a run.

    Without a terminal, it prints the first and last step, steps with more metrics, and about 20 others, or every tenth
    if the total is unknown. True renews one line even if stderr is no terminal, as in a notebook; False shows nothing.
    """

    def __init__(self, shown: bool | None, total: int | None) -> None:
        self._stream, self._total, self._silent = sys.stderr, total, shown is False
        self._live = bool(shown) or self._stream.isatty()
        self._every = max(1, total // 20) if total is not None else 10
        self._first: tuple[int, float] | None = None  # step and time (s)
        self._last_shown: int | None = None
        self._fewest_values = 1_000_000
        self._pending: str | None = None  # line of a step that was not due, or that a terminal shows now

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show that ``step`` is done, with its headline metrics; if it is not due, keep it for the end of the run."""
        if self._silent:
            return
        if self._first is None:
            self._first = (step, time.monotonic())
        position = f"step {step}" if self._total is None else f"step {step}/{self._total}"
        line = "  ".join([position, *(f"{name} {_figure(value)}" for name, value in values.items()), *self._pace(step)])
        if self._live:
            self._pending = line[: shutil.get_terminal_size().columns - 1]
            print(_CLEAR, self._pending, sep="", end="", file=self._stream, flush=True)
            return
        has_more = len(values) > self._fewest_values
        due = self._last_shown is None or step % self._every == 0 or step == self._total or has_more
        self._fewest_values = min(self._fewest_values, len(values))
        if step == self._last_shown:
            return
        if not due:
            self._pending = line
            return
        self._last_shown, self._pending = step, None
        self.write(line)

    def write(self, text: str) -> None:
        """Print text on separate lines; the next step renews the line of a terminal."""
        if not self._silent:
            print(f"{_CLEAR if self._live else ''}{text}", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the last step visible, also one at which the run stopped between two lines."""
        if self._pending is not None:
            self.write(self._pending)
            self._pending = None

    def _pace(self, step: int) -> list[str]:
        first_step, first_time = self._first
        if step <= first_step:
            return []
        seconds = (time.monotonic() - first_time) / (step - first_step)
        pace = [f"{_figure(seconds)} s/step"]
        if self._total is not None and step < self._total:
            pace.append(f"eta {duration((self._total - step) * seconds)}")
        return pace


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
