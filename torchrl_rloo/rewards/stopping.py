"""Rewards against completions that never come to an end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class StopProperly(RewardWrapper):
    """Another reward function, whose scores count less, or not at all, where a limit cut the trajectory off.

    A coefficient from 0 to 1 multiplies the score of a truncated trajectory; a negative one stands in its place. Where
    the function abstains, so does this. Multiplying brings a negative score closer to 0, which favours running into
    the limit over a wrong answer: for scores below 0 use a negative coefficient. Logged as
    ``stop_properly_<name of the function>``.

    Source: the penalty for not stopping properly of ProRL (Liu et al. 2025, arXiv 2505.24864), both forms as in
    OpenRLHF's ``stop_properly_penalty_coef``.

    Args:
        function: the reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).
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
                f"coefficient={coefficient} must be in [0, 1], to multiply the score of a truncated completion, or "
                "negative and finite, to replace it"
            )
        super().__init__(function, "stop_properly_{}")
        self.coefficient = coefficient

    def change(self, scores: Scores, batch: RewardBatch) -> Scores:
        """The scores, lower where the trajectory was truncated."""
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
