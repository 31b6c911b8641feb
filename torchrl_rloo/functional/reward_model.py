"""Objectives that train a reward model on pairs of a better and a worse completion.

Rewards are scores without a unit. In the Bradley-Terry model (Bradley and Terry 1952, "Rank analysis of incomplete
block designs") their difference is the log-odds that the first completion is better: ``P = sigmoid(r_w - r_l)``.
``chosen`` (``r_w``) and ``rejected`` (``r_l``) are ``[P]``, one entry per pair.
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
    """Return the negative log-likelihood of the labels, with margins.

    Equation 2 of Llama 2 (arXiv 2307.09288), with ``eps`` the label smoothing::

        L = -(1 - eps) * log sigmoid(r_w - r_l - margin) - eps * log sigmoid(r_l - r_w - margin)

    Args:
        chosen: ``[P]`` rewards of the better completions.
        rejected: ``[P]`` rewards of the worse completions.
        margin: ``[P]`` or scalar, smallest desired difference of the rewards: larger for clearer preferences. 0 is the
            plain Bradley-Terry model.
        label_smoothing: assumed share of swapped labels.

    Returns:
        ``[P]`` in nats.
    """
    difference = chosen - rejected
    return -(1 - label_smoothing) * logsigmoid(difference - margin) - label_smoothing * logsigmoid(-difference - margin)


def centering(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the squared sum of a pair's rewards, ``(r_w + r_l)^2`` (Eisenstein et al. 2023, arXiv 2312.09244).

    The likelihood does not change if a constant is added to all rewards of a prompt. This term fixes that constant.

    Args:
        chosen: ``[P]`` rewards of the better completions.
        rejected: ``[P]`` rewards of the worse completions.

    Returns:
        ``[P]``.
    """
    return (chosen + rejected).square()


def batch_sum_to_zero(part: torch.Tensor, mean: torch.Tensor | float) -> torch.Tensor:
    """Return a part's share of batch-wise sum-to-zero regularization, the squared mean of all rewards of a batch.

    Hong et al. 2025 (arXiv 2505.07271), against rewards of extreme size::

        L = (1 / (2 P) * sum_i (r_w_i + r_l_i))^2

    The mean is squared, not the sum, as in the authors' code. Their code also multiplies by the number of pairs ``P``,
    so a coefficient ``c`` there is ``c * P`` here.

    The squared mean is not a sum over micro-batches. With the mean ``mu`` of the whole batch known,
    ``2 * mu * part - mu * part.detach()`` is: over all parts the values add up to ``mu^2``, the gradients to
    ``2 * mu * grad mu``.

    Args:
        part: scalar, sum of the part's rewards divided by the number of rewards in the batch.
        mean: sum of all parts, ``mu``; no gradient flows through it.

    Returns:
        A scalar.
    """
    mean = torch.as_tensor(mean, dtype=part.dtype, device=part.device).detach()
    return mean * (2 * part - part.detach())
