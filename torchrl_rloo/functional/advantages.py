"""Advantage estimators: from the returns of groups of trajectories to one advantage per trajectory.

Every estimator has the signature ``(rewards [N], groups [N]) -> advantages [N]``; ``groups`` holds the group index of
each row, in any order, groups may differ in size, and a NaN reward marks a row that abstains: it stays out of every
statistic and gets 0. Sums are formed in float64 after the group's smallest reward is subtracted, so that equal rewards
give exactly 0 whatever their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Reduce = Callable[[torch.Tensor, str], torch.Tensor]  # over the ranks that share a batch; "sum" or "max"

STD_EPSILON = 1e-4  # added to a standard deviation before dividing by it, as TRL does
NOISE = 1e-6  # a spread below this share of the largest value is rounding (float32 keeps 6e-8), not signal


def _group_sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the sum over each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(n_groups).index_add(0, groups, values)[groups]


def _group_max(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_full((n_groups,), -torch.inf).scatter_reduce(0, groups, values, "amax")[groups]


def _shifted(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards less their group's smallest (0 if abstaining), answers in the group, and who answered."""
    valid = ~rewards.isnan()
    r = rewards.double()
    smallest = -_group_max(torch.where(valid, -r, -torch.inf), groups)
    return torch.where(valid, r - smallest, 0.0), _group_sum(valid.double(), groups), valid


def _deviations(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards less their group's mean (0 if abstaining), and the count of answers in the group."""
    r, count, valid = _shifted(rewards, groups)
    return torch.where(valid, r - _group_sum(r, groups) / count.clamp(min=1), 0.0), count


def _group_size(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the size of the largest reward of each row's group, ``[N]``, the scale of its rounding errors."""
    return _group_max(rewards.double().abs().nan_to_num(0.0), groups)


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Subtract from each reward the mean reward of the other rows of its group.

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


def group_centered(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Subtract from each reward the mean of its group, itself included: :math:`A_i = r_i - \bar r`.

    Dr. GRPO, section 3 of Liu et al. 2025 (arXiv 2503.20783); ``(n - 1) / n`` times :func:`leave_one_out`.

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, the index of each row's group.

    Returns:
        ``[N]`` in the dtype of ``rewards``; 0 for a row that abstains and for a row whose group has no other.
    """
    return _deviations(rewards, groups)[0].to(rewards.dtype)


def group_normalized(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Normalize each reward by the mean and the unbiased standard deviation of its group.

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


def mean_normalized(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    r"""Subtract from each reward the mean of its group, and divide by that mean.

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
    """Return the reward itself (REINFORCE, Williams 1992); 0 for a row that abstains.

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
    estimator: Estimator = group_normalized,
) -> torch.Tensor:
    r"""Normalize each reward function's rewards, then take the weighted sum of the advantages.

    .. math:: A_i = \sum_k w_k A_{ik}, \qquad A_{ik} = \frac{r_{ik} - \bar r_k}{\mathrm{std}(r_k) + 10^{-4}}

    GDPO (arXiv 2601.05242) before its last step, which is :func:`whiten` over the batch: a function of small spread
    keeps its influence next to one of large spread, which it loses where rewards are summed first.

    Args:
        rewards: ``[N, F]``, NaN where a function abstained: only that function leaves the row out.
        groups: ``[N]`` int64, the index of each row's group.
        weights: ``F`` numbers.
        estimator: applied to each function's rewards.

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


def answers(rewards: torch.Tensor, groups: torch.Tensor, *, needs_group: bool) -> torch.Tensor:
    """Return bool ``[N]``: rows with a reward and, if ``needs_group``, another row of their group to compare with."""
    valid = ~rewards.isnan()
    return valid & (_group_sum(valid.double(), groups) > 1) if needs_group else valid


def _alone(value: torch.Tensor, op: str) -> torch.Tensor:
    return value


def _spread(values: torch.Tensor, magnitude: float, reduce: Reduce) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return deviations from the mean, their unbiased standard deviation, and whether that is more than rounding."""
    values = values.double()
    floors = values.new_tensor([[magnitude], [-torch.inf]])  # extremes of a rank without values
    extremes = torch.cat([floors, torch.stack([values.abs(), -values])], 1).amax(1)
    largest, negated_smallest = reduce(extremes, "max")
    shifted = values + negated_smallest  # equal values are now exactly 0, and so is their spread
    count, total = reduce(torch.stack([values.new_tensor(float(len(values))), shifted.sum()]), "sum")
    deviations = shifted - total / count.clamp(min=1)
    std = (reduce(deviations.square().sum(), "sum") / (count - 1).clamp(min=1)).sqrt()
    return deviations, std, std > NOISE * largest


def whiten(
    advantages: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    center: bool = True,
    scale: bool = True,
    magnitude: float = 0.0,
    reduce: Reduce = _alone,
) -> torch.Tensor:
    r"""Normalize advantages over the whole batch: :math:`\hat A = (A - \bar A) / (\mathrm{std}(A) + 10^{-4})`.

    REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), over rows ``[N]`` or over the action tokens ``[B, A]``. The
    standard deviation is unbiased. Where it is no more than :data:`NOISE` times the largest value, there is nothing
    but rounding to divide by, and all advantages become exactly 0.

    Args:
        advantages: any shape.
        mask: bool, same shape: True on those that count. The others become 0. Default: all.
        center: whether to subtract the mean.
        scale: whether to divide by the standard deviation (of the distances from the mean, subtracted or not).
        magnitude: size of the largest reward behind the advantages. Rewards of 1000.1 that differ in their last bit
            leave advantages that are all noise, which the advantages alone do not show.
        reduce: reduction over the ranks that have parts of one batch. Every rank must call, even with an empty part.

    Returns:
        The shape and dtype of ``advantages``.
    """
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask
    values = advantages[mask]
    deviations, std, signal = _spread(values, magnitude, reduce)
    result = deviations if center else values.double()
    if scale:
        result = torch.where(signal, result / (std + STD_EPSILON), 0.0)
    return torch.zeros_like(advantages).masked_scatter(mask, result.to(advantages.dtype))


@dataclass(frozen=True)
class Whiten:
    """Batch normalization of advantages by their own moments; see :func:`whiten`.

    Args:
        groups: complete groups of one batch, e.g. prompts per step. A fixed number, so that the result does not depend
            on how rows arrive.
        center: whether to subtract the mean.
        scale: whether to divide by the standard deviation.
    """

    groups: int
    center: bool = True
    scale: bool = True

    def __post_init__(self) -> None:
        _check_groups(self)
        if not self.center and not self.scale:
            raise ValueError("Whiten: center=False and scale=False do nothing: set one of them, or leave it out")

    def __call__(
        self, advantages: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor, magnitude: float, reduce: Reduce
    ) -> torch.Tensor:
        """Return the normalized advantages ``[N, L]``; ``rewards`` ``[M]`` are not used."""
        settings = {"center": self.center, "scale": self.scale}
        return whiten(advantages, mask, **settings, magnitude=magnitude, reduce=reduce)


@dataclass(frozen=True)
class RewardStd:
    r"""Division of advantages by the standard deviation of all rewards of a batch.

    .. math:: \hat A_i = A_i / (\mathrm{std}(r_1 \dots r_N) + 10^{-4})

    TRL 1.16, ``GRPOConfig(scale_rewards="batch")``, after Liu et al. 2025 (arXiv 2508.08221); with the estimator
    ``"dr_grpo"`` (reward less group mean) it is TRL's. The standard deviation is unbiased, over the rows that did not
    abstain. Rewards that differ by rounding alone leave advantages of 0.

    Args:
        groups: complete groups of one batch, e.g. prompts per step.
    """

    groups: int

    def __post_init__(self) -> None:
        _check_groups(self)

    def __call__(
        self, advantages: torch.Tensor, mask: torch.Tensor, rewards: torch.Tensor, magnitude: float, reduce: Reduce
    ) -> torch.Tensor:
        """Return the normalized advantages ``[N, L]``; ``rewards`` are ``[M]``, NaN where a row abstains."""
        _, std, signal = _spread(rewards[~rewards.isnan()], 0.0, reduce)
        return torch.where(mask & signal, advantages / (std + STD_EPSILON), 0.0).to(advantages.dtype)


def _check_groups(normalization: Whiten | RewardStd) -> None:
    groups = normalization.groups
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"{type(normalization).__name__}: groups={groups!r} must be a whole number of at least 1")


NORMALIZATIONS: dict[str, type] = {"whiten": Whiten, "reward_std": RewardStd}


@dataclass(frozen=True)
class EstimatorSpec:
    """An estimator with the properties that other parts ask for. It is called as the estimator itself.

    Any callable may carry attributes of these names; see :func:`estimator_option` for one that has none.

    Attributes:
        function: the estimator.
        rescales: whether it rescales rewards, so that its result is not a reward less a baseline.
        needs_group: whether a row without another to compare with gets no signal.
        wants_prompts: whether it takes the prompts' ids ``[N]`` as a third argument.
    """

    function: Estimator
    rescales: bool = False
    needs_group: bool = True
    wants_prompts: bool = False

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Return the function's ``[N]`` advantages of ``[N]`` rewards."""
        return self.function(rewards, groups)


_OPTIONS = {"rescales": True, "needs_group": False, "wants_prompts": False}


def estimator_option(estimator: Estimator, name: str) -> Any:
    """Return a property of an estimator; for a function without it the one that assumes least."""
    return getattr(estimator, name, _OPTIONS[name])


ESTIMATORS: dict[str, EstimatorSpec] = {
    "rloo": EstimatorSpec(leave_one_out),
    "grpo": EstimatorSpec(group_normalized, rescales=True),
    "dr_grpo": EstimatorSpec(group_centered),
    "maxrl": EstimatorSpec(mean_normalized, rescales=True),
    "reinforce": EstimatorSpec(no_baseline, needs_group=False),
}
