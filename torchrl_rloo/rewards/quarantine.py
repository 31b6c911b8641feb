"""The samples that a reward function failed on, kept in a file for whoever repairs the function."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_LINES = 1000  # of one function
TRACEBACK = 4000  # characters kept, from the end

_LOGGER = logging.getLogger(__name__)


class Quarantine:
    """Appends one line of JSON for each bad sample, at most 1,000 for each function. It never fails the run.

    Args:
        path: of the file; its folder is made when the first line is written. None keeps nothing.

    Attributes:
        lines: function -> lines written.

    Raises:
        ValueError: if the path is a folder.
    """

    def __init__(self, path: str | os.PathLike | None):
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"quarantine={str(path)!r} is a folder; it must be the path of a file, such as bad.jsonl")
        self.lines: Counter[str] = Counter()

    def add(self, function: str, entry: Mapping[str, Any]) -> None:
        """Writes ``entry`` with the function's name before it; values that are no JSON as their ``repr``."""
        if self.path is None or self.lines[function] >= MAX_LINES:
            return
        try:
            line = _line({"function": function} | dict(entry))
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(line + "\n")
        except Exception as error:  # a full disk, values whose repr raises
            _LOGGER.warning("the quarantine %s takes no more: %s: %s", self.path, type(error).__name__, error)
            self.lines[function] = MAX_LINES
        else:
            self.lines[function] += 1

    def rewind(self, step: int) -> None:
        """Takes out the lines of this step and later ones, which a run that goes back to a checkpoint writes again.

        Args:
            step: in ``trainer_state.global_step``; 0 takes out all.
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
    except (ValueError, KeyError):  # the writer was killed in the middle of the line
        return math.inf


def _line(entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry, default=repr)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, cycles
        return json.dumps({key: _value(value) for key, value in entry.items()})


def _value(value: Any) -> Any:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value
