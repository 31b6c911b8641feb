"""Reward that combines the rewards of several tasks into one score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import RewardFunction, reward_name
from torchrl_rloo.rewards.tasks import ForTask
from torchrl_rloo.runtime.lookup import is_async


class ByTask:
    """Reward that scores each trajectory with the function of its task and abstains on tasks without one.

    Args:
        functions: task name -> reward function, in any form that
            :func:`~torchrl_rloo.rewards.registry.load_reward` accepts.
        column: dataset column that names the task.

    Raises:
        ValueError: if a function is async; use a separate :class:`~torchrl_rloo.rewards.tasks.ForTask` for it.

    Example:
        >>> score = ByTask({"sums": "boxed_accuracy", "thinking": "think_format"})
        >>> texts, answers = [r"\\boxed{1}", "<think>a</think>b", "no"], ["1", None, "1"]
        >>> score(["?"] * 3, texts, [[1]] * 3, answer=answers, task=["sums", "thinking", "sums"])
        [1.0, 1.0, 0.0]
    """

    __name__ = "score"

    def __init__(self, functions: Mapping[str, RewardFunction | str | Mapping[str, Any]], *, column: str = "task"):
        self.parts = [ForTask(task, function, column=column) for task, function in functions.items()]
        self.whole_batch = any(part.whole_batch for part in self.parts)
        if waiting := [reward_name(part) for part in self.parts if is_async(part)]:
            raise ValueError(f"ByTask cannot be combined with async rewards {waiting}; use a separate ForTask for each")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """Return ``B`` scores, None where the task has no function or its function abstains."""
        # Do not log: the functions of several tasks would overwrite each other's columns
        columns = {k: v for k, v in columns.items() if k not in ("log_extra", "log_metric")}
        scores: list[float | None] = [None] * len(completions)
        for part in self.parts:
            given = part(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            scores = [mine if mine is not None else other for mine, other in zip(given, scores, strict=True)]
        return scores
