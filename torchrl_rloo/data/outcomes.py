"""Returns of trajectories for filters, curricula and caches, and rows by group.

A ``returns`` argument is a function of a batch of rows. It returns ``[B]``, or ``[B, F]`` to judge ``F`` rewards
separately; NaN where a row abstains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.functional.rewards import combine_rewards
from torchrl_rloo.functional.statistics import group_ranges, has_signal

Returns = Callable[[TensorDictBase], torch.Tensor]


def final_return(rows: TensorDictBase) -> torch.Tensor:
    """Return ``("next", "reward")`` of each row, ``[B]``, after shaping and any KL term.

    A KL term makes all returns differ; use :class:`WeightedScores` if the reward has one.
    """
    return torch.stack([reward.reshape(()) for reward in ragged(rows, keys.REWARD)])


def rows_with_signal(rows: TensorDictBase, returns: Returns = final_return) -> torch.Tensor:
    """Return bool ``[B]``, True for the rows of groups whose returns differ, from which a group baseline learns."""
    groups = torch.stack(ragged(rows, keys.GROUP_ID)).reshape(-1).unique(return_inverse=True)[1]
    return has_signal(group_ranges(returns(rows), groups))[groups]


@dataclass(frozen=True)
class WeightedScores:
    """Weighted sum of the reward functions' scores, ``[B]``: the return before any KL term."""

    weights: Sequence[float]  # F weights, one per reward function; 0 leaves a function out
    clip_range: tuple[float, float] | None = None  # bounds of the sum; None disables clipping
    raw: bool = False  # if True, use the scores before shaping, if the rows have them

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the sums, ``[B]``; NaN for a row on which all functions with a nonzero weight abstained."""
        scores = _scores(rows, self.raw)
        if scores.shape[-1] != len(self.weights):
            raise ValueError(f"weights={self.weights} must have one weight for each of the {scores.shape[-1]} scores")
        counted = [k for k, weight in enumerate(self.weights) if weight]
        return combine_rewards(scores[:, counted], [self.weights[k] for k in counted], self.clip_range)


@dataclass(frozen=True)
class SeparateScores:
    """Separate scores of each reward function, ``[B, F]``, for ``rewards="normalize_then_sum"`` (GDPO)."""

    raw: bool = False  # if True, use the scores before shaping, if the rows have them

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """Return the scores, ``[B, F]``; NaN where a function abstained."""
        return _scores(rows, self.raw)


def _scores(rows: TensorDictBase, raw: bool) -> torch.Tensor:
    key = keys.RAW_REWARDS if raw and keys.RAW_REWARDS in rows[0].keys(True) else keys.REWARDS
    return torch.stack(ragged(rows, key))


def sampled_rows(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows that the policy sampled, without greedy members and demonstrations; ``[B]`` to ``[B']``."""
    if not len(rows) or (origins := rows.get(keys.ORIGIN, None)) is None:
        return rows
    kept = [row for row, origin in zip(rows.unbind(0), origins.flatten(), strict=True) if origin == keys.SAMPLED]
    return stack_rows(kept) if kept else rows[:0]


def group_rows(rows: TensorDictBase) -> dict[int, TensorDictBase]:
    """Return the rows of each group, sorted by ``"group_id"`` so that their order of arrival does not matter."""
    members: dict[int, list[TensorDictBase]] = {}
    for row in rows.unbind(0):
        members.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    return {group_id: stack_rows(members[group_id]) for group_id in sorted(members)}
