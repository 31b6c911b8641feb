"""PendingGroups: rows in, complete groups out, in whatever order and batches the rows come."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.plain import from_plain, to_plain

_LOGGER = logging.getLogger(__name__)

Group = list[TensorDictBase]


class PendingGroups:
    """Holds rows back until their group is complete, and complete groups until as many as wanted can leave together.

    Args:
        num_generations: members of a group. A row's own ``"group_size"`` comes first.
        together: how many complete groups leave together; None: each leaves at once.
        max_pending_groups: how many incomplete groups to hold; the oldest goes when there are more. None for no limit.
        max_pending_age: how many later batches may arrive before an incomplete group goes. None for no limit.
        incomplete: what becomes of an incomplete group that goes: ``"drop"`` it, or ``"use"`` the members that came.

    Attributes:
        counts: ``"groups"``, ``"rows"`` that left; ``"expired_groups"``, ``"expired_rows"`` of groups that went
            incomplete; ``"late_rows"`` dropped since their group was complete, or had gone, before they came.

    Raises:
        ValueError: for a number out of range, or an unknown value of ``incomplete``.
    """

    REMEMBERED_GROUPS = 100_000

    def __init__(
        self,
        num_generations: int,
        *,
        together: int | None = None,
        max_pending_groups: int | None = None,
        max_pending_age: int | None = None,
        incomplete: Literal["drop", "use"] = "drop",
    ):
        if incomplete not in ("drop", "use"):
            raise ValueError(f"incomplete={incomplete!r} must be 'drop' or 'use'")
        for name, value in (("max_pending_groups", max_pending_groups), ("max_pending_age", max_pending_age)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        self.num_generations, self.together, self.incomplete = num_generations, together, incomplete
        self.max_pending_groups, self.max_pending_age = max_pending_groups, max_pending_age
        self.counts: Counter[str] = Counter()
        self._pending: OrderedDict[int, Group] = OrderedDict()  # oldest group first
        self._arrived: dict[int, int] = {}  # batch in which each pending group's first row came
        self._waiting: list[Group] = []  # complete, in the order in which they became so
        self._gone: OrderedDict[int, None] = OrderedDict()  # groups no longer pending, so that none is counted twice
        self._batch = 0

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return sum(map(len, self._pending.values()))

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for others to leave with."""
        return len(self._waiting)

    def add(self, rows: Sequence[TensorDictBase]) -> list[list[Group]]:
        """Takes rows in; returns the batches of groups that leave, those that were complete first before the others.

        Raises:
            ValueError: for rows of a group that disagree on its size; none of the rows is taken in then.
        """
        sizes = self._group_sizes(rows)
        self._batch += 1
        for row in rows:
            group_id = int(row[keys.GROUP_ID])
            if group_id in self._gone:
                self.counts["late_rows"] += 1
                _LOGGER.warning("a row of group %d came after its group had left; it is dropped", group_id)
                continue
            members = self._pending.setdefault(group_id, [])
            self._arrived.setdefault(group_id, self._batch)
            members.append(row)
            if len(members) >= sizes[group_id]:
                self._waiting.append(self._release(group_id))
        self._waiting += self._expire()
        return self._leave()

    def _group_sizes(self, rows: Sequence[TensorDictBase]) -> dict[int, int]:
        """How many members each group of the rows has when it is complete."""
        sizes: dict[int, int] = {}
        for row in rows:
            group_id, size = int(row[keys.GROUP_ID]), int(row.get(keys.GROUP_SIZE, self.num_generations))
            earlier = self._pending.get(group_id)
            known = int(earlier[0].get(keys.GROUP_SIZE, self.num_generations)) if earlier else size
            if sizes.setdefault(group_id, known) != size:
                raise ValueError(f"rows of group {group_id} disagree on its size: {sorted([sizes[group_id], size])}")
        return sizes

    def _release(self, group_id: int) -> Group:
        self._gone[group_id] = None
        if len(self._gone) > self.REMEMBERED_GROUPS:
            self._gone.popitem(last=False)
        del self._arrived[group_id]
        return self._pending.pop(group_id)

    def _expire(self) -> list[Group]:
        """Groups that are too old or too many; returns those that are used all the same."""
        too_many = 0 if self.max_pending_groups is None else max(0, len(self._pending) - self.max_pending_groups)
        oldest = list(self._pending)[:too_many]
        if self.max_pending_age is not None:
            oldest += [
                g for g in self._pending if g not in oldest and self._batch - self._arrived[g] > self.max_pending_age
            ]
        groups = [self._release(g) for g in oldest]
        if groups:
            self.counts["expired_groups"] += len(groups)
            self.counts["expired_rows"] += sum(map(len, groups))
            _LOGGER.warning("%d incomplete groups expired (%s)", len(groups), self.incomplete)
        return groups if self.incomplete == "use" else []

    def _leave(self) -> list[list[Group]]:
        """The waiting groups that can go, in batches."""
        size = self.together or max(len(self._waiting), 1)
        full = len(self._waiting) // size * size
        leaving, self._waiting = self._waiting[:full], self._waiting[full:]
        self.counts["groups"] += len(leaving)
        self.counts["rows"] += sum(map(len, leaving))
        return [leaving[i : i + size] for i in range(0, full, size)]

    def state_dict(self) -> dict[str, Any]:
        """Held rows and counters: plain values and tensors."""
        return {
            "pending": {g: [to_plain(row) for row in rows] for g, rows in self._pending.items()},
            "waiting": [[to_plain(row) for row in rows] for rows in self._waiting],
            "arrived": dict(self._arrived),
            "left": list(self._gone),
            "batch": self._batch,
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores held rows and, in place, the counters."""
        self._pending = OrderedDict((g, [from_plain(row) for row in rows]) for g, rows in state["pending"].items())
        self._waiting = [[from_plain(row) for row in rows] for rows in state["waiting"]]
        self._arrived, self._gone = dict(state["arrived"]), OrderedDict.fromkeys(state["left"])
        self._batch = state["batch"]
        self.counts.clear()
        self.counts.update(state["counts"])
