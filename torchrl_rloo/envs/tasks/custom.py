"""A task that is the user's own: their prompts, their rewards, and nothing assumed about either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_rloo.envs.tasks.base import Scorer, Task
from torchrl_rloo.rewards.protocol import RewardFunction, reward_name


class CustomTask(Task):
    """Prompts from a source of the user's, columns untouched, judged by the rewards that they are trained on."""

    def make_rewards(self) -> list[RewardFunction]:
        """Refuse: the rewards are the user's.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"task={self.name!r} has no rewards of its own: set reward.functions=[my_module.my_reward]")

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the rewards by name, the first as the headline; None for an empty list: the environment rewards.

        Raises:
            ValueError: without rewards.
        """
        if rewards is None:
            raise ValueError(f"task={self.name!r} has no scorer of its own: set eval.scorers={{name: my_module.score}}")
        return {reward_name(function): function for function in rewards} or None


def _no_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    raise ValueError("task='custom' has no prompts of its own: set data.source to a file, a directory or a hub id")


CUSTOM = CustomTask(name="custom", synthetic_rows=_no_rows, rewards=(), scorer=None)
