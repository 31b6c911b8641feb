"""How a reward function is called.

A reward is a plain callable ``f(prompts, completions, completion_ids, **columns) -> list[float | None]``. All arguments
are lists of one entry per trajectory: prompts and completions as text or as chat messages, the sampled ids, and each of
the dataset's other columns by name. ``None`` abstains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

RewardFunction = Callable[..., Sequence[float | None]]

_LOGGER = logging.getLogger(__name__)


class MalformedScoresError(TypeError, ValueError):
    """A reward function returned something other than one number or None for each trajectory."""


def reward_name(function: RewardFunction) -> str:
    """The name under which a function's scores are logged."""
    return getattr(function, "__name__", None) or type(function).__name__


def call_reward(
    function: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[torch.Tensor, int]:
    """Scores of ``B`` trajectories by one function.

    A score that is not a finite number is turned into an abstention and counted, since one such value in the loss would
    end the run.

    Returns:
        ``(scores [B] float32 with NaN for abstentions, number of scores that were not finite)``.

    Raises:
        MalformedScoresError: if the function does not return a sequence of as many numbers and Nones.
    """
    name = reward_name(function)
    scores = function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    scores = [s.item() if hasattr(s, "item") else s for s in scores] if isinstance(scores, list | tuple) else scores
    if not isinstance(scores, list | tuple) or not all(s is None or isinstance(s, Real) for s in scores):
        raise MalformedScoresError(f"reward {name} returned {scores!r:.100}; it must return a list of numbers or None")
    if len(scores) != len(completions):
        raise MalformedScoresError(f"reward {name} returned {len(scores)} scores for {len(completions)} completions")
    values = torch.tensor([torch.nan if s is None else float(s) for s in scores], dtype=torch.float32)
    given = torch.tensor([s is not None for s in scores], dtype=torch.bool)
    bad = given & ~values.isfinite()
    if bad.any():
        _LOGGER.warning("reward %s gave %d scores that are not finite; they abstain", name, int(bad.sum()))
    return torch.where(bad, torch.nan, values), int(bad.sum())


def call_reward_row_by_row(
    function: RewardFunction,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[torch.Tensor, int, int]:
    """As :func:`call_reward`, one trajectory a call, so that one on which the function raises costs no other.

    Returns:
        ``(scores [B] with NaN where the function raised, scores that were not finite, rows on which it raised)``.
    """
    scores, bad, failed = torch.full((len(completions),), torch.nan), 0, 0
    for i in range(len(completions)):
        one = slice(i, i + 1)
        try:
            value, not_finite = call_reward(
                function, prompts[one], completions[one], completion_ids[one], {k: v[one] for k, v in columns.items()}
            )
        except Exception:
            failed += 1
            _LOGGER.exception(
                "reward %s raised on the completion %.200r; it abstains", reward_name(function), completions[i]
            )
        else:
            scores[i], bad = value[0], bad + not_finite
    return scores, bad, failed


def final_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """What a completion says in the end: its text, or the content of its last assistant message ("" without one)."""
    if isinstance(completion, str):
        return completion
    for message in reversed(completion):
        if message["role"] == "assistant":
            return message["content"] or ""  # None beside tool calls
    return ""
