"""Statistics of the returns of each group."""

from __future__ import annotations

from typing import NamedTuple

import torch


class GroupRanges(NamedTuple):
    """Range of the returns of ``n`` groups: ``[n]``, or ``[n, F]`` with ``F`` returns per row.

    Attributes:
        low: smallest return; infinity if all members abstained.
        high: largest return; minus infinity if all members abstained.
        answered: int64, number of members that did not abstain.
    """

    low: torch.Tensor
    high: torch.Tensor
    answered: torch.Tensor


def group_ranges(returns: torch.Tensor, groups: torch.Tensor) -> GroupRanges:
    """Return the smallest and largest return of each group, and how many of its members answered.

    Args:
        returns: ``[N]`` or ``[N, F]``, NaN where a row abstains.
        groups: ``[N]`` int64, group index of each row, in ``0 .. n_groups - 1``.

    Example:
        >>> group_ranges(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 0, 1])).high.tolist()
        [1.0, 0.5]
    """
    n = int(groups.max()) + 1 if len(groups) else 0
    given, shape = ~returns.isnan(), (n, *returns.shape[1:])
    index = groups.reshape(-1, *[1] * (returns.ndim - 1)).expand_as(returns)
    low = returns.new_full(shape, torch.inf).scatter_reduce(0, index, torch.where(given, returns, torch.inf), "amin")
    high = returns.new_full(shape, -torch.inf).scatter_reduce(0, index, torch.where(given, returns, -torch.inf), "amax")
    return GroupRanges(low, high, given.new_zeros(shape, dtype=torch.int64).index_add(0, groups, given.long()))


def has_signal(ranges: GroupRanges, tolerance: float = 0.0) -> torch.Tensor:
    """Return bool ``[n]``: True for groups in which two members answered and differ by more than ``tolerance``.

    With ``F`` returns per row, one differing return is enough.
    """
    differs = (ranges.answered > 1) & (ranges.high - ranges.low > tolerance)
    return differs if differs.ndim == 1 else differs.any(-1)
