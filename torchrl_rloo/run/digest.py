"""Digest: text about the last steps, which a run prints a few times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PER_RUN = 4
_MIN_STEPS, _STEPS = 10, 50  # fewest steps between two texts, and steps if their total is unknown
_SECONDS = 600.0  # longest time between two texts

Entry = Mapping[str, Any]
MakeDigest = Callable[[Sequence[Entry], Entry | None], str]


class Digest:
    """Text about the steps since the last text: at most four times in a run, at its end, and every ten minutes.

    Args:
        make: function from entries, one dictionary per step with ``step``, metrics and timings, and from the entry
            before them or None, to the text. An empty text is not printed.
        total_steps: number of the last step; None if unknown.
        clock: function that returns the time in seconds.

    Example:
        >>> digest = Digest(lambda entries, before: f"{len(entries)} entries", total_steps=40)
        >>> [digest.text({"step": step}) for step in (9, 10, 11)]
        ['', '2 entries', '']
    """

    def __init__(self, make: MakeDigest, total_steps: int | None, clock: Callable[[], float] = time.monotonic):
        self._make, self._total, self._clock = make, total_steps, clock
        self._every = _STEPS if total_steps is None else max(_MIN_STEPS, total_steps // _PER_RUN)
        self._entries: list[Entry] = []
        self._before: Entry | None = None
        self._made_at = clock()

    def text(self, entry: Entry) -> str:
        """Take the entry of a step, and return the text if it is due, otherwise an empty one."""
        self._entries.append(entry)
        step = entry["step"]
        late = self._clock() - self._made_at >= _SECONDS
        if not (late or step == self._total or (step > 0 and step % self._every == 0)):
            return ""
        text = self._make(self._entries, self._before)
        self._entries, self._before, self._made_at = [], entry, self._clock()
        return text
