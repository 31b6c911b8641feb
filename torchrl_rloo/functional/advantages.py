"""Advantage estimators: from the returns of groups of trajectories to one advantage per trajectory.

Every estimator has the signature ``(rewards [N], groups [N]) -> advantages [N]``; ``groups`` holds the group index of
each row, in any order, groups may differ in size, and a NaN reward marks a row that abstains: it stays out of every
statistic and gets 0. Sums are formed in float64 after the group's smallest reward is subtracted, so that equal rewards
give exactly 0 whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import distributed

from torchrl_rloo.functional.distributed import reduce_over_ranks

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Whitening = Literal["none", "mean", "std", "mean_std"]

STD_EPSILON = 1e-4  # added to a standard deviation before dividing by it, as TRL does
NOISE = 1e-6  # a spread below this share of the largest value is rounding (float32 keeps 6e-8), not signal


def _group_sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Sum over each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(n_groups).index_add(0, groups, values)[groups]


def _group_max(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Largest value of each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_full((n_groups,), -torch.inf).scatter_reduce(0, groups, values, "amax")[groups]


def _shifted(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards less their group's smallest (0 if abstaining), number that answered in the group, and who answered."""
    valid = ~rewards.isnan()
    r = rewards.double()
    smallest = -_group_max(torch.where(valid, -r, -torch.inf), groups)
    return torch.where(valid, r - smallest, 0.0), _group_sum(valid.double(), groups), valid


def _deviations(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards less their group's mean (0 if abstaining), and the number that answered in the group."""
    r, count, valid = _shifted(rewards, groups)
    return torch.where(valid, r - _group_sum(r, groups) / count.clamp(min=1), 0.0), count


def _group_size(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Size of the largest reward of each row's group, ``[N]``: what a spread is compared with."""
    return _group_max(rewards.double().abs().nan_to_num(0.0), groups)


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Each row's reward minus the mean reward of the other rows of its group.

    .. math:: A_i = r_i - \frac{1}{n - 1} \sum_{j \neq i} r_j

    Equation 7 of Ahmadian et al. 2024 (arXiv 2402.14740), with ``n`` the number of rows of the group that did not
    abstain.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group, in ``0 .. n_groups - 1``.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains and for a row whose group has no other.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5, float("nan")]), torch.tensor([0, 0, 0, 0]))
        tensor([ 0.7500, -0.7500,  0.0000,  0.0000])
    """
    r, count, valid = _shifted(rewards, groups)
    baseline = (_group_sum(r, groups) - r) / (count - 1).clamp(min=1)
    return torch.where(valid & (count > 1), r - baseline, 0.0).to(rewards.dtype)


def group_centred(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Each row's reward minus the mean of its group, itself included: :math:`A_i = r_i - \bar r`.

    Dr. GRPO, section 3 of Liu et al. 2025 (arXiv 2503.20783); ``(n - 1) / n`` times :func:`leave_one_out`.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains and for a row whose group has no other.
    """
    return _deviations(rewards, groups)[0].to(rewards.dtype)


def group_normalised(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Each row's reward, normalised by the mean and the unbiased standard deviation of its group.

    .. math:: A_i = \frac{r_i - \bar r}{\mathrm{std}(r) + 10^{-4}}

    GRPO, section 4.1.2 of Shao et al. 2024 (arXiv 2402.03300), with TRL's small addition to the divisor. A standard
    deviation of no more than :data:`NOISE` times the group's largest reward is rounding: the whole group gets 0.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains and for a row whose group has no other.
    """
    deviations, count = _deviations(rewards, groups)
    std = (_group_sum(deviations.square(), groups) / (count - 1).clamp(min=1)).sqrt()
    signal = std > NOISE * _group_size(rewards, groups)
    return torch.where(signal, deviations / (std + STD_EPSILON), 0.0).to(rewards.dtype)


def mean_normalised(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Each row's reward minus the mean of its group, divided by that mean.

    .. math:: A_i = \frac{r_i - \bar r}{\overline{|r|}}

    MaxRL, Tajwar et al. 2026 (arXiv 2602.02710): for rewards of 0 and 1 it follows the gradient of the log of the
    probability of success, so a prompt that seldom succeeds weighs more. The paper has rewards of at least 0, whose
    mean and mean size are one and the same. With negative ones (a KL penalty, say) the mean would turn the sign of
    every advantage, or blow it up near 0, where the mean size does neither: then :math:`|A_i| \le n + 1`.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains, for a row whose group has no other and for a
        group that earned nothing.
    """
    deviations, count = _deviations(rewards, groups)
    size = _group_sum(rewards.double().abs().nan_to_num(0.0), groups) / count.clamp(min=1)
    return torch.where(size > 0, deviations / size, 0.0).to(rewards.dtype)


def no_baseline(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The reward itself (REINFORCE, Williams 1992); 0 for a row that abstains.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, not looked at.

    Returns:
        ``[N]`` in the dtype of ``rewards``.
    """
    return rewards.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)


def normalize_then_sum(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: Sequence[float],
    estimator: Estimator = group_normalised,
) -> torch.Tensor:
    r"""Each reward function's advantages on their own, then the weighted sum of them.

    .. math:: A_i = \sum_k w_k A_{ik}, \qquad A_{ik} = \frac{r_{ik} - \bar r_k}{\mathrm{std}(r_k) + 10^{-4}}

    GDPO (arXiv 2601.05242) before its last step, which is :func:`whiten` over the batch: a function of small spread
    is not drowned by one of large spread, as it is where the rewards are summed first.

    Args:
        rewards: ``[N, F]``, NaN where a function abstained: only that function leaves the row out.
        groups: ``[N]`` int64, the index of each row's group.
        weights: ``F`` numbers.
        estimator: what each function's rewards go through.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row on which all functions abstained.

    Raises:
        ValueError: for another number of weights than of functions.
    """
    if len(weights) != rewards.shape[-1]:
        raise ValueError(f"{len(weights)} weights {list(weights)} for the rewards of {rewards.shape[-1]} functions")
    total = rewards.new_zeros(len(rewards), dtype=torch.float64)
    for weight, each in zip(weights, rewards.double().unbind(-1), strict=True):
        total += float(weight) * estimator(each, groups)
    return total.to(rewards.dtype)


def whiten(
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    center: bool = True,
    scale: bool = True,
    magnitude: float = 0.0,
    process_group: distributed.ProcessGroup | None = None,
) -> torch.Tensor:
    r"""Normalises advantages over the whole batch: :math:`\hat A = (A - \bar A) / (\mathrm{std}(A) + 10^{-4})`.

    REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), over rows ``[N]`` or over the action tokens ``[B, A]``. The
    standard deviation is unbiased. Where it is no more than :data:`NOISE` times the largest value, there is nothing
    but rounding to divide by, and all advantages become exactly 0.

    Args:
        advantages: any shape.
        mask: bool, same shape: which of them count. The others become 0. Default: all.
        center: whether to subtract the mean.
        scale: whether to divide by the standard deviation (of the distances from the mean, subtracted or not).
        magnitude: size of the largest reward behind the advantages. Rewards of 1000.1 that differ in their last bit
            leave advantages that are all noise, which the advantages alone do not show.
        process_group: whose ranks have parts of one batch: moments are then those of all of them. Every rank must
            call, even with nothing to whiten.

    Returns:
        The shape and dtype of ``advantages``.
    """
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask
    values = advantages[mask].double()
    floors = values.new_tensor([[magnitude], [-torch.inf]])  # so that a rank without values has extremes, too

    extremes = torch.cat([floors, torch.stack([values.abs(), -values])], 1).amax(1)
    largest, negated_smallest = reduce_over_ranks(extremes, process_group, distributed.ReduceOp.MAX)
    shifted = values + negated_smallest  # equal values are now exactly 0, and so is their spread
    moments = torch.stack([values.new_tensor(float(len(values))), shifted.sum()])
    count, total = reduce_over_ranks(moments, process_group)
    deviations = shifted - total / count.clamp(min=1)
    result = deviations if center else values
    if scale:
        squares = reduce_over_ranks(deviations.square().sum(), process_group)
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        signal = std > NOISE * largest
        result = torch.where(signal, result / (std + STD_EPSILON), 0.0)
    return torch.zeros_like(advantages).masked_scatter(mask, result.to(advantages.dtype))


@dataclass(frozen=True)
class EstimatorRecipe:
    """An estimator with what else belongs to the method of its name. It is called as the estimator itself.

    Any callable may carry attributes of these names instead; for one that has none the least is assumed.

    Attributes:
        function: the estimator.
        whiten: how the method normalises advantages over the whole batch afterwards.
        divides: whether it rescales rewards, so that what it gives is not a reward less a baseline.
        needs_group: whether a row that has no other to compare with gets no signal.
    """

    function: Estimator
    whiten: Whitening = "none"
    divides: bool = False
    needs_group: bool = True

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """The function's ``[N]`` advantages of ``[N]`` rewards, before any whitening."""
        return self.function(rewards, groups)


ESTIMATORS: dict[str, EstimatorRecipe] = {
    "rloo": EstimatorRecipe(leave_one_out),
    "grpo": EstimatorRecipe(group_normalised, divides=True),
    "dr_grpo": EstimatorRecipe(group_centred),
    "maxrl": EstimatorRecipe(mean_normalised, divides=True),
    "reinforce": EstimatorRecipe(no_baseline, needs_group=False),
    "reinforce_pp": EstimatorRecipe(no_baseline, whiten="mean_std", needs_group=False),
    "reinforce_pp_baseline": EstimatorRecipe(group_centred, whiten="mean_std"),
}
