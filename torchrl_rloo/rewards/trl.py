"""TRL's rewards under TRL's names, with its order of positional arguments: an import is all that a script changes.

They score like the classes of this package (:class:`~torchrl_rloo.rewards.MathAccuracy`, ...), to which they delegate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torchrl_rloo.rewards.accuracy import CosineScaled, MathAccuracy, ReasoningAccuracy
from torchrl_rloo.rewards.formats import think_format
from torchrl_rloo.rewards.lengths import RepetitionPenalty, SoftOverlong
from torchrl_rloo.rewards.protocol import RowReward, final_text


def accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    r"""Score as :class:`~torchrl_rloo.rewards.MathAccuracy` does.

    Args:
        completions: ``B`` completions.
        solution: ``B`` gold answers.
        log_extra: function that gets the columns ``solution``, ``gold_parsed`` and ``answer_parsed``.
        **kwargs: unused.

    Example:
        >>> accuracy_reward([[{"content": r"\boxed{\frac{1}{3}}"}], [{"content": r"\boxed{2}"}]], ["1/3", "1/3"])
        [1.0, 0.0]
    """
    return _score(_shared(), completions, solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Any],
    solution: Sequence[str],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Score as :class:`~torchrl_rloo.rewards.ReasoningAccuracy` does.

    Args:
        completions: ``B`` completions.
        solution: ``B`` gold answers.
        reasoning_delimiters: strings that end the reasoning; None means ``["</think>"]``.
        log_extra: function that gets the columns of :func:`accuracy_reward`.
        **kwargs: unused.
    """
    delimiters = ("</think>",) if reasoning_delimiters is None else tuple(reasoning_delimiters)
    return _score(_shared(delimiters), completions, solution, log_extra)


def think_format_reward(completions: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """Score as :func:`~torchrl_rloo.rewards.think_format` does; other arguments are ignored."""
    return think_format(completions, completions, completions)


class _CosineScaledReward(CosineScaled):
    def __init__(self, *args: Any):
        super().__init__(*args)
        self.__name__ = "cosine_scaled_reward"

    def __call__(
        self, completions: Sequence[Any], solution: Sequence[str], completion_ids: Sequence[Any], **kwargs: Any
    ) -> list[float | None]:
        """Return ``B`` scores."""
        return super().__call__(completions, completions, completion_ids, solution=solution)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """Return a reward ``f(completions, solution, completion_ids)``; see :class:`~torchrl_rloo.rewards.CosineScaled`."""
    return _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)


class _RewardOfIds:
    def __init__(self, reward: RowReward, name: str):
        self.reward, self.__name__ = reward, name

    def __call__(self, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float | None]:
        """Return ``B`` scores."""
        return self.reward((), (), completion_ids)


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float | None]]:
    """Return a reward ``f(completion_ids)``; see :class:`~torchrl_rloo.rewards.RepetitionPenalty`."""
    return _RewardOfIds(RepetitionPenalty(ngram_size, max_penalty), "repetition_penalty_reward")


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float | None]]:
    """Return a reward ``f(completion_ids)``; see :class:`~torchrl_rloo.rewards.SoftOverlong`."""
    return _RewardOfIds(SoftOverlong(max_completion_len, soft_punish_cache), "soft_overlong_punishment_reward")


@cache
def _shared(delimiters: tuple[str, ...] | None = None) -> MathAccuracy:
    """Return the reward that all calls share, since its workers take a second to start."""
    return MathAccuracy() if delimiters is None else ReasoningAccuracy(delimiters)


def _score(
    reward: MathAccuracy,
    completions: Sequence[Any],
    solution: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None,
) -> list[float | None]:
    scores = reward(completions, completions, completions, solution=solution)
    if log_extra is not None:
        parsed = reward.describe(solution, [final_text(completion) for completion in completions])
        for column, values in zip(("gold_parsed", "answer_parsed"), zip(*parsed, strict=True), strict=False):
            log_extra(column, list(values))
        log_extra("solution", list(solution))
    return scores
