"""Command ``torchrl-rloo watch``: a line in the terminal for each step of a run."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.files import SAFE_FLAGS

_PERIOD = 1.0  # seconds between two looks
_LOCK = ".lock"  # file of a run's directory, which the running process holds
_SHOWN = (  # title of a metric or timing in a line
    ("reward", "reward"),
    ("eval/greedy", "accuracy"),
    ("kl", "KL"),
    ("loss", "loss"),
    ("time/step", "seconds"),
)


def add_watch_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``torchrl-rloo watch`` to its parser."""
    parser.add_argument("folder", metavar="DIR", help="output_dir of a run")


def watch(folder: str) -> None:
    """Print the path of a run's report and a line for each step, until the run ends or the command is interrupted."""
    directory = Path(folder)
    if not directory.is_dir():
        print(f"error: {directory} is no folder; name the output_dir of a run", file=sys.stderr)
        raise SystemExit(1)
    print(f"report: {(directory / 'report.html').resolve()}", flush=True)
    with suppress(KeyboardInterrupt):
        for line in follow(directory):
            print(line, flush=True)


def follow(directory: Path, period: float = _PERIOD) -> Iterator[str]:
    """Yield a line for each step of a run, and end when no process runs it."""
    files, waiting, shown = [_Lines(directory / f"{kind}.jsonl") for kind in ("metrics", "timings")], {}, -1
    while True:
        running = _is_running(directory)  # asked before the last read, so that no line is lost
        for file in files:
            for entry in file.read():
                waiting.setdefault(entry["step"], {}).update(entry)
        # The timings of a step follow its metrics: hold back the last step until the next look
        ready = sorted(waiting) if not running else sorted(waiting)[:-1]
        for step in ready:
            entry = waiting.pop(step)
            if step > shown:  # a resumed run writes steps again
                shown = step
                yield describe(entry)
        if not running:
            return
        time.sleep(period)


def describe(entry: dict[str, Any]) -> str:
    """Return the line of a step.

    Example:
        >>> describe({"step": 3, "reward": 0.5, "loss": 0.0125, "time/step": 1.25})
        'step      3  reward 0.5  loss 0.0125  seconds 1.25'
    """
    values = [(title, entry[name]) for name, title in _SHOWN if isinstance(entry.get(name), (int, float))]
    return "  ".join([f"step {entry['step']:>6}", *(f"{title} {value:.4g}" for title, value in values)])


class _Lines:
    """Reader of the JSON lines that a file got since the last look."""

    def __init__(self, path: Path):
        self.path, self.position = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the new entries with a step; lines that are not complete are left for later."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | SAFE_FLAGS)
        except OSError:
            return []
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return []
            if status.st_size < self.position:  # a resumed run dropped its last steps
                self.position = 0
            file.seek(self.position)
            block = file.read()
        end = block.rfind(b"\n") + 1
        self.position += end
        return [entry for line in block[:end].splitlines() if (entry := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def _is_running(directory: Path) -> bool:
    """Return whether a process holds the lock of a run's directory; False where there are no locks."""
    try:
        descriptor = os.open(directory / _LOCK, os.O_RDONLY | SAFE_FLAGS)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
