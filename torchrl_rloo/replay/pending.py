"""Base of transforms that act on rows that enter a buffer, and the groups that wait there for their missing rows."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import from_plain, to_plain
from torchrl_rloo.data.rows import entry_of

_LOGGER = logging.getLogger(__name__)

Group = list[TensorDictBase]


class PendingGroups:
    """Buffer that holds rows until their group is complete, and complete groups until enough can leave together.

    Rows may arrive in any order and in any number of batches.

    Attributes:
        counts: ``"<part>/groups"`` and ``"<part>/rows"`` that left; ``"<part>/expired_groups"`` and
            ``"<part>/expired_rows"``, dropped while incomplete; ``"<part>/late_rows"``, dropped because their group was
            complete or dropped before they arrived.
    """

    REMEMBERED_GROUPS = 100_000

    def __init__(
        self,
        num_generations: int | None = None,
        *,
        groups_per_batch: int | None = None,
        max_pending_groups: int | None = None,
        part: str = "advantage",
    ):
        for name, value in (("num_generations", num_generations), ("max_pending_groups", max_pending_groups)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        self.num_generations, self.groups_per_batch, self.max_pending_groups = (
            num_generations,
            groups_per_batch,
            max_pending_groups,
        )
        self.part = part
        self.counts: Counter[str] = Counter()
        self._pending: OrderedDict[int, Group] = OrderedDict()  # oldest group first
        self._waiting: list[Group] = []  # complete groups, in the order in which they became complete
        self._released: OrderedDict[int, None] = OrderedDict()  # ids of earlier groups, to recognize late rows
        self._told_waiting = False

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return sum(map(len, self._pending.values()))

    @property
    def pending_ids(self) -> set[int]:
        """Ids of the groups that wait for some of their rows."""
        return set(self._pending)

    @property
    def held_rows(self) -> list[TensorDictBase]:
        """Rows of incomplete groups, and of complete groups that wait."""
        return [row for group in (*self._pending.values(), *self._waiting) for row in group]

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait until enough can leave together."""
        return len(self._waiting)

    def add(self, rows: Sequence[TensorDictBase]) -> list[list[Group]]:
        """Take rows in and return the batches of groups that leave, in the order in which they became complete.

        No row is taken in if an error is raised.
        """
        sizes = [self._size(row) for row in rows]
        self._check_sizes(rows, sizes)
        for row, size in zip(rows, sizes, strict=True):
            group_id = int(entry_of(row, keys.GROUP_ID))
            if group_id in self._released:
                reason = f"group {group_id} was complete or dropped before this row arrived"
                self._count_dropped("late_rows", 1, reason)
                continue
            members = self._pending.setdefault(group_id, [])
            members.append(row)
            if len(members) >= size:
                self._waiting.append(self._release(group_id))
        self._expire()
        if len(rows) > 1 and self._pending and not self._told_waiting:  # writers of single rows are still writing
            self._told_waiting = True
            _LOGGER.warning(
                "%d rows of %d groups wait in the replay buffer for the rest of their groups. If rows were left out "
                "before it, the rest never comes: leave them out with torchrl_rloo.replay.drop_rows, which corrects "
                "group_size",
                self.pending_rows,
                len(self._pending),
            )
        return self._leave()

    def _size(self, row: TensorDictBase) -> int:
        size = entry_of(row, keys.GROUP_SIZE)
        if size is None and self.num_generations is None:
            raise KeyError(f"a row has no {keys.GROUP_SIZE!r}: write it in the environment, or set num_generations")
        if size is not None and self.num_generations not in (None, int(size)):
            raise ValueError(
                f"num_generations={self.num_generations}, but rows have {keys.GROUP_SIZE}={int(size)}: leave "
                "num_generations out, or set it to the environment's"
            )
        return self.num_generations if size is None else int(size)

    def _check_sizes(self, rows: Sequence[TensorDictBase], sizes: Sequence[int]) -> None:
        known: dict[int, int] = {}
        for row, size in zip(rows, sizes, strict=True):
            group_id = int(entry_of(row, keys.GROUP_ID))
            pending = self._pending.get(group_id)
            if known.setdefault(group_id, self._size(pending[0]) if pending else size) != size:
                raise ValueError(f"rows of group {group_id} disagree on its size: {sorted([known[group_id], size])}")

    def _release(self, group_id: int) -> Group:
        self._released[group_id] = None
        if len(self._released) > self.REMEMBERED_GROUPS:
            self._released.popitem(last=False)
        return self._pending.pop(group_id)

    def _expire(self) -> None:
        """Drop the oldest groups beyond the limit."""
        excess = 0 if self.max_pending_groups is None else max(0, len(self._pending) - self.max_pending_groups)
        for group_id in list(self._pending)[:excess]:
            rows = self._release(group_id)
            self._count_dropped("expired_rows", len(rows), f"more than max_pending_groups={self.max_pending_groups}")
            self.counts[f"{self.part}/expired_groups"] += 1

    def _count_dropped(self, kind: str, number: int, reason: str) -> None:
        """Count dropped rows, and log the first drop of each kind."""
        kind = f"{self.part}/{kind}"
        if not self.counts[kind]:
            _LOGGER.warning("%d rows dropped (%s): %s. Later drops are only counted", number, kind, reason)
        self.counts[kind] += number

    def _leave(self) -> list[list[Group]]:
        """Return the waiting groups that can leave, in batches."""
        size = self.groups_per_batch or max(len(self._waiting), 1)
        full = len(self._waiting) // size * size
        leaving, self._waiting = self._waiting[:full], self._waiting[full:]
        self.counts[f"{self.part}/groups"] += len(leaving)
        self.counts[f"{self.part}/rows"] += sum(map(len, leaving))
        return [leaving[i : i + size] for i in range(0, full, size)]

    def state_dict(self) -> dict[str, Any]:
        """Return held rows and counters, as plain values and tensors."""
        return {
            "pending": {g: [to_plain(row) for row in rows] for g, rows in self._pending.items()},
            "waiting": [[to_plain(row) for row in rows] for rows in self._waiting],
            "left": list(self._released),
            "counts": dict(self.counts),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore held rows and, in place, the counters."""
        self._pending = OrderedDict((g, [from_plain(row) for row in rows]) for g, rows in state["pending"].items())
        self._waiting = [[from_plain(row) for row in rows] for rows in state["waiting"]]
        self._released = OrderedDict.fromkeys(state["left"])
        self.counts.clear()
        self.counts.update(state["counts"])


class BufferTransform(Transform):
    """Base of replay-buffer transforms: ``_inv_call`` receives rows on their way into the buffer."""

    def set_container(self, container: Transform | EnvBase) -> None:
        """Note the ``Compose`` that has this transform; refuse an environment."""
        super().set_container(container)
        if self.parent is not None:
            name = type(self).__name__
            raise TypeError(f"{name} acts on rows that enter a replay buffer; use ReplayBuffer(transform={name}(...))")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows as they are: the transform acts when rows enter the buffer."""
        return tensordict
