"""Statistics that leave out what is masked or missing."""

from __future__ import annotations

import torch


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of ``values`` where ``mask`` is True, or weighted by it; 0 where nothing is.

    Args:
        values: any shape.
        mask: same shape; bool, or weights of at least 0.

    Returns:
        A scalar.
    """
    total = mask.sum()
    return (torch.where(mask > 0, values, 0.0) * mask).sum() / torch.where(total > 0, total, 1)


def nanstd(values: torch.Tensor) -> torch.Tensor:
    """Unbiased standard deviation of the values that are not NaN; NaN when there are fewer than two.

    Args:
        values: ``[N]``.

    Returns:
        A scalar.
    """
    given = values[~values.isnan()]
    return given.std() if len(given) > 1 else given.new_tensor(torch.nan)


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    r"""Share of the samples that importance weights leave in effect, :math:`(\sum w)^2 / (N \sum w^2)`.

    Args:
        log_ratio: ``[N]`` log importance weights, one per independent sample (a row, not a token).

    Returns:
        A scalar in ``(0, 1]``; 1 when all weights are equal, NaN when ``N`` is 0.
    """
    n = log_ratio.new_tensor(float(log_ratio.numel()))
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0) - n.log()).exp()


def wilson_interval(share: torch.Tensor, counts: torch.Tensor, z: float = 1.96) -> tuple[torch.Tensor, torch.Tensor]:
    r"""Confidence interval of a share (Wilson 1927), which stays within [0, 1] and is right for few counts as well.

    .. math:: \frac{\hat p + z^2 / 2n \pm z \sqrt{\hat p (1 - \hat p) / n + z^2 / 4 n^2}}{1 + z^2 / n}

    Args:
        share: ``[...]`` shares :math:`\hat p`.
        counts: ``[...]``, of how many.
        z: quantile of the normal distribution; 1.96 for 95 %.

    Returns:
        Lower and upper ends, ``[...]``; NaN where there is nothing to count.
    """
    centre = share + z**2 / (2 * counts)
    half = z * (share * (1 - share) / counts + z**2 / (4 * counts**2)).sqrt()
    scale = 1 + z**2 / counts
    return ((centre - half) / scale).clamp(min=0), ((centre + half) / scale).clamp(max=1)
