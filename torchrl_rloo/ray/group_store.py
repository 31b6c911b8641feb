"""Bounded store of whole groups whose rows lie elsewhere, such as in Ray's object store.

Only metadata pass through the store: it waits for the members of a group, writes advantages, and bounds the bytes that
it keeps alive. :mod:`torchrl_rloo.ray.buffer` runs it in an actor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.rows import copy_row, make_non_tensor, non_tensor_value, stack_rows
from torchrl_rloo.replay.advantage import MCAdvantage

WhenFull = Literal["wait", "drop_oldest"]
PAYLOAD = "_payload"  # entry of metadata: where the row lies


class Payload(NamedTuple):
    """Place of a row: index in the packed rows of one group, and bytes of its tensors."""

    ref: Any
    index: int
    nbytes: int


class Members(NamedTuple):
    """Members of one group that arrive together."""

    reads: PackedRows  # [n] rows with what the advantages read
    rows: list[Any]  # packed [n] rows or a reference to them; Ray resolves references outside of a list
    nbytes: int  # of the tensors of all n rows


class ReadyGroup(NamedTuple):
    """Complete group with advantages."""

    group_id: int
    payloads: list[Payload]  # of its n rows
    advantages: list[torch.Tensor]  # of each row, [1, 1] or [T, 1]
    oldest: int  # policy version of its rows

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' tensors."""
        return sum(payload.nbytes for payload in self.payloads)


def split_members(rows: TensorDictBase, reads_tokens: bool) -> list[Members]:
    """Split a batch ``[B]`` by group, with metadata alone unless the advantages read entries per token."""
    members = []
    for group in group_rows(rows).values():
        nbytes = sum(v.nbytes for row in group.unbind(0) for v in row.values(True, True) if isinstance(v, torch.Tensor))
        packed = pack_rows(group)
        members.append(Members(packed if reads_tokens else pack_rows(metadata_of(group)), [packed], nbytes))
    return members


def join_rows(group: ReadyGroup, packed: dict[Any, PackedRows]) -> TensorDictBase:
    """Return the ``[n]`` rows of a group with their advantages; other tensors are views of the packed ones."""
    unpacked = {ref: unpack_rows(rows) for ref, rows in packed.items()}
    rows = [copy_row(unpacked[payload.ref][payload.index]) for payload in group.payloads]
    return stack_rows([row.set(keys.ADVANTAGE, a) for row, a in zip(rows, group.advantages, strict=True)])


class GroupAdvantages:
    """Advantages of groups whose members arrive in parts, from any writer; ``advantage`` holds incomplete ones."""

    def __init__(self, advantage: MCAdvantage):
        self.advantage = advantage

    def keep(self, rows: Any) -> Any:
        """Return what stands for packed rows, or a reference to them, in a :class:`Payload`."""
        return rows

    def add(self, batch: Sequence[Members]) -> list[ReadyGroup]:
        """Take members in, all or none, and return the groups that are complete."""
        rows = []
        for reads, (packed,), nbytes in batch:
            ref = self.keep(packed)
            for index, row in enumerate(unpack_rows(reads).unbind(0)):
                payload = Payload(ref, index, nbytes // len(reads.layout_of_row))
                rows.append(copy_row(row).set(PAYLOAD, make_non_tensor(payload)))
        ready = self.advantage.inv(stack_rows(rows))
        return [] if ready is None else [_ready(members) for members in _by_group(ready)]

    def holds_any(self, batch: Sequence[Members]) -> bool:
        """Return whether any of the members belongs to a group that waits for them."""
        pending = self.advantage.pending_ids
        return any(int(row[keys.GROUP_ID]) in pending for members in batch for row in unpack_rows(members.reads))

    @property
    def pending_bytes(self) -> int:
        """Bytes of rows of incomplete groups, and of groups that wait for a batch to normalize."""
        return sum(non_tensor_value(row, PAYLOAD).nbytes for row in self.advantage.held_rows)

    def counters(self) -> dict[str, int]:
        """Return the transform's counters, ``"advantage/pending_rows"`` and ``"advantage/waiting_groups"``."""
        held = {"pending_rows": self.advantage.pending_rows, "waiting_groups": self.advantage.waiting_groups}
        return dict(self.advantage.counts) | {f"advantage/{name}": number for name, number in held.items()}

    def state(self) -> dict[str, Any]:
        """Return the transform's state; its rows have payloads, whose references only this cluster knows."""
        return self.advantage.get_extra_state()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state`."""
        self.advantage.set_extra_state(state)


def _by_group(rows: TensorDictBase) -> list[list[TensorDictBase]]:
    """Return the rows of each group, in the order in which the groups became complete."""
    groups: dict[int, list[TensorDictBase]] = {}
    for row in rows.unbind(0):
        groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    return list(groups.values())


def _ready(members: list[TensorDictBase]) -> ReadyGroup:
    return ReadyGroup(
        int(members[0][keys.GROUP_ID]),
        [non_tensor_value(row, PAYLOAD) for row in members],
        [row[keys.ADVANTAGE] for row in members],
        min(int(row[keys.POLICY_VERSION]) for row in members),
    )


class GroupStore(GroupAdvantages):
    """Store of complete groups, bounded in groups and bytes, from which consumers sample.

    Its methods are coroutines of one event loop. Consumers receive the least used groups first, and among these the
    oldest: with ``max_uses=1`` the store is a queue.

    Its limits are those of :class:`~torchrl_rloo.ray.RayGroupBuffer`.

    Attributes:
        counts: numbers of groups: ``"buffer/added"``, ``"buffer/sampled"``, ``"buffer/used_up"``,
            ``"buffer/dropped"``, ``"buffer/stale"``; ``"buffer/waits"``, writers that had to wait.
    """

    def __init__(
        self,
        advantage: MCAdvantage,
        *,
        max_groups: int | None = None,
        max_bytes: int | None = None,
        when_full: WhenFull = "wait",
        max_uses: int | None = 1,
        max_staleness: int | None = None,
    ):
        super().__init__(advantage)
        for name, value in (("max_groups", max_groups), ("max_bytes", max_bytes), ("max_uses", max_uses)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} must be None or at least 0")
        if when_full not in get_args(WhenFull):
            raise ValueError(f"when_full={when_full!r} must be one of {get_args(WhenFull)}")
        bounded = max_groups is not None or max_bytes is not None
        if when_full == "wait" and max_uses is None and bounded:
            raise ValueError("when_full='wait' cannot be combined with max_uses=None, since no group would ever leave")
        self.max_groups, self.max_bytes, self.when_full = max_groups, max_bytes, when_full
        self.max_uses, self.max_staleness = max_uses, max_staleness
        self.counts: Counter[str] = Counter()
        self._stored: dict[int, tuple[ReadyGroup, int]] = {}  # group and its uses, oldest first
        self._changed = asyncio.Condition()

    async def extend(self, batch: list[Members]) -> None:
        """Take members in, after waiting for room if the store is full.

        A batch with members of a waiting group never waits, or the group could not become complete. Neither does any
        batch while there is no complete group, whose consumer could make room. A batch is taken in as a whole or not.
        """
        groups, nbytes = len(batch), sum(members.nbytes for members in batch)
        for name, value, limit in (("max_groups", groups, self.max_groups), ("max_bytes", nbytes, self.max_bytes)):
            if limit is not None and value > limit:
                raise ValueError(f"{name}={limit} must hold a batch, which has {value}; raise it or send fewer groups")
        async with self._changed:
            if self.when_full == "wait" and not self._may_enter(batch):
                self.counts["buffer/waits"] += 1
                await self._changed.wait_for(lambda: self._may_enter(batch))
            elif self.when_full == "drop_oldest":
                while self._stored and not self._has_room(groups, nbytes):
                    self._leave(next(iter(self._stored)), "dropped")
            for group in self.add(batch):
                self._stored[group.group_id] = (group, 0)
                self.counts["buffer/added"] += 1
            self._changed.notify_all()

    def _may_enter(self, batch: list[Members]) -> bool:
        nbytes = sum(members.nbytes for members in batch)
        return not self._stored or self._has_room(len(batch), nbytes) or self.holds_any(batch)

    def _has_room(self, groups: int, nbytes: int) -> bool:
        if self.max_groups is not None and len(self._stored) + groups > self.max_groups:
            return False
        return self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that the store keeps alive."""
        return sum(group.nbytes for group, _ in self._stored.values()) + self.pending_bytes

    async def sample(
        self, groups: int, policy_version: int | None = None, timeout_s: float | None = None
    ) -> list[ReadyGroup]:
        """Return the least used groups, oldest first, after waiting until there are enough."""
        if groups < 1 or self.max_groups is not None and groups > self.max_groups:
            raise ValueError(f"groups={groups} must be at least 1 and at most max_groups={self.max_groups}")
        if self.max_staleness is not None and policy_version is None:
            raise ValueError(f"max_staleness={self.max_staleness} requires policy_version; pass the trainer's version")
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._enough(groups, policy_version)), timeout_s)
            except asyncio.TimeoutError:
                raise TimeoutError(f"groups={groups}: {len(self._stored)} are there after {timeout_s} s") from None
            chosen = sorted(self._stored.values(), key=lambda stored: stored[1])[:groups]  # stable: oldest first
            for group, uses in chosen:
                self._stored[group.group_id] = (group, uses + 1)
                if self.max_uses is not None and uses + 1 >= self.max_uses:
                    self._leave(group.group_id, "used_up")
            self.counts["buffer/sampled"] += groups
            self._changed.notify_all()
            return [group for group, _ in chosen]

    def _enough(self, groups: int, policy_version: int | None) -> bool:
        if self.max_staleness is not None:
            late = [g for g, (group, _) in self._stored.items() if policy_version - group.oldest > self.max_staleness]
            for group_id in late:
                self._leave(group_id, "stale")
            if late:
                self._changed.notify_all()
        return len(self._stored) >= groups

    def _leave(self, group_id: int, reason: str) -> None:
        del self._stored[group_id]
        self.counts[f"buffer/{reason}"] += 1

    async def empty(self) -> None:
        """Drop all complete groups; incomplete ones stay."""
        async with self._changed:
            self._stored.clear()
            self._changed.notify_all()

    async def size(self) -> int:
        """Return the number of complete groups."""
        return len(self._stored)

    async def stats(self) -> dict[str, int]:
        """Return all counters, and the current ``"buffer/groups"`` and ``"buffer/bytes"``."""
        return {**self.counts, **self.counters(), "buffer/groups": len(self._stored), "buffer/bytes": self.nbytes}

    async def snapshot(self) -> tuple[list[tuple[ReadyGroup, int]], dict[str, int], dict[str, Any]]:
        """Return complete groups with their uses, counters, and the state of incomplete groups."""
        return list(self._stored.values()), dict(self.counts), self.state()

    async def restore(
        self, stored: list[tuple[ReadyGroup, int]], counts: dict[str, int], state: dict[str, Any]
    ) -> None:
        """Restore :meth:`snapshot`."""
        async with self._changed:
            self._stored = {group.group_id: (group, uses) for group, uses in stored}
            self.counts = Counter(counts)
            self.load_state(state)
            self._changed.notify_all()
