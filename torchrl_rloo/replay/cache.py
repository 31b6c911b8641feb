"""GroupCache: informative groups, kept to fill up batches that lack some."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import by_group
from torchrl_rloo.data.plain import from_plain, to_plain
from torchrl_rloo.data.rows import concatenate, stack_rows, tensor_rows
from torchrl_rloo.modules.recording import Scorer, record_log_probs

FIRST_CACHED_GROUP = 2**48  # of groups that come from a cache; no environment counts so far
_RECOMPUTED = (keys.ADVANTAGE, keys.STATE_VALUE, keys.VALUE_TARGET, "proximal_log_probs", "proximal_entropy")


@dataclass
class _Cached:
    rows: list[TensorDictBase]
    version: int
    uses: int = 0


class GroupCache:
    """Keeps groups that had a signal and gives them out again where a batch has too few, under today's log-probs.

    A group given out is a copy. Its ``keys.LOG_PROBS`` are scored anew by ``scorer``, so with the training model the
    ratio starts at 1 and a clip bounds the step from today's policy; the sampler's own log-probs stay with the group in
    the cache and are on no row that leaves it. That does not make the rows samples of today's policy: they are from an
    older one, which no importance weight corrects any more. So ``max_age`` and ``max_uses`` should be small.

    The copy has a fresh ``"group_id"`` from a range of its own, so it is never taken for the group that was trained on
    before, and keeps ``"policy_version"``, so the staleness metric shows its true age. Rewards are those of then, a KL
    in them included; advantages are left to :class:`MCAdvantage`.

    Args:
        capacity: most groups kept; the oldest, by policy version and then by group, go first.
        scorer: scores rows, e.g. the training model with ``generate=False``.
        max_uses: how often a group is given out.
        max_age: how many policy versions a group may be behind.
        micro_batch_size: rows scored at once; None for all that are given out together.
        max_tokens: tokens scored at once; None for any number.

    Attributes:
        counts: in groups, ``"cache/added"``, ``"cache/used"`` and why they left: ``"cache/evicted"`` for a newer one,
            ``"cache/stale"`` beyond ``max_age``, ``"cache/worn"`` after ``max_uses``; ``"cache/missing"``: asked for,
            but there were none.

    Raises:
        ValueError: for a number below 1.
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
        """Groups in the cache."""
        return len(self._groups)

    def add(self, rows: TensorDictBase) -> None:
        """Keeps groups; those that came from a cache themselves are passed over.

        Args:
            rows: batch size ``[B]``, whole groups that have a signal (:class:`ZeroSignalFilter`). Call it after
                :meth:`fill`, or a batch may be filled up with its own groups.
        """
        for group_id, members in by_group(rows).items():
            if group_id < FIRST_CACHED_GROUP and group_id not in self._groups:
                kept = [row.exclude(*_RECOMPUTED) for row in tensor_rows(members).unbind(0)]
                self._groups[group_id] = _Cached(kept, int(members[keys.POLICY_VERSION].min()))
                self.counts["cache/added"] += 1
        newest = sorted(self._groups, key=lambda g: (self._groups[g].version, g), reverse=True)
        self._drop(newest[self.capacity :], "evicted")

    def fill(self, rows: TensorDictBase | None, groups: int, policy_version: int) -> TensorDictBase | None:
        """The rows, and as many cached groups as they lack: the least used first, of those the newest.

        Args:
            rows: batch size ``[B]``, whole groups; None for none.
            groups: how many the batch should have.
            policy_version: the present one.

        Returns:
            The rows without text; fewer groups than asked for if the cache has no more. None where there are none.
        """
        cached = self._groups
        self._drop([g for g, c in cached.items() if policy_version - c.version > self.max_age], "stale")
        given = [] if rows is None or not len(rows) else [tensor_rows(rows)]
        lacking = max(0, groups - (len(set(given[0][keys.GROUP_ID].tolist())) if given else 0))
        chosen = sorted(cached, key=lambda g: (cached[g].uses, -cached[g].version, -g))[:lacking]
        self.counts["cache/missing"] += lacking - len(chosen)
        self.counts["cache/used"] += len(chosen)
        if not chosen:
            return given[0] if given else None
        replayed = stack_rows([row for g in chosen for row in self._copies(cached[g])])
        record_log_probs(self.scorer, replayed, log_probs=keys.LOG_PROBS, **self.limits)
        for group in chosen:
            cached[group].uses += 1
        self._drop([g for g in chosen if cached[g].uses >= self.max_uses], "worn")
        return concatenate([*given, replayed])

    def _copies(self, cached: _Cached) -> list[TensorDictBase]:
        group_id = torch.tensor(self._next_group_id)
        self._next_group_id += 1
        return [row.clone(recurse=False).set(keys.GROUP_ID, group_id.clone()) for row in cached.rows]

    def _drop(self, group_ids: list[int], reason: str) -> None:
        for group_id in group_ids:
            del self._groups[group_id]
        self.counts[f"cache/{reason}"] += len(group_ids)

    def state_dict(self) -> dict[str, Any]:
        """Groups, their uses, and counters: plain values and tensors."""
        groups = {g: {"rows": [to_plain(r) for r in c.rows], "uses": c.uses} for g, c in self._groups.items()}
        return {"groups": groups, "next_group_id": self._next_group_id, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores all of it, the counters in place."""
        self._groups = {}
        for group_id, saved in state["groups"].items():
            rows = [from_plain(row) for row in saved["rows"]]
            version = min(int(row[keys.POLICY_VERSION]) for row in rows)
            self._groups[group_id] = _Cached(rows, version, saved["uses"])
        self._next_group_id = state["next_group_id"]
        self.counts.clear()
        self.counts.update(state["counts"])
