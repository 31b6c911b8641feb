"""File of the samples that reward functions failed on, for debugging."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_rloo.runtime.files import append, atomic_write, make_folder

MAX_LINES = 1000  # per function
MAX_WARNINGS = 10  # per function
MAX_TRACEBACK_CHARS = 4000  # last characters of a traceback that are kept

_LOGGER = logging.getLogger(__name__)


class Quarantine:
    """JSON-lines file of failed samples, at most 1,000 per function.

    A failed write loses its line, never the run: the first of several in a row is logged, and the next line is tried
    again. The file is never written through a symbolic link.

    The file is created with its folder at the first line; a path of None disables it. Counts by function are ``lines``
    written and ``lost``.
    """

    def __init__(self, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"quarantine={str(path)!r} is a folder; set the path of a file, such as bad.jsonl")
        self.lines: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self._fails = False  # whether the last write failed

    def add(self, function: str, entry: Mapping[str, Any]) -> None:
        """Append a line of the function's name and ``entry``, with the ``repr`` of values that are not JSON."""
        if self.path is None or self.lines[function] >= MAX_LINES:
            return
        try:
            line = _line({"function": function} | dict(entry))
            make_folder(self.path.parent)
            append(self.path, (line + "\n").encode())
        except Exception as error:  # a full disk, values whose repr raises
            if not self._fails and self.lost[function] < MAX_WARNINGS:
                _LOGGER.warning("lost a line of quarantine %s: %s: %s", self.path, type(error).__name__, error)
            self._fails = True
            self.lost[function] += 1
        else:
            self._fails = False
            self.lines[function] += 1

    def rewind(self, step: int) -> None:
        """Remove the lines of ``step`` and later: a run that resumes from a checkpoint writes them again."""
        if self.path is None or not self.path.is_file():
            return
        kept = [line for line in self.path.read_bytes().splitlines(keepends=True) if _step(line) < step]
        with atomic_write(self.path) as file:
            file.write(b"".join(kept))


def _step(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):  # a partial or foreign line
        return math.inf


def _line(entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, cycles
        return json.dumps({key: _value(value) for key, value in entry.items()})


def _value(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value
