"""Ensembles of reward models, whose disagreement lowers the reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import pvariance
from typing import Any

from torchrl_rloo.rewards.protocol import RewardBatch, TrainerState, call_reward, prepare_reward, reward_name
from torchrl_rloo.rewards.registry import RewardSpec, load_reward
from torchrl_rloo.runtime.lookup import is_async


class Ensemble:
    r"""Reward of several reward models that distrusts what they disagree on.

    With the scores :math:`r_1, \dots, r_K` of a completion and their mean :math:`\mu`, it is
    :math:`\mu - \lambda \frac{1}{K} \sum_k (r_k - \mu)^2`, or :math:`\min_k r_k` with ``worst=True``. Members must
    score on the same scale, as models do that differ in their seed or data only. A completion on which a member
    abstains or that it cannot score abstains.

    Metric: ``<name>/disagreement``, the mean standard deviation of the members' scores.

    Source: uncertainty-weighted (UWO) and worst-case optimization (WCO) of Coste et al. 2023, arXiv 2310.02743.

    Args:
        functions: at least 2 reward functions, in forms that :func:`~torchrl_rloo.rewards.load_reward` accepts.
        coefficient: :math:`\lambda`; 0 is the mean.
        worst: True takes the lowest score instead.
        name: name in logs.

    Raises:
        ValueError: if there are fewer than 2 functions, one is async, or ``coefficient`` is negative.

    Example:
        >>> low = lambda completions, **columns: [0.0, 1.0]
        >>> high = lambda completions, **columns: [2.0, 1.0]
        >>> Ensemble([low, high], coefficient=0.5)(["?"] * 2, ["a", "b"], [[1], [2]])
        [0.5, 1.0]
    """

    whole_batch = True  # members may compare rows

    def __init__(
        self, functions: Sequence[RewardSpec], *, coefficient: float = 0.5, worst: bool = False, name: str = "ensemble"
    ):
        self.functions = [load_reward(spec) for spec in functions]
        if len(self.functions) < 2 or any(map(is_async, self.functions)):
            names = list(map(reward_name, self.functions))
            raise ValueError(f"functions={names} of an Ensemble must be at least 2, none of them async")
        if not 0 <= coefficient < math.inf:
            raise ValueError(f"coefficient={coefficient} must be finite and at least 0")
        self.coefficient, self.worst, self.__name__ = coefficient, worst, name

    def prepare(self) -> None:
        """Prepare all members."""
        for function in self.functions:
            prepare_reward(function)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any],
        log_metric: Callable[[str, float], None] = lambda name, value: None,
        **columns: Any,
    ) -> list[float | None]:
        """Return ``B`` scores."""
        state, truncated = columns.pop("trainer_state", TrainerState()), columns.pop("truncated", ())
        batch = RewardBatch(prompts, completions, completion_ids, columns, truncated, state)
        calls = [call_reward(function, batch) for function in self.functions]
        for name, value in (metric for call in calls for metric in call.metrics):
            log_metric(name, value)
        rows = list(zip(*(call.scores for call in calls), strict=True))
        variances = [None if None in row else pvariance(row) for row in rows]
        if deviations := [math.sqrt(variance) for variance in variances if variance is not None]:
            log_metric(f"{self.__name__}/disagreement", sum(deviations) / len(deviations))
        if self.worst:  # the minimum with NaN depends on the order
            return [v if v is None or math.isnan(v) else min(row) for row, v in zip(rows, variances, strict=True)]
        means = [None if None in row else sum(row) / len(row) for row in rows]
        return [m if m is None else m - self.coefficient * v for m, v in zip(means, variances, strict=True)]
