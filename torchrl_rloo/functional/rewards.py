"""Scores of reward functions before and as they become returns: sums, moments, calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torchrl_rloo.functional.advantages import NOISE


def combine_rewards(
    rewards: torch.Tensor, weights: Sequence[float], clip_range: tuple[float, float] | None = None
) -> torch.Tensor:
    """Return the weighted sum of each row's scores, ``R_i = clip(sum_k w_k r_ik)``.

    A function that abstained counts as 0 if another function answered. The sum over no functions is 0.

    Shapes: ``rewards [B, F]`` to ``[B]``.
    """
    total = (rewards * rewards.new_tensor(list(weights))).nansum(-1)
    if clip_range is not None:
        total = total.clamp(*clip_range)
    return torch.where(rewards.isnan().all(-1), torch.nan, total) if rewards.shape[-1] else total


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of ``F`` columns, float64 ``[F]`` each.

    The count is a sum of weights, which are 1 until :func:`decay_moments` decays them.
    """

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    @staticmethod
    def zeros(columns: int) -> Moments:
        """Return the moments of no scores."""
        return Moments(*torch.zeros(3, columns, dtype=torch.float64).unbind(0))

    @property
    def std(self) -> torch.Tensor:
        """Biased standard deviation ``[F]`` (divided by the count); 0 for a column without scores."""
        return (self.squares / self.count.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def column_moments(scores: torch.Tensor) -> Moments:
    """Return the moments of each column of ``scores`` ``[N, F]`` over the entries that are not NaN."""
    answered = ~scores.isnan()
    values = torch.where(answered, scores, 0.0).double()
    count = answered.sum(0).double()
    mean = values.sum(0) / count.clamp(min=1)
    return Moments(count, mean, torch.where(answered, values - mean, 0.0).square().sum(0))


def merge_moments(first: Moments, second: Moments) -> Moments:
    """Return the exact moments of the union of two disjoint sets of scores.

    Equation 2.1 of Chan, Golub and LeVeque 1979, which does not cancel for a mean far from 0::

        M = M_a + M_b + delta^2 * n_a * n_b / (n_a + n_b),    delta = mean_b - mean_a
    """
    count = first.count + second.count
    delta, divisor = second.mean - first.mean, count.clamp(min=torch.finfo(torch.float64).tiny)
    mean = first.mean + delta * second.count / divisor
    return Moments(count, mean, first.squares + second.squares + delta.square() * first.count * second.count / divisor)


def decay_moments(moments: Moments, decay: float) -> Moments:
    """Multiply the weight of every score by ``decay``; mean and standard deviation do not change."""
    return Moments(moments.count * decay, moments.mean, moments.squares * decay)


def normalize_scores(
    scores: torch.Tensor, moments: Moments, *, center: bool, min_count: float, epsilon: float
) -> torch.Tensor:
    """Divide the scores of each function by the standard deviation of that function's scores.

    With ``mu`` and ``sigma`` from ``moments``::

        r'_ik = (r_ik - c_k) / (sigma_k + epsilon),    c_k = mu_k if center else 0

    A column with fewer than ``min_count`` scores is unchanged. A column whose scores differ only by rounding error is
    not divided.

    Shapes: ``scores [N, F]`` to ``[N, F]``.
    """
    std = moments.std
    scale = torch.where(std > NOISE * moments.mean.abs(), std + epsilon, 1.0)
    values = scores.double() - moments.mean if center else scores.double()
    return torch.where(moments.count >= min_count, values / scale, scores.double()).to(scores.dtype)


def calibrate_scores(scores: torch.Tensor, temperature: float, bias: float = 0.0, sigmoid: bool = False):
    """Calibrate the logits of a reward model: ``r / T + b``, or ``sigmoid(r / T + b)``.

    Temperature scaling, section 4.2 of Guo et al. 2017 (arXiv 1706.04599); Platt scaling with a bias.
    """
    logits = scores / temperature + bias
    return logits.sigmoid() if sigmoid else logits


def mean_overlap(mean: torch.Tensor, std: torch.Tensor, means: torch.Tensor, stds: torch.Tensor) -> torch.Tensor:
    """Return how much Gaussian rewards overlap with known ones: 1 if with all of them, near 0 if they are certain.

    Mean Bhattacharyya coefficient, the uncertainty of PURM (Sun et al. 2025, arXiv 2503.22480, equations 14 to 16)::

        u_i = 1/N sum_j sqrt(2 s_i s_j / (s_i^2 + s_j^2)) * exp(-(m_i - m_j)^2 / (4 (s_i^2 + s_j^2)))

    Shapes: ``mean [B]``, ``std [B]``, ``means [N]``, ``stds [N]`` to ``[B]``.
    """
    total = std[:, None].square() + stds.square()
    scale = (2 * std[:, None] * stds / total).sqrt()
    return (scale * (-(mean[:, None] - means).square() / (4 * total)).exp()).mean(-1)
