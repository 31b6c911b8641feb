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

MAX_LINES = 1000  # per function
MAX_TRACEBACK_CHARS = 4000  # last characters of a traceback that are kept

_LOGGER = logging.getLogger(__name__)


class Quarantine:
    """JSON-lines file of failed samples, at most 1,000 per function.

    A failed write is logged and ends the recording for that function; it does not end the run.

    Args:
        path: file, created with its folder at the first line. None disables it.

    Attributes:
        lines: function -> number of lines written.

    Raises:
        ValueError: if ``path`` is a folder.
    """

    def __init__(self, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"quarantine={str(path)!r} is a folder; set the path of a file, such as bad.jsonl")
        self.lines: Counter[str] = Counter()

    def add(self, function: str, entry: Mapping[str, Any]) -> None:
        """Append a line of the function's name and ``entry``, with the ``repr`` of values that are not JSON."""
        if self.path is None or self.lines[function] >= MAX_LINES:
            return
        try:
            line = _line({"function": function} | dict(entry))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
        except Exception as error:  # a full disk, values whose repr raises
            _LOGGER.warning("cannot write to quarantine %s, disabled: %s: %s", self.path, type(error).__name__, error)
            self.lines[function] = MAX_LINES
        else:
            self.lines[function] += 1

    def rewind(self, step: int) -> None:
        """Remove the lines of ``step`` and later: a run that resumes from a checkpoint writes them again.

        Args:
            step: first ``trainer_state.global_step`` to remove; 0 removes all lines.
        """
        if self.path is None or not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines(keepends=True) if _step(line) < step]
        rest = self.path.with_name(f"{self.path.name}.part")
        rest.write_text("".join(kept))
        rest.replace(self.path)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):  # the process was killed in the middle of the line
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
