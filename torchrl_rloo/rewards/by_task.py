"""One score for rows of several tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import RewardFunction, is_async, reward_name
from torchrl_rloo.rewards.tasks import ForTask


class ByTask:
    """Scores each trajectory by the function of its task; it abstains on those of other tasks.

    Args:
        functions: by the name of a task, its reward function or what
            :func:`~torchrl_rloo.rewards.registry.load_reward` takes.
        column: the dataset's column that names the task.

    Raises:
        ValueError: for an async function, which several rewards beside each other take (:class:`ForTask`).

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
            raise ValueError(f"{waiting} are async: give them as rewards of their own, each in ForTask")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """``B`` scores, None where no function is for the row's task, or where it abstains."""
        columns = {k: v for k, v in columns.items() if k not in ("log_extra", "log_metric")}  # one column, many tasks
        scores: list[float | None] = [None] * len(completions)
        for part in self.parts:
            given = part(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            scores = [mine if mine is not None else other for mine, other in zip(given, scores, strict=True)]
        return scores
