"""Reward functions that wrap others: the control that shuffles scores, and one function per task."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardCall,
    RewardFunction,
    TrainerState,
    call_reward,
    call_reward_async,
    prepare_reward,
    reward_name,
    take_columns,
)
from torchrl_rloo.rewards.registry import load_reward
from torchrl_rloo.runtime.lookup import is_async

Scores = list["float | None"]


class RewardWrapper(ABC):
    """Reward that calls another reward function and changes its scores.

    A subclass implements :meth:`transform_scores` to compute the new scores. It may override :meth:`select_rows` to
    select the trajectories that the wrapped function scores. The wrapped function gets the same arguments as without
    the wrapper, and its logs are passed on. The wrapper of an async function is async. It also takes over the
    attributes ``whole_batch`` and ``concurrency``.

    A score that is not finite marks a failure of the wrapped function; :meth:`transform_scores` must not make it
    finite. Rewards of tokens become their sum, unless the subclass leaves scores as they are and says so with
    ``keeps_tokens = True``.

    Args:
        function: wrapped function, in any form that :func:`~torchrl_rloo.rewards.registry.load_reward` accepts.
        name: name in logs, where ``{}`` is replaced by the name of ``function``.

    Example:
        >>> class Halved(RewardWrapper):
        ...     def transform_scores(self, scores, batch):
        ...         return [None if score is None else score / 2 for score in scores]
        >>> Halved("boxed_accuracy", "half_{}")(["?"] * 2, [r"\\boxed{7}", "7"], [[1], [2]], answer=["7", "7"])
        [0.5, 0.0]
    """

    keeps_tokens = False

    def __init__(self, function: RewardFunction | str | Mapping[str, Any], name: str = "{}"):
        self.function = load_reward(function)
        self.__name__ = name.replace("{}", reward_name(self.function))
        self.whole_batch = getattr(self.function, "whole_batch", False)
        if hasattr(self.function, "concurrency"):
            self.concurrency = self.function.concurrency
        if is_async(self.function):
            # `is_async` inspects this attribute; a call of the object goes through the class
            self.__call__ = self._call_async

    def prepare(self) -> None:
        """Prepare the wrapped function."""
        prepare_reward(self.function)

    @abstractmethod
    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return ``B`` scores, computed from the ``B`` scores of the wrapped function for ``batch``."""

    def select_rows(self, batch: RewardBatch) -> Sequence[int]:
        """Return the rows of ``batch`` that the wrapped function scores; the others abstain."""
        return range(len(batch))

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        *,
        truncated: Sequence[bool] = (),
        trainer_state: TrainerState | None = None,
        log_extra: Callable[[str, Sequence[Any]], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> Scores | Awaitable[Scores]:
        """Return ``B`` scores; see :mod:`torchrl_rloo.rewards.protocol` for the arguments and errors."""
        state = TrainerState() if trainer_state is None else trainer_state
        batch = RewardBatch(prompts, completions, completion_ids, columns, truncated, state)
        score = self._score_async if is_async(self.function) else self._score
        return score(batch, log_extra, log_metric)

    async def _call_async(self, *args: Any, **kwargs: Any) -> Scores:
        return await self(*args, **kwargs)

    def _score(self, batch: RewardBatch, *logs: Callable[..., None] | None) -> Scores:
        rows = self.select_rows(batch)
        call = call_reward(self.function, batch.select(rows)) if rows else RewardCall([])
        return self._finish(batch, rows, call, *logs)

    async def _score_async(self, batch: RewardBatch, *logs: Callable[..., None] | None) -> Scores:
        rows = self.select_rows(batch)
        call = await call_reward_async(self.function, batch.select(rows)) if rows else RewardCall([])
        return self._finish(batch, rows, call, *logs)

    def _finish(
        self,
        batch: RewardBatch,
        rows: Sequence[int],
        call: RewardCall,
        log_extra: Callable[..., None] | None,
        log_metric: Callable[..., None] | None,
    ) -> Scores:
        def spread(values: Sequence[Any]) -> list[Any]:
            by_row = dict(zip(rows, values, strict=True))
            return [by_row.get(row) for row in range(len(batch))]

        for column, values in call.extra.items() if log_extra else ():
            log_extra(column, spread(values))
        for name, value in call.metrics if log_metric else ():
            log_metric(name, value)
        scores = self.transform_scores(spread(call.scores), batch)
        tokens = {row: call.tokens[k] for k, row in enumerate(rows) if k in call.tokens} if self.keeps_tokens else {}
        return [tokens.get(row, score) for row, score in enumerate(scores)]


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

    keeps_tokens = True

    def __init__(self, task: str, function: RewardFunction | str | Mapping[str, Any], *, column: str = "task"):
        if not task or not column:
            raise ValueError(f"task={task!r} and column={column!r} must not be empty")
        super().__init__(function, f"{task}_{{}}")
        self.task, self.column = task, column

    def select_rows(self, batch: RewardBatch) -> Sequence[int]:
        """Return the rows of the task; raise ``KeyError`` if the dataset does not have ``column``."""
        (tasks,) = take_columns(self.__name__, [self.column], batch.columns)
        return [row for row, task in enumerate(tasks) if task == self.task]

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores unchanged."""
        return scores


class ByTask:
    """Reward that scores each trajectory with the function of its task and abstains on tasks without one.

    Async functions are refused; use a separate :class:`ForTask` for each.

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
