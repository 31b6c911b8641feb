"""Rewards that must not teach anything: controls that show whether a result comes from the reward."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from torchrl_rloo.rewards.protocol import RewardFunction


class Shuffled:
    """The scores of another reward function, dealt out to the wrong trajectories.

    The order depends on what was sampled and on nothing else, so a resumed run deals the same.

    Args:
        function: the reward function, or its dotted path.

    Example:
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> shuffled = Shuffled(boxed_accuracy)
        >>> texts, ids = [r"\\boxed{1}", "no", "no", "no"], [[1], [2], [3], [4]]
        >>> sorted(shuffled(prompts=["?"] * 4, completions=texts, completion_ids=ids, answer=["1"] * 4))
        [0.0, 0.0, 0.0, 1.0]
    """

    __name__ = "shuffled"

    def __init__(self, function: RewardFunction | str):
        if isinstance(function, str):
            module, _, name = function.rpartition(".")
            function = getattr(import_module(module), name)
        self.function = function

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
        """Scores, see :mod:`torchrl_rloo.rewards.protocol`."""
        scores = list(self.function(completion_ids=completion_ids, **kwargs))
        random.Random(str(completion_ids)).shuffle(scores)
        return scores
