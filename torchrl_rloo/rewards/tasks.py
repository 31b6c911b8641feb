"""Rewards of several tasks in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class ForTask(RewardWrapper):
    """Reward that scores the trajectories of one task and abstains on those of other tasks.

    The function is called only with the rows of its task, and only if there are any, so it need not handle other rows.
    Columns that it logs hold None in the other rows. Logged as ``<task>_<name of the function>``.

    Args:
        task: value of ``column`` in the rows to score.
        function: reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).
        column: dataset column that names the task.

    Raises:
        ValueError: if ``task`` or ``column`` is empty.

    Example:
        >>> math = ForTask("math", "boxed_accuracy")
        >>> texts = [r"\\boxed{1}", "print()", r"\\boxed{2}"]
        >>> math(["?"] * 3, texts, [[1]] * 3, answer=["1", None, "1"], task=["math", "code", "math"])
        [1.0, None, 0.0]
        >>> math.__name__
        'math_boxed_accuracy'
    """

    def __init__(self, task: str, function: RewardFunction | str | Mapping[str, Any], *, column: str = "task"):
        if not task or not column:
            raise ValueError(f"task={task!r} and column={column!r} must not be empty")
        super().__init__(function, f"{task}_{{}}")
        self.task, self.column = task, column

    def select_rows(self, batch: RewardBatch) -> Sequence[int]:
        """Return the rows of the task.

        Raises:
            KeyError: if the dataset does not have ``column``.
        """
        if self.column not in batch.columns:
            raise KeyError(f"{self.__name__} requires column {self.column!r}; the rows have {sorted(batch.columns)}")
        return [row for row, task in enumerate(batch.columns[self.column]) if task == self.task]

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores unchanged."""
        return scores
