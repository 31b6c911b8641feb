"""Rewards that depend on the length of a completion alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SoftOverlong:
    """0 up to a length, then down linearly to -1 at the largest length, -1 beyond.

    With ``n`` the tokens sampled in the row, ``L = max_completion_len`` and ``c = soft_punish_cache``: 0 for
    ``n <= L - c``; ``(L - c - n) / c`` for ``L - c < n <= L``; -1 for ``n > L``.

    Source: DAPO, arXiv 2503.14476, eq. 13; names of TRL.

    Args:
        max_completion_len: ``L``, tokens. A limit on new tokens at or below it leaves the last case out.
        soft_punish_cache: ``c``, tokens; with 0 the reward falls from 0 at ``L`` to -1 at ``L + 1``.

    Raises:
        ValueError: unless ``max_completion_len > 0`` and ``0 <= soft_punish_cache <= max_completion_len``.

    Example:
        >>> SoftOverlong(max_completion_len=100, soft_punish_cache=20)(["?"], ["..."], [[1] * 90])
        [-0.5]
    """

    __name__ = "soft_overlong"

    def __init__(self, max_completion_len: int, soft_punish_cache: int):
        if not max_completion_len > 0:
            raise ValueError(f"max_completion_len={max_completion_len} must be a positive number of tokens")
        if not 0 <= soft_punish_cache <= max_completion_len:
            raise ValueError(
                f"soft_punish_cache={soft_punish_cache} must be between 0 and max_completion_len={max_completion_len}"
            )
        self.max_completion_len, self.soft_punish_cache = max_completion_len, soft_punish_cache

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> list[float | None]:
        """``B`` rewards in [-1, 0]."""
        return [self._reward(len(ids)) for ids in completion_ids]

    def _reward(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        return -1.0 if length > self.max_completion_len else (free - length) / self.soft_punish_cache
