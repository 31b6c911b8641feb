"""Reward functions that wrap another one, and the control that shuffles its scores."""

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
    reward_name,
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
    finite.

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
        """Prepare the wrapped function; see :mod:`torchrl_rloo.rewards.executors`."""
        if callable(prepare := getattr(self.function, "prepare", None)):
            prepare()

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
        """Return ``B`` scores; see :mod:`torchrl_rloo.rewards.protocol` for the arguments.

        Raises:
            MalformedScoresError: if the wrapped function does not return one number or None per trajectory.
            Exception: any exception of the wrapped function.
        """
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
        return self.transform_scores(spread(call.scores), batch)


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
