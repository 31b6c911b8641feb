"""PendingGroups: rows in, complete groups out, in whatever order and batches the rows come."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.plain import from_plain, to_plain

_LOGGER = logging.getLogger(__name__)

Group = list[TensorDictBase]


class PendingGroups:
    """Holds rows back until their group is complete, and complete groups until enough can leave together.

    Args:
        num_generations: members of a group. None: each row's own ``"group_size"``.
        together: number of complete groups that leave together; None: each leaves at once.
        max_pending_groups: limit of incomplete groups; beyond it the oldest is dropped. None disables it.

    Attributes:
        counts: ``"groups"``, ``"rows"`` that left; ``"expired_groups"``, ``"expired_rows"`` of groups that were dropped
            incomplete; ``"late_rows"`` dropped since their group was complete, or dropped, before they came.

    Raises:
        ValueError: for a number out of range.
    """

    REMEMBERED_GROUPS = 100_000

    def __init__(
        self,
        num_generations: int | None = None,
        *,
        together: int | None = None,
        max_pending_groups: int | None = None,
    ):
        for name, value in (("num_generations", num_generations), ("max_pending_groups", max_pending_groups)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        self.num_generations, self.together, self.max_pending_groups = num_generations, together, max_pending_groups
        self.counts: Counter[str] = Counter()
        self._pending: OrderedDict[int, Group] = OrderedDict()  # oldest group first
        self._waiting: list[Group] = []  # complete, in the order in which they became so
        self._gone: OrderedDict[int, None] = OrderedDict()  # groups no longer pending, so that none is counted twice

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return sum(map(len, self._pending.values()))

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for others to leave with."""
        return len(self._waiting)

    def add(self, rows: Sequence[TensorDictBase]) -> list[list[Group]]:
        """Take rows in; return the batches of groups that leave, in the order in which they became complete.

        Raises:
            ValueError: for rows whose group size is not ``num_generations``, or not that of their group's other rows.
            KeyError: for rows without a group size, if ``num_generations`` is None. None of the rows is taken in then.
        """
        sizes = [self._size(row) for row in rows]
        self._check_sizes(rows, sizes)
        for row, size in zip(rows, sizes, strict=True):
            group_id = int(row[keys.GROUP_ID])
            if group_id in self._gone:
                self._count_dropped("late_rows", 1, f"group {group_id} was complete, or dropped, before this row came")
                continue
            members = self._pending.setdefault(group_id, [])
            members.append(row)
            if len(members) >= size:
                self._waiting.append(self._release(group_id))
        self._expire()
        return self._leave()

    def _size(self, row: TensorDictBase) -> int:
        own = row.get(keys.GROUP_SIZE, None)
        if own is None and self.num_generations is None:
            raise KeyError(f"a row has no {keys.GROUP_SIZE!r}: write it in the environment, or set num_generations")
        if own is not None and self.num_generations not in (None, int(own)):
            raise ValueError(
                f"num_generations={self.num_generations}, but rows have {keys.GROUP_SIZE}={int(own)}: leave "
                "num_generations out, or set it to the environment's"
            )
        return self.num_generations if own is None else int(own)

    def _check_sizes(self, rows: Sequence[TensorDictBase], sizes: Sequence[int]) -> None:
        known: dict[int, int] = {}
        for row, size in zip(rows, sizes, strict=True):
            group_id = int(row[keys.GROUP_ID])
            earlier = self._pending.get(group_id)
            if known.setdefault(group_id, self._size(earlier[0]) if earlier else size) != size:
                raise ValueError(f"rows of group {group_id} disagree on its size: {sorted([known[group_id], size])}")

    def _release(self, group_id: int) -> Group:
        self._gone[group_id] = None
        if len(self._gone) > self.REMEMBERED_GROUPS:
            self._gone.popitem(last=False)
        return self._pending.pop(group_id)

    def _expire(self) -> None:
        """Drop the oldest groups beyond the limit."""
        too_many = 0 if self.max_pending_groups is None else max(0, len(self._pending) - self.max_pending_groups)
        for group_id in list(self._pending)[:too_many]:
            rows = self._release(group_id)
            self._count_dropped("expired_rows", len(rows), f"more than max_pending_groups={self.max_pending_groups}")
            self.counts["expired_groups"] += 1

    def _count_dropped(self, kind: str, number: int, reason: str) -> None:
        """Count dropped rows; log the first of each kind."""
        if not self.counts[kind]:
            _LOGGER.warning("%d rows dropped (%s): %s. Further ones are only counted", number, kind, reason)
        self.counts[kind] += number

    def _leave(self) -> list[list[Group]]:
        """Return the waiting groups that can go, in batches."""
        size = self.together or max(len(self._waiting), 1)
        full = len(self._waiting) // size * size
        leaving, self._waiting = self._waiting[:full], self._waiting[full:]
        self.counts["groups"] += len(leaving)
        self.counts["rows"] += sum(map(len, leaving))
        return [leaving[i : i + size] for i in range(0, full, size)]

    def state_dict(self) -> dict[str, Any]:
        """Return held rows and counters: plain values and tensors."""
        return {
            "pending": {g: [to_plain(row) for row in rows] for g, rows in self._pending.items()},
            "waiting": [[to_plain(row) for row in rows] for rows in self._waiting],
            "left": list(self._gone),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore held rows and, in place, the counters."""
        self._pending = OrderedDict((g, [from_plain(row) for row in rows]) for g, rows in state["pending"].items())
        self._waiting = [[from_plain(row) for row in rows] for rows in state["waiting"]]
        self._gone = OrderedDict.fromkeys(state["left"])
        self.counts.clear()
        self.counts.update(state["counts"])
