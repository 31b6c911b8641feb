"""What a trajectory earned, as filters, curricula and caches see it, and rows by group.

``returns`` arguments are functions of a batch of rows that give ``[B]``, or ``[B, F]`` where several rewards are judged
each on its own; NaN where a row abstains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.functional.rewards import combine_rewards

Returns = Callable[[TensorDictBase], torch.Tensor]


def final_return(rows: TensorDictBase) -> torch.Tensor:
    """``("next", "reward")`` as it stands, ``[B]``: after shaping and any KL, which makes every return unlike another.

    Where there is a KL in the reward, take :class:`WeightedScores`.
    """
    return torch.stack([reward.reshape(()) for reward in ragged(rows, keys.REWARD)])


@dataclass(frozen=True)
class WeightedScores:
    """The weighted sum of the reward functions' scores, ``[B]``: the return before any KL.

    Attributes:
        weights: one for each of the ``F`` functions; 0 leaves a function out.
        clip_range: bounds of the sum, or None.
        raw: whether to take the scores before shaping, where there was any.
    """

    weights: Sequence[float]
    clip_range: tuple[float, float] | None = None
    raw: bool = False

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """``[B]``; NaN for a row on which all functions that have a weight abstained."""
        scores = _scores(rows, self.raw)
        if scores.shape[-1] != len(self.weights):
            raise ValueError(f"{len(self.weights)} weights {self.weights} for rows with {scores.shape[-1]} scores")
        counted = [k for k, weight in enumerate(self.weights) if weight]
        return combine_rewards(scores[:, counted], [self.weights[k] for k in counted], self.clip_range)


@dataclass(frozen=True)
class EachScore:
    """Every reward function's scores on their own, ``[B, F]``, for ``rewards="normalize_then_sum"`` (GDPO).

    Attributes:
        raw: whether to take the scores before shaping, where there was any.
    """

    raw: bool = False

    def __call__(self, rows: TensorDictBase) -> torch.Tensor:
        """``[B, F]``."""
        return _scores(rows, self.raw)


def _scores(rows: TensorDictBase, raw: bool) -> torch.Tensor:
    key = keys.RAW_REWARDS if raw and keys.RAW_REWARDS in rows[0].keys(True) else keys.REWARDS
    return torch.stack(ragged(rows, key))


def by_group(rows: TensorDictBase) -> dict[int, TensorDictBase]:
    """The rows of each group, by ascending ``"group_id"``: the order does not depend on how they arrived."""
    members: dict[int, list[TensorDictBase]] = {}
    for row in rows.unbind(0):
        members.setdefault(int(row[keys.GROUP_ID]), []).append(row)
    return {group_id: stack_rows(members[group_id]) for group_id in sorted(members)}
