"""Penalty for repetitive text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class RepetitionPenalty:
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

    __name__ = "repetition_penalty"

    def __init__(self, ngram_size: int = 3, max_penalty: float = -1.0):
        if ngram_size < 1:
            raise ValueError(f"ngram_size={ngram_size} must be at least 1 token")
        if not -math.inf < max_penalty <= 0:
            raise ValueError(f"max_penalty={max_penalty} must be finite and not positive, because it is added")
        self.ngram_size, self.max_penalty = ngram_size, max_penalty

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        """Return ``B`` rewards in ``(max_penalty, 0]``."""
        return [self._reward(ids) for ids in completion_ids]

    def _reward(self, ids: Sequence[int]) -> float:
        ngrams = [tuple(ids[i : i + self.ngram_size]) for i in range(len(ids) - self.ngram_size + 1)]
        repeated = len(ngrams) - len(set(ngrams))
        return self.max_penalty * repeated / len(ngrams) if repeated else 0.0
