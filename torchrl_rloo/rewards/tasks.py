"""Rewards of several tasks in one run: one function for one task, and their combination into one score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, reward_name
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores
from torchrl_rloo.runtime.lookup import is_async


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
