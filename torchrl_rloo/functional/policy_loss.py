"""The policy-gradient objectives of RLOO, as functions of log-probs and advantages.

Log-probs come as ``[B, A]``: the action tokens of each row, left-aligned, with a mask ``[B, A]``. A row without action
tokens has ratio 1 and no gradient, and still counts in ``B``.
"""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 20.0  # beyond it the ratio goes on linearly: float32 overflows at 88, and infinity times 0 is NaN


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Log of the importance ratio of whole sequences, :math:`\sum_t m_t (\log \pi(a_t) - \log \mu(a_t))`.

    RLOO takes the sequence as one action (Ahmadian et al. 2024, section 3.2), so this is a sum, not a mean.

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the weights that sampled.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B]``.
    """
    return torch.where(mask, log_probs - old_log_probs, 0.0).sum(-1)


def clipped_objective(
    log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> torch.Tensor:
    r"""PPO's pessimistic objective with the ratio of whole sequences.

    .. math:: -\min(\rho_i A_i, \; \mathrm{clip}(\rho_i, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A_i)

    Equation 7 of Schulman et al. 2017 (arXiv 1707.06347) with sequences as actions. On-policy (:math:`\rho = 1`) its
    gradient is that of REINFORCE.

    Args:
        log_ratio: ``[B]``.
        advantages: ``[B]``.
        epsilon_low: how far below 1 the ratio may go.
        epsilon_high: how far above 1 the ratio may go.

    Returns:
        ``[B]``, a loss to minimise.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp() * (1 + (log_ratio - MAX_LOG_RATIO).relu())
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def reinforce_objective(log_probs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""REINFORCE, :math:`-A_i \sum_t m_{it} \log \pi(a_{it})`: no ratio, no clip (Williams 1992; the RLOO paper's own).

    Args:
        log_probs: ``[B, A]`` under the current weights.
        advantages: ``[B]``.
        mask: ``[B, A]`` bool.

    Returns:
        ``[B]``, a loss to minimise.
    """
    return -advantages * torch.where(mask, log_probs, 0.0).sum(-1)


def clip_masks(
    log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose gradient the clip removes: ``(low, high)``, both ``[B]`` bool.

    ``low``: ratio under the lower bound with a negative advantage. ``high``: ratio over the upper bound with a positive
    one. A ratio out of bounds on the other side still has its full gradient and is not counted.
    """
    ratio = log_ratio.exp()
    return (ratio < 1 - epsilon_low) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)
