"""Trajectories without a usable return: all their rewards are NaN, and no reward function is called for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import entry_of
from torchrl_rloo.data.stop_reasons import abstains, is_done, stop_reason

OnTimeLimit = Literal["score", "abstain"]
ON_TIME_LIMIT = ("score", "abstain")
_REWARD_ENTRIES = ("reward", "rewards", "raw_rewards")


def mark_abstaining(env: Any, next_rows: Iterable[TensorDictBase]) -> None:
    """Set every reward of trajectories that abstain to NaN, in place.

    Calling it again changes nothing.
    """
    for row in next_rows:
        if is_abstaining(env, row):
            _set_nan(row)


def is_abstaining(env: Any, next_row: TensorDictBase) -> bool:
    """Return whether a trajectory has ended and abstains, whatever reward functions would say.

    It abstains if it failed or was cancelled (:func:`~torchrl_rloo.data.stop_reasons.abstains`), or if the policy
    sampled no token of it. With ``on_time_limit="abstain"`` it also abstains if it ran out of time.
    """
    if not is_done(next_row):
        return False
    reason = stop_reason(next_row) if keys.STOP_REASON[1] in next_row.keys() else None
    if reason is not None and abstains(reason):
        return True
    if reason == "time":
        while hasattr(env, "base_env"):
            env = env.base_env
        if getattr(env, "on_time_limit", "score") == "abstain":
            return True
    return not _has_actions(next_row)


def _has_actions(row: TensorDictBase) -> bool:
    """Return whether a row has an action token in any of its samples; True if it has no mask."""
    mask, previous = entry_of(row, keys.ACTION_MASK), entry_of(row, keys.PREVIOUS_SEGMENTS)
    return mask is None or bool(mask.any()) or (previous is not None and bool(previous["mask"].any()))


def _set_nan(row: TensorDictBase) -> None:
    for name in _REWARD_ENTRIES:
        if name in row.keys():
            row.set(name, torch.full_like(row[name], torch.nan))
    # Token rewards are rewards of action tokens only
    if (rewards := row.get(keys.TOKEN_REWARDS[1:], None)) is not None:
        row.set(keys.TOKEN_REWARDS[1:], rewards.masked_fill(row[keys.ACTION_MASK], torch.nan))
