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
