r"""Objectives that train a reward model on pairs of a better and a worse completion.

Rewards are plain scores without unit: the Bradley-Terry model (Bradley and Terry 1952, "Rank analysis of incomplete
block designs") takes the difference of two for the log-odds that the first completion is the better one,
:math:`P(y_w \succ y_l) = \sigma(r_w - r_l)`. ``chosen`` and ``rejected`` are ``[P]``, one entry per pair.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | float = 0.0,
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    r"""Negative log-likelihood of the labels, with margins: equation 2 of Llama 2 (arXiv 2307.09288).

    .. math:: L = -(1 - \epsilon) \log \sigma(r_w - r_l - m) - \epsilon \log \sigma(r_l - r_w - m)

    Args:
        chosen: ``[P]`` rewards :math:`r_w` of the better completions.
        rejected: ``[P]`` rewards :math:`r_l` of the worse ones.
        margin: ``[P]``, or one for all: how far apart the rewards should be at least, larger where the better
            completion is much better. 0 is the plain Bradley-Terry model.
        label_smoothing: :math:`\epsilon`, the share of labels taken to be the wrong way round.

    Returns:
        ``[P]`` in nats.
    """
    difference = chosen - rejected
    return -(1 - label_smoothing) * logsigmoid(difference - margin) - label_smoothing * logsigmoid(-difference - margin)


def centering(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    r"""Squared sum of a pair's rewards, :math:`(r_w + r_l)^2`, from Eisenstein et al. 2023 (arXiv 2312.09244).

    The likelihood has no say in a constant added to all rewards of a prompt. This term chooses it.

    Args:
        chosen: ``[P]`` rewards of the better completions.
        rejected: ``[P]`` rewards of the worse ones.

    Returns:
        ``[P]``.
    """
    return (chosen + rejected).square()


def batch_sum_to_zero(part: torch.Tensor, mean: torch.Tensor | float) -> torch.Tensor:
    r"""A part's share in the squared mean of all rewards of a batch, batch-wise sum-to-zero regularization.

    .. math:: L = \left(\frac{1}{2P} \sum_{i=1}^{P} (r_{w,i} + r_{l,i})\right)^2

    From Hong et al. 2025 (arXiv 2505.07271), against rewards of extreme size. As in the authors' implementation the
    mean is squared, not the sum; theirs multiplies by the number of pairs as well, so :math:`\lambda` there is
    :math:`\lambda P` here. A square of a sum does not fall apart into micro-batches, but with the mean :math:`\mu` of
    the whole batch known, :math:`2 \mu p - \mu p^*` does (:math:`p^*` has no gradient): over the parts, values add up
    to :math:`\mu^2` and gradients to :math:`2 \mu \nabla \mu`.

    Args:
        part: scalar :math:`p`, the part's rewards added up and divided by the number of rewards in the batch.
        mean: :math:`\mu`, the sum of all parts; no gradient goes through it.

    Returns:
        A scalar.
    """
    mean = torch.as_tensor(mean, dtype=part.dtype, device=part.device).detach()
    return mean * (2 * part - part.detach())
