"""Advantage estimators: from the returns of groups of trajectories to one advantage per trajectory.

Every estimator has the signature ``(rewards [N], groups [N]) -> advantages [N]``; ``groups`` holds the group index of
each row, in any order, groups may differ in size, and a NaN reward marks a row that abstains.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Each row's reward minus the mean reward of the other rows of its group.

    .. math:: A_i = r_i - \frac{1}{n - 1} \sum_{j \neq i} r_j

    Equation 7 of Ahmadian et al. 2024 (arXiv 2402.14740), with ``n`` the number of rows of the group that did not
    abstain. Rewards are first shifted by the group's smallest, so that equal ones give exactly 0 whatever their size.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group, in ``0 .. n_groups - 1``.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains and for a row whose group has no other.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5, float("nan")]), torch.tensor([0, 0, 0, 0]))
        tensor([ 0.7500, -0.7500,  0.0000,  0.0000])
    """
    valid = ~rewards.isnan()
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    r = rewards.double().masked_fill(~valid, torch.inf)
    smallest = r.new_full((n_groups,), torch.inf).scatter_reduce(0, groups, r, "amin")[groups]
    r = torch.where(valid, r - smallest, 0.0)
    count = r.new_zeros(n_groups).index_add(0, groups, valid.double())[groups]
    total = r.new_zeros(n_groups).index_add(0, groups, r)[groups]
    baseline = (total - r) / (count - 1).clamp(min=1)
    return torch.where(valid & (count > 1), r - baseline, 0.0).to(rewards.dtype)


ESTIMATORS: dict[str, Estimator] = {"rloo": leave_one_out}
