"""Rewards that must not teach anything: controls that show whether a result comes from the reward."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class Shuffled(RewardWrapper):
    """The scores of another reward function, dealt out to the wrong trajectories.

    The order depends on what was sampled and on nothing else, so a resumed run deals the same.

    Args:
        function: the reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).

    Example:
        >>> shuffled = Shuffled("boxed_accuracy")
        >>> texts, ids = [r"\\boxed{1}", "no", "no", "no"], [[1], [2], [3], [4]]
        >>> sorted(shuffled(prompts=["?"] * 4, completions=texts, completion_ids=ids, answer=["1"] * 4))
        [0.0, 0.0, 0.0, 1.0]
    """

    def __init__(self, function: RewardFunction | str | Mapping[str, Any]):
        super().__init__(function, "shuffled")
        self.whole_batch = True

    def change(self, scores: Scores, batch: RewardBatch) -> Scores:
        """The scores in another order."""
        random.Random(str(batch.completion_ids)).shuffle(scores)
        return scores
