"""Rewards that penalize completions cut off by a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class StopProperly(RewardWrapper):
    """Reward that lowers the scores of another reward function for truncated trajectories.

    A coefficient in [0, 1] multiplies the score of a truncated trajectory; a negative coefficient replaces it. The
    reward abstains where the function does. A factor moves a negative score closer to 0, which favors truncation over a
    wrong answer. Use a negative coefficient if scores can be negative. Logged as
    ``stop_properly_<name of the function>``.

    Source: the penalty for not stopping properly of ProRL (Liu et al. 2025, arXiv 2505.24864), in both forms of
    OpenRLHF's ``stop_properly_penalty_coef``.

    Args:
        function: reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).
        coefficient: in [0, 1], or negative and finite.

    Raises:
        ValueError: if ``coefficient`` is above 1 or not finite.

    Example:
        >>> texts, ids, cut = [r"\\boxed{7}"] * 2, [[1]] * 2, [False, True]
        >>> StopProperly("boxed_accuracy", 0.25)(["?"] * 2, texts, ids, answer=["7"] * 2, truncated=cut)
        [1.0, 0.25]
        >>> StopProperly("boxed_accuracy", -0.5)(["?"] * 2, texts, ids, answer=["7"] * 2, truncated=cut)
        [1.0, -0.5]
    """

    def __init__(self, function: RewardFunction | str | Mapping[str, Any], coefficient: float = 0.0):
        if not -math.inf < coefficient <= 1:
            raise ValueError(
                f"coefficient={coefficient} must be in [0, 1] to multiply the score of a truncated completion, or "
                "negative and finite to replace it"
            )
        super().__init__(function, "stop_properly_{}")
        self.coefficient = coefficient

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores, with the penalty on truncated trajectories."""
        if not batch.truncated:
            return scores
        return [
            score
            if score is None or not cut or not math.isfinite(score)
            else score * self.coefficient
            if self.coefficient >= 0
            else self.coefficient
            for score, cut in zip(scores, batch.truncated, strict=True)
        ]
