"""What reward functions made of another reward function share."""

from __future__ import annotations

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
    is_async,
    reward_name,
)
from torchrl_rloo.rewards.registry import load_reward

Scores = list["float | None"]


class RewardWrapper(ABC):
    """A reward function made of another one, which it calls by the whole protocol.

    A subclass says in :meth:`change` what it makes of the scores, and in :meth:`rows` which trajectories it asks about.
    The wrapped function gets only what it takes, as without the wrapper; what it logs is passed on. Around an async
    function a wrapper is async too, and ``whole_batch`` and ``concurrency`` of the function hold for its wrapper, too.

    A score that is not finite stands for a failure of the wrapped function and must stay one in :meth:`change`.

    Args:
        function: the wrapped function, or anything that :func:`~torchrl_rloo.rewards.registry.load_reward` takes.
        name: the log name; ``{}`` in it stands for the name of ``function``.
    """

    def __init__(self, function: RewardFunction | str | Mapping[str, Any], name: str = "{}"):
        self.function = load_reward(function)
        self.__name__ = name.replace("{}", reward_name(self.function))
        self.whole_batch = getattr(self.function, "whole_batch", False)
        if hasattr(self.function, "concurrency"):
            self.concurrency = self.function.concurrency
        if is_async(self.function):
            self.__call__ = self._call_async  # `is_async` looks here; a call itself goes through the class

    def prepare(self) -> None:
        """Makes the wrapped function ready, see :mod:`torchrl_rloo.rewards.executors`."""
        if callable(prepare := getattr(self.function, "prepare", None)):
            prepare()

    @abstractmethod
    def change(self, scores: Scores, batch: RewardBatch) -> Scores:
        """The scores instead of those that the wrapped function gave to the ``B`` trajectories of ``batch``."""

    def rows(self, batch: RewardBatch) -> Sequence[int]:
        """Which trajectories of ``batch`` the wrapped function is asked about; the others abstain."""
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
        """``B`` scores, see :mod:`torchrl_rloo.rewards.protocol`.

        Raises:
            MalformedScoresError: if the wrapped function does not return one number or None for each trajectory.
            Exception: whatever the wrapped function raises.
        """
        state = TrainerState() if trainer_state is None else trainer_state
        batch = RewardBatch(prompts, completions, completion_ids, columns, truncated, state)
        score = self._score_async if is_async(self.function) else self._score
        return score(batch, log_extra, log_metric)

    async def _call_async(self, *args: Any, **kwargs: Any) -> Scores:
        return await self(*args, **kwargs)

    def _score(self, batch: RewardBatch, *logs: Callable[..., None] | None) -> Scores:
        rows = self.rows(batch)
        call = call_reward(self.function, batch.select(rows)) if rows else RewardCall([])
        return self._finish(batch, rows, call, *logs)

    async def _score_async(self, batch: RewardBatch, *logs: Callable[..., None] | None) -> Scores:
        rows = self.rows(batch)
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
        return self.change(spread(call.scores), batch)
