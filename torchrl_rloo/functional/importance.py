r"""Correction of samples that another policy drew than the one the ratio starts from.

The sampler's log-probs :math:`\mu` and those of the training model :math:`\pi_{old}` (the proximal ones) differ when an
engine computes in other kernels or a batch is stale. The importance weight :math:`w = \pi_{old} / \mu` carries no
gradient. Entries of :data:`CORRECTIONS` have the signature ``(log_weight [B, A], mask [B, A], *, low, high) -> weight``
of ``[B, 1]`` or ``[B, A]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchrl_rloo.functional.ratios import ratio_of

Correction = Callable[..., torch.Tensor]


def token_truncate(log_weight: torch.Tensor, mask: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    r"""TIS, :math:`\min(w_t, h)`: truncated importance sampling of each token (Yao et al. 2025; Espeholt et al. 2018,
    arXiv 1802.01561).

    Args:
        log_weight: ``[B, A]``.
        mask: not used.
        high: the largest weight.
    """
    return ratio_of(log_weight).clamp(max=high)


def token_mask(log_weight: torch.Tensor, mask: torch.Tensor, *, low: float = 0.5, high: float = 5.0) -> torch.Tensor:
    r"""ICEPOP, :math:`w_t [l \le w_t \le h]`: tokens on which the two disagree take no part (arXiv 2510.18855).

    Args:
        log_weight: ``[B, A]``.
        mask: not used.
        low: the smallest weight that is kept.
        high: the largest.
    """
    return _within(ratio_of(log_weight), low, high)


def sequence_truncate(log_weight: torch.Tensor, mask: torch.Tensor, *, high: float = 2.0) -> torch.Tensor:
    r""":math:`\min(\prod_t w_t, h)`: one weight for the whole sequence.

    Args:
        log_weight: ``[B, A]``.
        mask: ``[B, A]`` bool, True on action tokens.
        high: the largest weight.
    """
    return ratio_of(_sum(log_weight, mask)).clamp(max=high)


def sequence_mask(log_weight: torch.Tensor, mask: torch.Tensor, *, low: float = 0.0, high: float = 2.0) -> torch.Tensor:
    r""":math:`W [l \le W \le h], \; W = \prod_t w_t`: sequences on which the two disagree take no part.

    Args:
        log_weight: ``[B, A]``.
        mask: ``[B, A]`` bool, True on action tokens.
        low: the smallest weight that is kept.
        high: the largest.
    """
    return _within(ratio_of(_sum(log_weight, mask)), low, high)


def seq_mask_tis(
    log_weight: torch.Tensor, mask: torch.Tensor, *, low: float = 0.99, high: float = 1.01, token_high: float = 2.0
) -> torch.Tensor:
    r"""TIS on sequences whose geometric mean weight :math:`(\prod_t w_t)^{1/L}` lies in :math:`[l, h]`, else 0.

    The mean does not grow with the length, so long sequences are not thrown out for being long.

    Args:
        log_weight: ``[B, A]``.
        mask: ``[B, A]`` bool, True on action tokens.
        low: the smallest mean that is kept.
        high: the largest.
        token_high: the largest weight of a token.
    """
    mean = ratio_of(_sum(log_weight, mask) / mask.sum(-1, keepdim=True).clamp(min=1))
    return token_truncate(log_weight, mask, high=token_high) * ((mean >= low) & (mean <= high))


CORRECTIONS: dict[str, Correction] = {
    "tis": token_truncate,
    "icepop": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "seq_mask_tis": seq_mask_tis,
}


def off_policy_mask(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    r"""Leaves out sequences of negative advantage that the policy has moved away from already.

    .. math:: M_i = 0 \text{ if } A_i < 0 \text{ and } \frac{1}{L_i} \sum_t \log \frac{\mu(a_t)}{\pi(a_t)} > \delta

    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.

    Args:
        log_probs: ``[B, A]`` under the current weights.
        behaviour_log_probs: ``[B, A]`` of the sampler.
        advantages: ``[B, 1]`` or ``[B, A]``.
        mask: ``[B, A]`` bool.
        threshold: :math:`\delta`, in nats per token.

    Returns:
        ``[B, 1]`` or ``[B, A]`` bool, True on what stays.
    """
    drift = _sum(behaviour_log_probs - log_probs.detach(), mask) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (drift <= threshold)


def _sum(log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, log_weight, 0.0).sum(-1, keepdim=True)


def _within(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
