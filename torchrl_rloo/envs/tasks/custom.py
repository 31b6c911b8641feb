"""CustomTask: a user's prompts and rewards, without assumptions about either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_rloo.envs.tasks.base import Scorer, Task
from torchrl_rloo.rewards.protocol import RewardFunction, reward_name


class CustomTask(Task):
    """Task of prompts from the user's source, with unchanged columns, evaluated with the training rewards."""

    def make_rewards(self) -> list[RewardFunction]:
        """Raise, since the user has to give the rewards.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"task={self.name!r} has no default rewards; set reward.functions=[my_module.my_reward]")

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the rewards by name, the first as the headline; None for an empty list, if the environment rewards.

        Args:
            rewards: the training rewards.

        Raises:
            ValueError: if ``rewards`` is None.
        """
        if rewards is None:
            raise ValueError(
                f"task={self.name!r} has no default scorer; set eval.scorer=my_module.score, or in the recipe evaluate "
                "eval.scorers={name: my_module.score}"
            )
        return {reward_name(function): function for function in rewards} or None


def _no_rows(split: str, size: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    raise ValueError("task='custom' has no default prompts; set data.source to a file, a directory or a hub id")


CUSTOM = CustomTask(name="custom", synthetic_rows=_no_rows, rewards=(), scorer=None)
