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
        TypeError: if the function does not return a sequence of numbers and Nones.
        ValueError: if it returns another number of scores than of trajectories.
    """
    name = reward_name(function)
    scores = function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
    scores = scores.tolist() if hasattr(scores, "tolist") else scores
    scores = [s.item() if hasattr(s, "item") else s for s in scores] if isinstance(scores, list | tuple) else scores
    if not isinstance(scores, list | tuple) or not all(s is None or isinstance(s, Real) for s in scores):
        raise TypeError(f"reward {name} returned {scores!r:.100}; it must return a list of numbers or None")
    if len(scores) != len(completions):
        raise ValueError(f"reward {name} returned {len(scores)} scores for {len(completions)} completions")
    values = torch.tensor([torch.nan if s is None else float(s) for s in scores], dtype=torch.float32)
    given = torch.tensor([s is not None for s in scores], dtype=torch.bool)
    bad = given & ~values.isfinite()
    if bad.any():
        _LOGGER.warning("reward %s gave %d scores that are not finite; they abstain", name, int(bad.sum()))
    return torch.where(bad, torch.nan, values), int(bad.sum())
