"""MCAdvantage: groups of trajectories in, rows with advantages out.

Replaces TorchRL's class, which has no leave-one-out, groups by the prompt's text, and keeps incomplete groups for ever
and out of the checkpoint.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torchrl.envs import Transform
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import collection, stack_rows
from torchrl_rloo.functional import ESTIMATORS, Estimator

_LOGGER = logging.getLogger(__name__)


class MCAdvantage(Transform):
    """A replay-buffer transform that holds rows back until their group is complete, then writes ``"advantage"``.

    Groups are told apart by ``"group_id"``; their members may come in any order and any number of batches. Rows leave
    in the order in which their groups were completed. A row whose reward is NaN abstains: it completes its group, stays
    out of the baseline and gets advantage 0.

    Args:
        num_generations: ``G``, members of a group. A row's own ``"group_size"`` comes first.
        estimator: a name in :data:`~torchrl_rloo.functional.ESTIMATORS`, or any function of the same signature.
        max_pending_groups: how many incomplete groups to hold; the oldest goes when there are more. None for no limit.
        max_pending_age: how many later batches may arrive before an incomplete group goes. None for no limit.
        incomplete: what becomes of an incomplete group that goes: ``"drop"`` it, or ``"use"`` the members that came.

    Attributes:
        counts: ``"groups"``, ``"rows"`` that left; ``"expired_groups"``, ``"expired_rows"`` of groups that went
            incomplete; ``"late_rows"`` dropped since their group had left before them.

    Raises:
        ValueError: for a number out of range or an unknown estimator; for rows of a group that disagree on its size
            (none of their batch is taken in then).

    Example:
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(num_generations=2))
        >>> def row(reward):
        ...     return TensorDict({"group_id": torch.tensor(7), ("next", "reward"): torch.tensor([[reward]])})
        >>> _ = buffer.extend(stack_rows([row(1.0)]))
        >>> len(buffer)
        0
        >>> _ = buffer.extend(stack_rows([row(0.0)]))
        >>> buffer[:]["advantage"].flatten().tolist()
        [1.0, -1.0]
    """

    REMEMBERED_GROUPS = 100_000

    def __init__(
        self,
        num_generations: int,
        *,
        estimator: str | Estimator = "rloo",
        max_pending_groups: int | None = None,
        max_pending_age: int | None = None,
        incomplete: Literal["drop", "use"] = "drop",
    ):
        super().__init__()
        if num_generations < 2:
            raise ValueError(
                f"num_generations={num_generations}: a leave-one-out baseline needs at least 2 rows in a group"
            )
        if isinstance(estimator, str) and estimator not in ESTIMATORS:
            raise ValueError(f"estimator={estimator!r} is unknown; known are {sorted(ESTIMATORS)}, or pass a function")
        if incomplete not in ("drop", "use"):
            raise ValueError(f"incomplete={incomplete!r} must be 'drop' or 'use'")
        for name, value in (("max_pending_groups", max_pending_groups), ("max_pending_age", max_pending_age)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be None or at least 1")
        self.num_generations, self.incomplete = num_generations, incomplete
        self.estimator = ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
        self.max_pending_groups, self.max_pending_age = max_pending_groups, max_pending_age
        self.counts: Counter[str] = Counter()
        self._pending: OrderedDict[int, list[TensorDictBase]] = OrderedDict()  # oldest group first
        self._arrived: dict[int, int] = {}  # batch in which each pending group's first row came
        self._left: OrderedDict[int, None] = OrderedDict()  # groups that have left, so that none is counted twice
        self._batch = 0

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return sum(map(len, self._pending.values()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leaves sampled rows as they are: the work is done when rows are written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Takes rows in; returns those whose groups are complete, with advantages, or None."""
        rows = [tensordict] if tensordict.ndim == 0 else tensordict.reshape(-1).unbind(0)
        sizes = self._group_sizes(rows)
        self._batch += 1
        complete = []
        for row in rows:
            group_id = int(row[keys.GROUP_ID])
            if group_id in self._left:
                self.counts["late_rows"] += 1
                _LOGGER.warning("a row of group %d came after its group had left; it is dropped", group_id)
                continue
            members = self._pending.setdefault(group_id, [])
            self._arrived.setdefault(group_id, self._batch)
            members.append(row)
            if len(members) >= sizes[group_id]:
                complete.append(self._release(group_id))
        complete += self._expire()
        return self._advantages(complete) if complete else None

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

    def _release(self, group_id: int) -> list[TensorDictBase]:
        self._left[group_id] = None
        if len(self._left) > self.REMEMBERED_GROUPS:
            self._left.popitem(last=False)
        del self._arrived[group_id]
        return self._pending.pop(group_id)

    def _expire(self) -> list[list[TensorDictBase]]:
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

    def _advantages(self, groups: list[list[TensorDictBase]]) -> TensorDictBase:
        """All complete groups at once."""
        rows = [row for group in groups for row in group]
        index = torch.repeat_interleave(torch.tensor([len(g) for g in groups]))
        rewards = torch.stack([row[keys.REWARD].reshape(()) for row in rows])
        for row, advantage in zip(rows, self.estimator(rewards, index), strict=True):
            row.set(keys.ADVANTAGE, advantage.reshape(1, 1))
        self.counts["groups"] += len(groups)
        self.counts["rows"] += len(rows)
        return stack_rows(rows)

    def get_extra_state(self) -> dict[str, Any]:
        """Pending groups and counters, for ``state_dict``: plain values and tensors."""
        return {
            "pending": {g: [_to_plain(row) for row in rows] for g, rows in self._pending.items()},
            "arrived": dict(self._arrived),
            "left": list(self._left),
            "batch": self._batch,
            "counts": dict(self.counts),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores pending groups and counters."""
        self._pending = OrderedDict((g, [_from_plain(row) for row in rows]) for g, rows in state["pending"].items())
        self._arrived, self._left = dict(state["arrived"]), OrderedDict.fromkeys(state["left"])
        self._batch = state["batch"]
        self.counts.clear()
        self.counts.update(state["counts"])


_VALUE = "non-tensor value"
_CLASSES = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs, "ref_log_probs": LogProbs}


def _to_plain(row: TensorDictBase) -> dict[str, Any]:
    """A row as nested dicts, which a checkpoint can hold; text and other values are marked as such."""

    def plain(value):
        if is_non_tensor(value):
            return {_VALUE: value.tolist()}
        return _to_plain(value) if is_tensor_collection(value) else value

    return {k: plain(v) for k, v in row.items()}


def _from_plain(row: dict[str, Any], cls: type | None = None) -> TensorDictBase:
    """The row again, with the tensorclasses it had."""

    def entry(key, value):
        if isinstance(value, dict):
            return NonTensorData(value[_VALUE]) if _VALUE in value else _from_plain(value, _CLASSES.get(key))
        return value

    entries = {k: entry(k, v) for k, v in row.items()}
    return TensorDict(entries, []) if cls is None else collection(cls, **entries)
