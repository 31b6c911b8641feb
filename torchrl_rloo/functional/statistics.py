"""Statistics that exclude masked or missing values."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import torch


class Interval(NamedTuple):
    """Mean with the bounds of its confidence interval, NaN if there are too few values."""

    mean: float
    low: float
    high: float


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of ``values`` under a mask or under weights; 0 if their sum is 0.

    Args:
        values: any shape.
        mask: same shape; bool, or weights of at least 0.

    Returns:
        A scalar.
    """
    total = mask.sum()
    return (torch.where(mask > 0, values, 0.0) * mask).sum() / torch.where(total > 0, total, 1)


def nanstd(values: torch.Tensor) -> torch.Tensor:
    """Return the unbiased standard deviation of the values that are not NaN; NaN for fewer than two.

    Args:
        values: ``[N]``.

    Returns:
        A scalar.
    """
    given = values[~values.isnan()]
    return given.std() if len(given) > 1 else given.new_tensor(torch.nan)


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the effective share of the samples under importance weights: ``(sum w)^2 / (N sum w^2)``.

    Args:
        log_ratio: ``[N]`` log importance weights, one per independent sample (a row, not a token).

    Returns:
        A scalar in ``(0, 1]``; 1 if all weights are equal, NaN if ``N`` is 0.
    """
    n = log_ratio.new_tensor(float(log_ratio.numel()))
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0) - n.log()).exp()


def wilson_interval(share: torch.Tensor, counts: torch.Tensor, z: float = 1.96) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Wilson confidence interval of a proportion, which is within [0, 1] and valid for small counts.

    Wilson 1927, with ``p`` the proportion and ``n`` the count::

        (p + z^2 / 2n +- z * sqrt(p * (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Args:
        share: ``[...]`` proportions ``p``.
        counts: ``[...]`` counts ``n``.
        z: quantile of the normal distribution; 1.96 for 95 %.

    Returns:
        Lower and upper bounds, ``[...]`` each; NaN where the count is 0.
    """
    center = share + z**2 / (2 * counts)
    half = z * (share * (1 - share) / counts + z**2 / (4 * counts**2)).sqrt()
    scale = 1 + z**2 / counts
    return ((center - half) / scale).clamp(min=0), ((center + half) / scale).clamp(max=1)


def student_quantile(p: float, df: int) -> float:
    """Return the quantile of Student's t distribution with ``df`` degrees of freedom.

    It inverts the finite series of Abramowitz and Stegun 26.7.3-4 by bisection.

    Args:
        p: probability, from 0.5 to 1.
        df: degrees of freedom, at least 1. Above 5000 it returns the normal quantile.

    Example:
        >>> round(student_quantile(0.975, 9), 4)
        2.2622
    """
    if df > 5000:  # differs from the normal quantile by less than 0.02 %
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 1.0
    while _student_cdf(high, df) < p:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def _student_cdf(t: float, df: int) -> float:
    angle = math.atan(t / math.sqrt(df))
    odd = df % 2
    steps = torch.tensor(range(2 if odd else 1, df - 1, 2), dtype=torch.float64)
    terms = torch.cat([torch.ones(1).double(), (steps / (steps + 1) * math.cos(angle) ** 2).cumprod(0)])
    series = math.sin(angle) * float(terms.sum())
    if not odd:
        return 0.5 + series / 2
    return 0.5 + (angle + (series * math.cos(angle) if df > 1 else 0.0)) / math.pi
