"""Advantage estimators: returns of groups of trajectories to one advantage per trajectory.

Every estimator has the signature ``(rewards [N], groups [N]) -> advantages [N]``; some take a third argument.
``groups`` holds the group index of each row, in any order, and groups may differ in size. A row with a NaN reward
abstains: it is excluded from every statistic and gets advantage 0. Sums are formed in float64 after the smallest reward
of the group is subtracted, so equal rewards of any magnitude give exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchrl_rloo.runtime.lookup import Choice, number_field

Estimator = Callable[..., torch.Tensor]
Reduce = Callable[[torch.Tensor, str], torch.Tensor]  # "sum" or "max" over the ranks that share a batch

STD_EPSILON = 1e-4  # added to a standard deviation before dividing by it, as in TRL
NOISE = 1e-6  # a spread below this share of the largest value is rounding error (6e-8 in float32), not signal


def _group_sum(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the sum over each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(n_groups).index_add(0, groups, values)[groups]


def _group_max(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row's group, ``[N]``."""
    n_groups = int(groups.max()) + 1 if len(groups) else 0
    return values.new_full((n_groups,), -torch.inf).scatter_reduce(0, groups, values, "amax")[groups]


def subtract_minimum(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rewards minus their group's smallest (0 if NaN), valid rewards per group, and the mask of valid rows."""
    valid = ~rewards.isnan()
    r = rewards.double()
    smallest = -_group_max(torch.where(valid, -r, -torch.inf), groups)
    return torch.where(valid, r - smallest, 0.0), _group_sum(valid.double(), groups), valid


def _center(rewards: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rewards minus their group's mean (0 if NaN), and the number of valid rewards in the group."""
    r, count, valid = subtract_minimum(rewards, groups)
    return torch.where(valid, r - _group_sum(r, groups) / count.clamp(min=1), 0.0), count


def _group_magnitude(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute reward of each row's group, ``[N]``: the scale of its rounding errors."""
    return _group_max(rewards.double().abs().nan_to_num(0.0), groups)


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Subtract from each reward the mean reward of the other rows of its group.

    Equation 7 of Ahmadian et al. 2024 (arXiv 2402.14740), with ``n`` the rows of the group that did not abstain::

        A_i = r_i - 1 / (n - 1) * sum_{j != i} r_j

    Args:
        rewards: ``[N]``, NaN where a row abstains.
        groups: ``[N]`` int64, group index of each row, in ``0 .. n_groups - 1``.

    Returns:
        ``[N]`` in the dtype of ``rewards``. Rows that abstain and rows alone in their group get 0.

    Example:
        >>> leave_one_out(torch.tensor([1.0, 0.0, 0.5, float("nan")]), torch.tensor([0, 0, 0, 0]))
        tensor([ 0.7500, -0.7500,  0.0000,  0.0000])
    """
    r, count, valid = subtract_minimum(rewards, groups)
    baseline = (_group_sum(r, groups) - r) / (count - 1).clamp(min=1)
    return torch.where(valid & (count > 1), r - baseline, 0.0).to(rewards.dtype)


def group_centered(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Subtract from each reward the mean reward of its whole group: ``A_i = r_i - mean(r)``.

    Dr. GRPO, section 3 of Liu et al. 2025 (arXiv 2503.20783). Equals ``(n - 1) / n`` times :func:`leave_one_out`.

    Shapes: ``rewards [N]``, ``groups [N]`` to ``[N]``.
    """
    return _center(rewards, groups)[0].to(rewards.dtype)


def group_normalized(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Normalize each reward by the mean and the unbiased standard deviation of its group.

    GRPO, section 4.1.2 of Shao et al. 2024 (arXiv 2402.03300), with TRL's epsilon in the divisor::

        A_i = (r_i - mean(r)) / (std(r) + 1e-4)

    A standard deviation of at most :data:`NOISE` times the largest reward is rounding error: the whole group gets 0.

    Shapes: ``rewards [N]``, ``groups [N]`` to ``[N]``.
    """
    deviations, count = _center(rewards, groups)
    std = (_group_sum(deviations.square(), groups) / (count - 1).clamp(min=1)).sqrt()
    signal = std > NOISE * _group_magnitude(rewards, groups)
    return torch.where(signal, deviations / (std + STD_EPSILON), 0.0).to(rewards.dtype)


def mean_normalized(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Subtract from each reward the mean of its group, then divide by the mean absolute reward.

    MaxRL, Tajwar et al. 2026 (arXiv 2602.02710)::

        A_i = (r_i - mean(r)) / mean(|r|)

    With rewards of 0 and 1 it follows the gradient of the log success probability, so prompts that seldom succeed weigh
    more. The paper divides by ``mean(r)``, which is the same for non-negative rewards. With negative rewards (e.g. a KL
    penalty) that mean could flip the sign of every advantage or be close to 0. The mean absolute reward bounds
    ``|A_i|`` by ``n + 1``.

    Shapes: ``rewards [N]``, ``groups [N]`` to ``[N]``.
    """
    deviations, count = _center(rewards, groups)
    size = _group_sum(rewards.double().abs().nan_to_num(0.0), groups) / count.clamp(min=1)
    return torch.where(size > 0, deviations / size, 0.0).to(rewards.dtype)


def length_weighted(rewards: torch.Tensor, groups: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Subtract from each reward the mean reward of its group, weighted by the lengths of the rows.

    OPO, Hao et al. 2025 (arXiv 2505.23585), with ``l`` the number of action tokens of a row::

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    Shapes: ``rewards [N]``, ``groups [N]``, ``lengths [N]`` to ``[N]``.
    """
    r, count, valid = subtract_minimum(rewards, groups)
    weights = torch.where(valid, lengths.double(), 0.0)
    baseline = _group_sum(weights * r, groups) / _group_sum(weights, groups).clamp(min=1)
    return torch.where(valid & (count > 1), r - baseline, 0.0).to(rewards.dtype)


def greedy_baseline(rewards: torch.Tensor, groups: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Subtract from each reward that of the greedy completion of its group.

    ReMax, Li et al. 2023 (arXiv 2310.10505): ``A_i = r_i - r_greedy``. The greedy row itself gets 0, as do groups
    whose greedy row is missing or abstains.

    Shapes: ``rewards [N]``, ``groups [N]``, ``greedy [N]`` bool to ``[N]``.
    """
    r, _, valid = subtract_minimum(rewards, groups)
    known = valid & greedy
    baseline = _group_sum(torch.where(known, r, 0.0), groups)
    return torch.where(valid & ~greedy & (_group_sum(known.double(), groups) > 0), r - baseline, 0.0).to(rewards.dtype)


def leave_one_out_max(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return what each row adds to the best reward of its group.

    Tang et al. 2025 (arXiv 2503.19595): ``A_i = max_j r_j - max_{j != i} r_j``. Only a single best row gets a signal.

    Shapes: ``rewards [N]``, ``groups [N]`` to ``[N]``.
    """
    r, count, valid = subtract_minimum(rewards, groups)
    best = valid & (r == _group_max(torch.where(valid, r, -torch.inf), groups))
    second = _group_max(torch.where(valid & ~best, r, -torch.inf), groups)
    alone = best & (_group_sum(best.double(), groups) == 1) & (count > 1)
    return torch.where(alone, r - second, 0.0).to(rewards.dtype)


@dataclass(frozen=True)
class PassAtK(Choice):
    """Normalized advantages of the reward of ``k`` members together, which is 1 if one of them is right.

    Pass@k training, Chen et al. 2025 (arXiv 2508.10751), over all choices of ``k`` among ``n`` members, ``w`` of them
    wrong. With ``F = C(w, k) / C(n, k)`` and ``s = sqrt(F (1 - F))``::

        A_i = F / s if r_i >= success else (F - C(w - 1, k - 1) / C(n - 1, k - 1)) / s

    Groups of fewer than ``k`` valid rows, and those in which any choice or none has a right row, get 0.
    """

    k: int = number_field(4, low=1)  # members that are judged together, at most those of a group
    success: float = 1.0  # smallest reward of a right row
    rescales: ClassVar[bool] = True
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Return the advantages ``[N]`` of rewards ``[N]``."""
        right, valid = rewards >= self.success, ~rewards.isnan()
        count, wrong = (_group_sum(rows.double(), groups) for rows in (valid, valid & ~right))

        def share(skipped: int) -> torch.Tensor:
            """Return the share of the choices in which all members are wrong, given that the first are."""
            factors = [(wrong - i).clamp(min=0) / (count - i).clamp(min=1) for i in range(skipped, int(self.k))]
            return torch.stack([torch.ones_like(count), *factors]).prod(0)

        fail = share(0)
        std = (fail * (1 - fail)).sqrt()
        gained = torch.where(right, fail, fail - share(1))
        return torch.where(valid & (std > 0), gained / std, 0.0).to(rewards.dtype)


def no_baseline(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the rewards themselves (REINFORCE, Williams 1992).

    Shapes: ``rewards [N]``, ``groups [N]`` to ``[N]``.
    """
    return rewards.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf)


def normalize_then_sum(
    rewards: torch.Tensor,
    groups: torch.Tensor,
    weights: Sequence[float],
    estimator: Estimator = group_normalized,
) -> torch.Tensor:
    """Normalize each reward function's rewards, then take the weighted sum of the advantages.

    GDPO (arXiv 2601.05242) without its last step, which is :func:`whiten` over the batch::

        A_i = sum_k w_k A_ik,    A_ik = (r_ik - mean(r_k)) / (std(r_k) + 1e-4)

    A function with a small spread keeps its influence next to one with a large spread. It would lose that influence if
    the rewards were summed first.

    Args:
        rewards: ``[N, F]``, NaN where a function abstained. The row stays in the statistics of the other functions.
        groups: ``[N]`` int64, group index of each row.
        weights: ``F`` numbers.
        estimator: estimator applied to the rewards of each function.

    Returns:
        ``[N]`` in the dtype of ``rewards``. Rows on which all functions abstained get 0.

    Raises:
        ValueError: if ``weights`` does not have ``F`` entries.
    """
    if len(weights) != rewards.shape[-1]:
        raise ValueError(
            f"weights={list(weights)} must have one entry for each of {rewards.shape[-1]} reward functions"
        )
    total = rewards.new_zeros(len(rewards), dtype=torch.float64)
    for weight, scores in zip(weights, rewards.double().unbind(-1), strict=True):
        total += float(weight) * estimator(scores, groups)
    return total.to(rewards.dtype)


def answered_mask(rewards: torch.Tensor, groups: torch.Tensor, *, needs_group: bool) -> torch.Tensor:
    """Return bool ``[N]``: rows that have a reward and, with ``needs_group``, another valid row in their group."""
    valid = ~rewards.isnan()
    return valid & (_group_sum(valid.double(), groups) > 1) if needs_group else valid


def _keep_local(value: torch.Tensor, op: str) -> torch.Tensor:
    return value


def _center_batch(
    values: torch.Tensor, magnitude: float, reduce: Reduce
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return deviations from the mean, their unbiased standard deviation, and True if it exceeds rounding error."""
    values = values.double()
    floors = values.new_tensor([[magnitude], [-torch.inf]])  # extremes of a rank without values
    extremes = torch.cat([floors, torch.stack([values.abs(), -values])], 1).amax(1)
    largest, negated_smallest = reduce(extremes, "max")
    shifted = values + negated_smallest  # equal values become exactly 0
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
    reduce: Reduce = _keep_local,
) -> torch.Tensor:
    """Normalize advantages over the whole batch: ``(A - mean(A)) / (std(A) + 1e-4)``.

    REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), over rows ``[N]`` or action tokens ``[B, A]``. The standard
    deviation is unbiased. If it is at most :data:`NOISE` times the largest value, it is rounding error, and
    with ``scale`` all advantages become exactly 0.

    Args:
        advantages: any shape.
        mask: bool, same shape, True on the advantages that count. The others become 0. None counts all.
        center: True subtracts the mean.
        scale: True divides by the standard deviation around the mean, even if ``center`` is False.
        magnitude: largest absolute reward behind the advantages. Rewards of 1000.1 that differ only in their last bit
            give advantages that are pure rounding error. The advantages alone do not show this.
        reduce: reduction over the ranks that share a batch. Every rank must call it, even without values.

    Returns:
        Same shape and dtype as ``advantages``.
    """
    mask = torch.ones_like(advantages, dtype=torch.bool) if mask is None else mask
    values = advantages[mask]
    deviations, std, signal = _center_batch(values, magnitude, reduce)
    result = deviations if center else values.double()
    if scale:
        result = torch.where(signal, result / (std + STD_EPSILON), 0.0)
    return torch.zeros_like(advantages).masked_scatter(mask, result.to(advantages.dtype))


@dataclass(frozen=True)
class Whiten:
    """Batch normalization of advantages by their own moments; see :func:`whiten`.

    Args:
        groups: complete groups per batch, e.g. prompts per step. The number is fixed, so the result does not depend on
            the order in which rows arrive.
        center: True subtracts the mean.
        scale: True divides by the standard deviation.
    """

    groups: int
    center: bool = True
    scale: bool = True

    def __post_init__(self) -> None:
        _check_groups(self)
        if not self.center and not self.scale:
            raise ValueError("Whiten: center=False and scale=False do nothing; set one of them or remove whiten")

    def __call__(self, advantages, mask, rewards, magnitude, reduce, groups) -> torch.Tensor:
        """Return the normalized advantages ``[N, L]``. ``rewards`` ``[M]`` and ``groups`` ``[N]`` are ignored."""
        settings = {"center": self.center, "scale": self.scale}
        return whiten(advantages, mask, **settings, magnitude=magnitude, reduce=reduce)


@dataclass(frozen=True)
class RewardStd:
    """Division of advantages by the standard deviation of all rewards of a batch.

    The equation is ``A_i / (std(r_1, ..., r_N) + 1e-4)``, with the unbiased standard deviation of the rows that did not
    abstain. With the estimator ``"dr_grpo"`` it equals ``GRPOConfig(scale_rewards="batch")`` of TRL 1.16, after
    Liu et al. 2025 (arXiv 2508.08221). Rewards that differ only by rounding error give advantages of 0.
    """

    groups: int  # complete groups per batch, e.g. prompts per step

    def __post_init__(self) -> None:
        _check_groups(self)

    def __call__(self, advantages, mask, rewards, magnitude, reduce, groups) -> torch.Tensor:
        """Return the normalized advantages ``[N, L]``. ``rewards`` are ``[M]``, NaN where a row abstains."""
        _, std, signal = _center_batch(rewards[~rewards.isnan()], 0.0, reduce)
        return torch.where(mask & signal, advantages / (std + STD_EPSILON), 0.0).to(advantages.dtype)


@dataclass(frozen=True)
class SignalShare:
    """Division of advantages by the share of the rows of a batch whose group has a signal.

    GPG, Chu et al. 2025 (arXiv 2504.02546): ``A_i * B / (B - M)``, with ``M`` of ``B`` rows in groups of equal rewards.
    """

    groups: int  # complete groups per batch, e.g. prompts per step

    def __post_init__(self) -> None:
        _check_groups(self)

    def __call__(self, advantages, mask, rewards, magnitude, reduce, groups) -> torch.Tensor:
        """Return the scaled advantages ``[N, L]`` of rows in ``groups`` ``[N]``. The other arguments are ignored."""
        signal = _group_max((advantages != 0).any(-1).double(), groups) > 0
        rows, with_signal = reduce(torch.tensor([float(len(signal)), float(signal.sum())]), "sum")
        return advantages * float(rows / with_signal.clamp(min=1))


def _check_groups(normalization: Whiten | RewardStd | SignalShare) -> None:
    groups = normalization.groups
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"{type(normalization).__name__}: groups={groups!r} must be a whole number of at least 1")


NORMALIZATIONS: dict[str, type] = {"whiten": Whiten, "reward_std": RewardStd, "signal_share": SignalShare}


@dataclass(frozen=True)
class EstimatorSpec:
    """Estimator with the properties that other modules query; calling it calls the estimator.

    Any callable may have attributes with these names. :func:`estimator_option` gives the defaults of one without them.

    Attributes:
        function: estimator to call.
        rescales: True if it rescales rewards, so its result is not a reward minus a baseline.
        needs_group: True if a row alone in its group gets no signal.
        wants_prompts: True if it takes the prompt ids ``[N]`` as a third argument.
        wants_lengths: True if it takes the numbers of action tokens ``[N]`` as a third argument.
        wants_greedy: True if it takes the mask ``[N]`` of greedy rows as a third argument; these are not trained on.
    """

    function: Estimator
    rescales: bool = False
    needs_group: bool = True
    wants_prompts: bool = False
    wants_lengths: bool = False
    wants_greedy: bool = False

    def __call__(self, rewards: torch.Tensor, groups: torch.Tensor, *third: torch.Tensor) -> torch.Tensor:
        """Return the advantages ``[N]`` of rewards ``[N]``."""
        return self.function(rewards, groups, *third)


_OPTIONS = {"rescales": True, "needs_group": False}  # False for all others


def estimator_option(estimator: Estimator, name: str) -> Any:
    """Return a property of an estimator, or the default that assumes least."""
    return getattr(estimator, name, _OPTIONS.get(name, False))


ESTIMATORS: dict[str, EstimatorSpec | type] = {
    "rloo": EstimatorSpec(leave_one_out),
    "grpo": EstimatorSpec(group_normalized, rescales=True),
    "dr_grpo": EstimatorSpec(group_centered),
    "maxrl": EstimatorSpec(mean_normalized, rescales=True),
    "opo": EstimatorSpec(length_weighted, wants_lengths=True),
    "remax": EstimatorSpec(greedy_baseline, wants_greedy=True),
    "pass_at_k": PassAtK,
    "leave_one_out_max": EstimatorSpec(leave_one_out_max, rescales=True),
    "reinforce": EstimatorSpec(no_baseline, needs_group=False),
}
