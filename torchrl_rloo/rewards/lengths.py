"""Rewards that depend on how a completion ends: its length in tokens, repetition, and limits that cut it off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torchrl_rloo.rewards.protocol import RewardBatch, RewardFunction, RowReward, take_columns
from torchrl_rloo.rewards.wrapping import RewardWrapper, Scores


class SoftOverlong(RowReward):
    """Penalty for long completions: 0 up to a length, then linear down to -1 at the maximum length.

    With ``n`` sampled tokens, ``L = max_completion_len`` and ``c = soft_punish_cache``, the reward is 0 for
    ``n <= L - c``, ``(L - c - n) / c`` for ``L - c < n <= L``, and -1 for ``n > L``.

    Source: DAPO, arXiv 2503.14476, eq. 13; names of TRL.

    Args:
        max_completion_len: ``L`` in tokens. The last case cannot occur if at most ``L`` new tokens are sampled.
        soft_punish_cache: ``c`` in tokens. With 0 the reward drops from 0 at ``L`` to -1 at ``L + 1``.

    Raises:
        ValueError: unless ``max_completion_len > 0`` and ``0 <= soft_punish_cache <= max_completion_len``.

    Example:
        >>> SoftOverlong(max_completion_len=100, soft_punish_cache=20)(["?"], ["..."], [[1] * 90])
        [-0.5]
    """

    __name__, judges_ids = "soft_overlong", True

    def __init__(self, max_completion_len: int, soft_punish_cache: int):
        if not max_completion_len > 0:
            raise ValueError(f"max_completion_len={max_completion_len} must be a positive number of tokens")
        if not 0 <= soft_punish_cache <= max_completion_len:
            raise ValueError(
                f"soft_punish_cache={soft_punish_cache} must be in [0, max_completion_len={max_completion_len}]"
            )
        self.max_completion_len, self.soft_punish_cache = max_completion_len, soft_punish_cache

    def score(self, ids: Sequence[int]) -> float:
        """Return a penalty in [-1, 0]."""
        free = self.max_completion_len - self.soft_punish_cache
        if len(ids) <= free:
            return 0.0
        return -1.0 if len(ids) > self.max_completion_len else (free - len(ids)) / self.soft_punish_cache


class Length(RowReward):
    """Penalty for each token by which a completion is longer or shorter than its target.

    With ``n`` sampled tokens, the reward is ``-cost |n - target|``, or ``-cost max(0, n - target)`` with
    ``free_if_shorter``. A target of 0 gives a linear cost of length, and ``free_if_shorter`` a cost beyond a budget.
    Add a reward of 1 for a correct answer and a target per row for the exact form of L1.

    Source: L1 (Aggarwal and Welleck 2025, arXiv 2503.04697), length term of eq. 1, with its default cost.

    Args:
        target: number of tokens, or the name of the dataset column of targets, in which None abstains.
        cost: cost per token of deviation.
        free_if_shorter: True if completions shorter than the target cost nothing.

    Raises:
        ValueError: if ``target`` is negative or empty, or ``cost`` negative or not finite.

    Example:
        >>> Length(target=100, cost=0.01)(["?"] * 2, ["..."] * 2, [[1] * 150, [1] * 90])
        [-0.5, -0.1]
    """

    __name__, judges_ids = "length", True

    def __init__(self, target: int | str = 0, cost: float = 0.0003, *, free_if_shorter: bool = False):
        _check_tokens("target", target, cost)
        self.target, self.cost, self.free_if_shorter = target, cost, free_if_shorter
        self.reads = (target,) if isinstance(target, str) else ()

    def score(self, ids: Sequence[int], *targets: int | None) -> float | None:
        """Return a penalty, None where the target is None."""
        (target,) = targets or (self.target,)
        if target is None:
            return None
        excess = len(ids) - target
        return -self.cost * (max(excess, 0) if self.free_if_shorter else abs(excess))


class LengthBudget(RewardWrapper):
    """Reward that scales down the scores of another reward function near and beyond a token budget.

    The score is multiplied by ``clip(cost (budget - n) + at_budget, 0, 1)`` for ``n`` sampled tokens. With a score of
    1 for a correct answer this is the max form of L1. The reward abstains where the function does. Logged as
    ``length_budget_<name of the function>``.

    Source: L1 (Aggarwal and Welleck 2025, arXiv 2503.04697), eq. 2, with its defaults.

    Args:
        function: reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`). Its
            scores should not be negative, because the factor would raise those of long completions.
        budget: number of tokens, or the name of the dataset column of budgets, in which None abstains.
        cost: change of the factor per token.
        at_budget: factor at ``n = budget``.

    Raises:
        ValueError: if ``budget`` is negative or empty, ``cost`` negative or not finite, or ``at_budget`` not in [0, 1].

    Example:
        >>> reward = LengthBudget("boxed_accuracy", budget=100, cost=0.01)
        >>> ids = [[1] * 20, [1] * 100, [1] * 125]
        >>> reward(["?"] * 3, [r"\\boxed{7}"] * 3, ids, answer=["7"] * 3)
        [1.0, 0.5, 0.25]
    """

    def __init__(
        self,
        function: RewardFunction | str | Mapping[str, object],
        budget: int | str,
        cost: float = 0.0003,
        at_budget: float = 0.5,
    ):
        _check_tokens("budget", budget, cost)
        if not 0 <= at_budget <= 1:
            raise ValueError(f"at_budget={at_budget} must be in [0, 1], because it multiplies the score")
        super().__init__(function, "length_budget_{}")
        self.budget, self.cost, self.at_budget = budget, cost, at_budget

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores times their factors; raise ``KeyError`` if the dataset lacks the column of budgets."""
        budgets = [self.budget] * len(batch)
        if isinstance(self.budget, str):
            (budgets,) = take_columns(self.__name__, [self.budget], batch.columns)
        return [
            None
            if score is None or budget is None
            else score * min(max(self.cost * (budget - len(ids)) + self.at_budget, 0.0), 1.0)
            for score, budget, ids in zip(scores, budgets, batch.completion_ids, strict=True)
        ]


def _check_tokens(name: str, tokens: int | str, cost: float) -> None:
    if not tokens if isinstance(tokens, str) else not 0 <= tokens < math.inf:
        raise ValueError(f"{name}={tokens!r} must be a number of tokens or the name of a column")
    if not 0 <= cost < math.inf:
        raise ValueError(f"cost={cost} must be finite and not negative, because longer completions cost more")


class RepetitionPenalty(RowReward):
    """Penalty of ``max_penalty`` times the share of repeated n-grams among the sampled tokens.

    The share is ``1 - distinct n-grams / all n-grams``. A row that repeats one token approaches ``max_penalty`` with
    its length but never reaches it. Rows with fewer than ``ngram_size`` tokens score 0.

    Source: n-gram penalty of Yeo et al. 2025, arXiv 2502.03373, appendix C.2, as one number per row; names of TRL.

    Args:
        ngram_size: number of tokens in an n-gram.
        max_penalty: lower bound of the reward, at most 0.

    Raises:
        ValueError: if ``ngram_size`` is below 1, or ``max_penalty`` is positive or not finite.

    Example:
        >>> RepetitionPenalty(ngram_size=2)(["?"] * 2, ["..."] * 2, [[1, 2, 3, 4], [5, 5, 5, 5, 5]])
        [0.0, -0.75]
    """

    __name__, judges_ids = "repetition_penalty", True

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0):
        if ngram_size < 1:
            raise ValueError(f"ngram_size={ngram_size} must be at least 1 token")
        if not -math.inf < max_penalty <= 0:
            raise ValueError(f"max_penalty={max_penalty} must be finite and not positive, because it is added")
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def score(self, ids: Sequence[int]) -> float:
        """Return a penalty in ``(max_penalty, 0]``."""
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return self.max_penalty * repeated / len(ngrams) if repeated else 0.0


class StopProperly(RewardWrapper):
    """Reward that lowers the scores of another reward function for truncated trajectories.

    A coefficient in [0, 1] multiplies the score of a truncated trajectory; a negative coefficient replaces it. The
    reward abstains where the function does. A factor moves a negative score closer to 0, which favors truncation over a
    wrong answer. Use a negative coefficient if scores can be negative. Logged as
    ``stop_properly_<name of the function>``.

    Source: the penalty for not stopping properly of ProRL (Liu et al. 2025, arXiv 2505.24864), in both forms of
    OpenRLHF's ``stop_properly_penalty_coef``.

    Args:
        function: reward function, or its name, dotted path or mapping (:mod:`torchrl_rloo.rewards.registry`).
        coefficient: in [0, 1], or negative and finite.

    Raises:
        ValueError: if ``coefficient`` is above 1 or not finite.

    Example:
        >>> texts, ids, cut = [r"\\boxed{7}"] * 2, [[1]] * 2, [False, True]
        >>> StopProperly("boxed_accuracy", 0.25)(["?"] * 2, texts, ids, answer=["7"] * 2, truncated=cut)
        [1.0, 0.25]
        >>> StopProperly("boxed_accuracy", -0.5)(["?"] * 2, texts, ids, answer=["7"] * 2, truncated=cut)
        [1.0, -0.5]
    """

    def __init__(self, function: RewardFunction | str | Mapping[str, object], coefficient: float = 0.0):
        if not -math.inf < coefficient <= 1:
            raise ValueError(
                f"coefficient={coefficient} must be in [0, 1] to multiply the score of a truncated completion, or "
                "negative and finite to replace it"
            )
        super().__init__(function, "stop_properly_{}")
        self.coefficient = coefficient

    def transform_scores(self, scores: Scores, batch: RewardBatch) -> Scores:
        """Return the scores, with the penalty on truncated trajectories."""
        truncated = batch.truncated or [False] * len(batch)
        return [
            self._penalize(score) if cut and score is not None and math.isfinite(score) else score
            for score, cut in zip(scores, truncated, strict=True)
        ]

    def _penalize(self, score: float) -> float:
        return score * self.coefficient if self.coefficient >= 0 else self.coefficient
