"""What a person sees of a run: a bar on a terminal, a line now and then in a log file, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TextIO

from tqdm import tqdm


class Progress(Protocol):
    """Shows how far a run is."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Takes note of ``step``; ``values`` are the headline figures, as last known."""

    def write(self, text: str) -> None:
        """Prints text of its own lines."""

    def close(self) -> None:
        """Leaves the last state visible."""


def make_progress(progress: bool | None, total: int | None) -> Progress:
    """The display for stderr as it is now.

    Args:
        progress: ``False``: none. ``True``: the bar, even where stderr is no terminal (a notebook). ``None``: the bar
            on a terminal, plain lines elsewhere.
        total: number of the last step, if known.
    """
    if progress is False:
        return Silent()
    if progress or sys.stderr.isatty():
        return Bar(total, sys.stderr)
    return Lines(total, sys.stderr)


class Silent:
    """Shows nothing."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def write(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Bar:
    """A tqdm bar."""

    def __init__(self, total: int | None, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._bar: tqdm | None = None

    def show(self, step: int, values: Mapping[str, float]) -> None:
        if self._bar is None:  # not before the first step is done: a resumed run's bar starts where that run was
            self._bar = tqdm(total=self._total, initial=step, unit="step", file=self._stream, dynamic_ncols=True)
        self._bar.set_postfix_str("  ".join(_figures(values)), refresh=False)
        self._bar.update(step - self._bar.n)

    def write(self, text: str) -> None:
        tqdm.write(text, file=self._stream)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class Lines:
    """Lines for the first and last step, steps with more figures than others, and about 20 in between.

    Where the total is not known, every tenth step has a line.
    """

    def __init__(self, total: int | None, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._every = max(1, total // 20) if total is not None else 10
        self._first: tuple[int, float] | None = None  # step and time (s)
        self._shown: int | None = None
        self._usual = 1_000_000  # figures that every step has
        self._pending: str | None = None

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the line if it is due, and otherwise keeps it for the end of the run."""
        if self._first is None:
            self._first = (step, time.monotonic())
        line = "  ".join([self._position(step), *_figures(values), *self._pace(step)])
        due = self._shown is None or step % self._every == 0 or step == self._total or len(values) > self._usual
        self._usual = min(self._usual, len(values))
        if due and step != self._shown:
            self._print(line, step)
        elif step != self._shown:
            self._pending = line

    def write(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._pending is not None:  # the last step of a run that stopped between two lines
            self.write(self._pending)
            self._pending = None

    def _print(self, line: str, step: int) -> None:
        self.write(line)
        self._shown = step
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
    """``45s``, ``2m31s`` or ``3h07m``.

    Example:
        >>> duration(45), duration(151), duration(11220)
        ('45s', '2m31s', '3h07m')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
