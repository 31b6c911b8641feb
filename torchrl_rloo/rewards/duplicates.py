"""Identical trajectories of a batch, which are scored once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch

_LOGGER = logging.getLogger(__name__)


def find_distinct(batch: RewardBatch) -> tuple[list[int], list[int]]:
    """Find the trajectories that differ in prompt, completion, ids, a column or truncation.

    Values that cannot be compared (arrays, for example) count as different.

    Returns:
        Tuple ``(first, places)``. ``first`` holds the index of the first trajectory of each set of identical ones.
        ``places[i]`` is the position in ``first`` of the set of trajectory ``i``.

    Example:
        >>> find_distinct(RewardBatch(["p", "q", "p"], ["a", "a", "a"], [[1], [1], [1]]))
        ([0, 1], [0, 1, 0])
    """
    first: list[int] = []
    places: list[int] = []
    candidates: dict[Any, list[int]] = {}  # places, by a key that is cheap to compare
    for i, ids in enumerate(batch.completion_ids):
        alike = candidates.setdefault((tuple(ids), _last_text(batch.prompts[i])), [])
        place = next((p for p in alike if _is_identical(batch, first[p], i)), None)
        if place is None:
            place = len(first)
            first.append(i)
            alike.append(place)
        places.append(place)
    return first, places


def _last_text(prompt: Any) -> str:
    last = prompt[-1] if isinstance(prompt, list | tuple) and prompt else prompt
    return str(last.get("content")) if isinstance(last, Mapping) else last if isinstance(last, str) else ""


def _is_identical(batch: RewardBatch, i: int, j: int) -> bool:
    columns = [batch.prompts, batch.completions, *batch.columns.values()]
    if batch.truncated:
        columns.append(batch.truncated)
    try:
        return all(values[i] is values[j] or bool(values[i] == values[j]) for values in columns)
    except Exception as error:
        _LOGGER.debug("trajectories %d and %d cannot be compared: %s", i, j, error)
        return False
