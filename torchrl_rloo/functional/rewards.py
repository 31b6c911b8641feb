"""Combination of the scores of several reward functions into one return."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def combine_rewards(
    rewards: torch.Tensor, weights: Sequence[float], clip_range: tuple[float, float] | None = None
) -> torch.Tensor:
    """Return the weighted sum of each row's scores, ``R_i = clip(sum_k w_k r_ik)``.

    A function that abstained counts as 0 if another function answered. The sum over no functions is 0.

    Args:
        rewards: ``[B, F]``, NaN where a function abstained.
        weights: ``F`` numbers.
        clip_range: bounds of the sum. None disables the clip.

    Returns:
        ``[B]``, NaN for a row on which all functions abstained.
    """
    total = (rewards * rewards.new_tensor(list(weights))).nansum(-1)
    if clip_range is not None:
        total = total.clamp(*clip_range)
    return torch.where(rewards.isnan().all(-1), torch.nan, total) if rewards.shape[-1] else total
