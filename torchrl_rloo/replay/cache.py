"""Storage of ragged rows, and a cache of informative groups that fills batches that have too few."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import from_plain, to_plain
from torchrl_rloo.data.rows import concatenate, stack_rows, tensor_rows
from torchrl_rloo.modules.reference import Scorer, record_log_probs

FIRST_CACHED_GROUP = 2**48  # first id of replayed groups; no environment counts this far
_RECOMPUTED = (keys.ADVANTAGE, keys.STATE_VALUE, keys.VALUE_TARGET, "proximal_log_probs", "proximal_entropy")


@dataclass
class _Cached:
    rows: list[TensorDictBase]
    version: int
    uses: int = 0


class GroupCache:
    """Cache that keeps groups with a signal and replays them, with current log-probs, in batches that have too few.

    A replayed group is a copy whose ``keys.LOG_PROBS`` come from ``scorer``. With the training model as scorer, the
    ratio starts at 1 and a clip bounds the step from the current policy. The rows remain samples of an older policy,
    and no importance weight corrects that, because their original log-probs stay in the cache. Keep ``max_age`` and
    ``max_uses`` small.

    The copy gets a new ``"group_id"`` from a separate range, so it cannot be confused with the group that was trained
    on before. It keeps ``"policy_version"``, so the staleness metric shows its true age. Its rewards are the original
    ones, with any KL in them. It has no advantages: :class:`MCAdvantage` writes them again.

    Args:
        capacity: limit of cached groups; groups of the oldest policy version, then of the lowest id, are evicted first.
        scorer: scorer of rows, such as the training model with ``generate=False``.
        max_uses: number of times that a group may be replayed.
        max_age: number of policy versions that a group may be behind.
        micro_batch_size: rows scored at once. None scores all replayed rows at once.
        max_tokens: tokens scored at once. None disables the limit.

    Attributes:
        counts: numbers of groups: ``"cache/added"``; ``"cache/used"``, replayed; ``"cache/missing"``, requested but
            unavailable; ``"cache/evicted"``, beyond ``capacity``; ``"cache/stale"``, beyond ``max_age``;
            ``"cache/used_up"``, dropped after ``max_uses``.

    Raises:
        ValueError: if a number is below 1.

    Example:
        ::

            cache = GroupCache(64, scorer)  # scorer: the training model's wrapper, with generate=False
            batch = cache.fill(rows, groups=16, policy_version=collector.policy_version)
            cache.add(rows)
            buffer.extend(batch)
    """

    def __init__(
        self,
        capacity: int,
        scorer: Scorer,
        *,
        max_uses: int = 1,
        max_age: int = 8,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ):
        for name, value in (("capacity", capacity), ("max_uses", max_uses), ("max_age", max_age)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.capacity, self.scorer, self.max_uses, self.max_age = capacity, scorer, max_uses, max_age
        self.limits = {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens}
        self.counts: Counter[str] = Counter()
        self._groups: dict[int, _Cached] = {}
        self._next_group_id = FIRST_CACHED_GROUP

    def __len__(self) -> int:
        """Return the number of cached groups."""
        return len(self._groups)

    def add(self, rows: TensorDictBase) -> None:
        """Add groups to the cache, except replayed ones.

        Call it after :meth:`fill`, or the cache may fill a batch with the batch's own groups.

        Args:
            rows: batch size ``[B]``, whole groups with a signal (:class:`ZeroSignalFilter`).
        """
        for group_id, members in group_rows(rows).items():
            if group_id < FIRST_CACHED_GROUP and group_id not in self._groups:
                kept = [row.exclude(*_RECOMPUTED) for row in tensor_rows(members).unbind(0)]
                self._groups[group_id] = _Cached(kept, int(members[keys.POLICY_VERSION].min()))
                self.counts["cache/added"] += 1
        newest = sorted(self._groups, key=lambda g: (self._groups[g].version, g), reverse=True)
        self._drop(newest[self.capacity :], "evicted")

    def fill(self, rows: TensorDictBase | None, groups: int, policy_version: int) -> TensorDictBase | None:
        """Fill a batch with replayed groups: the least used first, among these the newest.

        Args:
            rows: batch size ``[B]``, whole groups; None for an empty batch.
            groups: number of groups that the batch should have.
            policy_version: current policy version.

        Returns:
            Rows without text, batch size ``[B']``, with fewer groups if the cache has too few. None if there is no row.
        """
        cached = self._groups
        self._drop([g for g, c in cached.items() if policy_version - c.version > self.max_age], "stale")

        # Choose the groups to replay
        fresh = [] if rows is None or not len(rows) else [tensor_rows(rows)]
        num_missing = max(0, groups - (len(set(fresh[0][keys.GROUP_ID].tolist())) if fresh else 0))
        chosen = sorted(cached, key=lambda g: (cached[g].uses, -cached[g].version, -g))[:num_missing]
        self.counts["cache/missing"] += num_missing - len(chosen)
        self.counts["cache/used"] += len(chosen)
        if not chosen:
            return fresh[0] if fresh else None

        # Score copies with the current weights, and retire groups that were used often enough
        replayed = stack_rows([row for g in chosen for row in self._copies(cached[g])])
        record_log_probs(self.scorer, replayed, log_probs=keys.LOG_PROBS, **self.limits)
        for group in chosen:
            cached[group].uses += 1
        self._drop([g for g in chosen if cached[g].uses >= self.max_uses], "used_up")
        return concatenate([*fresh, replayed])

    def _copies(self, cached: _Cached) -> list[TensorDictBase]:
        group_id = torch.tensor(self._next_group_id)
        self._next_group_id += 1
        return [row.clone(recurse=False).set(keys.GROUP_ID, group_id.clone()) for row in cached.rows]

    def _drop(self, group_ids: list[int], reason: str) -> None:
        for group_id in group_ids:
            del self._groups[group_id]
        self.counts[f"cache/{reason}"] += len(group_ids)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, their uses and the counters, as plain values and tensors."""
        groups = {g: {"rows": [to_plain(r) for r in c.rows], "uses": c.uses} for g, c in self._groups.items()}
        return {"groups": groups, "next_group_id": self._next_group_id, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore groups, uses and, in place, the counters."""
        self._groups = {}
        for group_id, saved in state["groups"].items():
            rows = [from_plain(row) for row in saved["rows"]]
            version = min(int(row[keys.POLICY_VERSION]) for row in rows)
            self._groups[group_id] = _Cached(rows, version, saved["uses"])
        self._next_group_id = state["next_group_id"]
        self.counts.clear()
        self.counts.update(state["counts"])


class RowStorage(LazyStackStorage):
    """Replay-buffer storage of ragged rows, which warns once when it overwrites rows that were never sampled.

    TorchRL's storage overwrites its oldest rows silently when it is full. A loop that empties its buffer after each
    step needs no limit.

    Args:
        max_size: limit of rows. None disables it, so nothing is overwritten.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_rloo.replay import MCAdvantage
        >>> buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage())
    """

    def __init__(self, max_size: int | None = None):
        super().__init__(max_size)
        self._unsampled: set[int] = set()

    def _set_item(self, cursor: int, data: Any) -> None:
        if cursor in self._unsampled:
            notify_once(
                f"RowStorage(max_size={self.max_size}) overwrites rows that were never sampled: raise max_size to the "
                "rows of a step (prompts_per_batch x num_generations), or leave it out and empty the buffer every step"
            )
        self._unsampled.add(cursor)
        super()._set_item(cursor, data)

    def get(self, index: Any) -> Any:
        """Return the rows at an index and mark them as sampled."""
        rows = super().get(index)
        if isinstance(index, slice):
            index = range(len(self))[index]
        self._unsampled.difference_update(torch.as_tensor(index).reshape(-1).tolist())
        return rows

    def _empty(self) -> None:
        super()._empty()
        self._unsampled.clear()
