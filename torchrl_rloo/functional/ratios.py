"""Importance ratios: which of the policy's probabilities are compared with those that sampled.

Every entry of :data:`RATIOS` has the signature ``(log_probs [B, A], old_log_probs [B, A], mask [B, A]) -> log_ratio``.
A ``log_ratio`` of ``[B, 1]`` takes a whole sequence as one action, one of ``[B, A]`` has a value for each token. While
the policy is the one that sampled all ratios are 1, and under one aggregation all have the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Ratio = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MAX_LOG_RATIO = 20.0  # beyond it the ratio goes on linearly: float32 overflows at 88, and infinity times 0 is NaN


def no_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Always 1, with the gradient of :math:`\log \pi(a_t)`: plain REINFORCE, whoever sampled (Williams 1992).

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: not used.
        mask: not used.

    Returns:
        ``[B, A]``, zeros.
    """
    return log_probs - log_probs.detach()


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Of each token, :math:`\log \pi(a_t) - \log \pi_{old}(a_t)`: PPO (arXiv 1707.06347), GRPO (arXiv 2402.03300).

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the weights compared with.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, A]``, 0 where the mask is False.
    """
    return torch.where(mask, log_probs - old_log_probs, 0.0)


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""Of the whole sequence, :math:`\sum_t m_t (\log \pi(a_t) - \log \pi_{old}(a_t))`.

    RLOO takes the sequence as one action (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2), so this is a sum.

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the weights compared with.
        mask: ``[B, A]`` bool, True on action tokens.

    Returns:
        ``[B, 1]``.
    """
    return token_log_ratio(log_probs, old_log_probs, mask).sum(-1, keepdim=True)


def mean_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    r"""The sequence's mean, :math:`\frac{1}{L} \sum_t m_t (\log \pi(a_t) - \log \pi_{old}(a_t))`, at each token.

    GSPO (Zheng et al. 2025, arXiv 2507.18071) in its form per token (equation 14): the value is that of the sequence,
    the gradient that of the token's own log-prob. Averaged over the sequence this is GSPO's own gradient.

    Args:
        log_probs: ``[B, A]`` under the current weights; carries the gradient.
        old_log_probs: ``[B, A]`` under the weights compared with.
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


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(log_ratio)``, going on as a straight line beyond ``exp(MAX_LOG_RATIO)``; any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() * (1 + (log_ratio - MAX_LOG_RATIO).relu())


def share_out(objective: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An objective per token: that of a whole sequence ``[B, 1]`` in equal shares, one of ``[B, A]`` as it is.

    Args:
        objective: ``[B, 1]`` or ``[B, A]``.
        mask: ``[B, A]`` bool.
    """
    if objective.shape == mask.shape:
        return objective
    return (objective / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)
