"""Control rewards, which carry no signal and show whether a result comes from the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class Shuffled(RewardWrapper):
    """Reward that shuffles the scores of another reward function over the batch.

    The order depends only on the sampled ids, so a resumed run shuffles identically.

    Args:
        function: reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).

    Example:
        >>> shuffled = Shuffled("boxed_accuracy")
        >>> texts, ids = [r"\\boxed{1}", "no", "no", "no"], [[1], [2], [3], [4]]
        >>> sorted(shuffled(prompts=["?"] * 4, completions=texts, completion_ids=ids, answer=["1"] * 4))
        [0.0, 0.0, 0.0, 1.0]
    """

    def __init__(self, function: RewardFunction | str | Mapping[str, Any]):
        super().__init__(function, "shuffled")
        self.whole_batch = True

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores in a random order."""
        random.Random(str(batch.completion_ids)).shuffle(scores)
        return scores
