"""Importance ratios between the current policy and the one that sampled.

Every entry of :data:`RATIOS` has the signature ``(log_probs [B, A], old_log_probs [B, A], mask [B, A]) -> log_ratio``.
A ``log_ratio`` ``[B, 1]`` treats a whole sequence as one action; ``[B, A]`` has one value per token. While the policy
has not changed since sampling, all ratios are 1 and, under one aggregation, have the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Ratio = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MAX_LOG_RATIO = 20.0  # the ratio is linear beyond it: float32 overflows at 88, and infinity times 0 is NaN


def no_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log-ratios of 0 with the gradient of ``log pi(a_t)``: plain REINFORCE (Williams 1992).

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ignored.
        mask: ignored.

    Returns:
        ``[B, A]``, zeros.
    """
    return log_probs - log_probs.detach()


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``log pi(a_t) - log pi_old(a_t)`` of each token, as in PPO (arXiv 1707.06347) and GRPO (arXiv 2402.03300).

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the old weights.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, A]``, 0 where the mask is False.
    """
    return torch.where(mask, log_probs - old_log_probs, 0.0)


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio of the whole sequence: ``sum_t m_t (log pi(a_t) - log pi_old(a_t))``.

    RLOO treats the sequence as one action (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2).

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the old weights.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, 1]``.
    """
    return token_log_ratio(log_probs, old_log_probs, mask).sum(-1, keepdim=True)


def mean_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean log-ratio of the sequence at each token: ``1/L sum_t m_t (log pi(a_t) - log pi_old(a_t))``.

    Token form of GSPO (equation 14 of Zheng et al. 2025, arXiv 2507.18071): the value is that of the sequence, the
    gradient that of the token's log-prob. Its average over the sequence has the gradient of GSPO.

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the old weights.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, A]``.
    """
    total = sequence_log_ratio(log_probs.detach(), old_log_probs, mask)
    return total / mask.sum(-1, keepdim=True).clamp(min=1) + (log_probs - log_probs.detach())


RATIOS: dict[str, Ratio] = {
    "none": no_ratio,
    "token": token_log_ratio,
    "sequence": sequence_log_ratio,
    "sequence_mean": mean_log_ratio,
}


def exp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp(log_ratio)``, linear beyond ``exp(MAX_LOG_RATIO)``; any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() * (1 + (log_ratio - MAX_LOG_RATIO).relu())


def split_among_tokens(objective: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return an objective per token: equal shares of ``[B, 1]``, or ``[B, A]`` unchanged.

    Args:
        objective: ``[B, 1]`` or ``[B, A]``.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, A]``. Shares also stand where the mask is False.
    """
    if objective.shape == mask.shape:
        return objective
    return (objective / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
