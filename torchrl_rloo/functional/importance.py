r"""Corrections: importance weights for samples of another policy than the one the ratio starts from.

The sampler's log-probs :math:`\mu` and those of the training model :math:`\pi_{old}` (the proximal ones) differ when an
engine computes in other kernels or a batch is stale. The weight :math:`w = \pi_{old} / \mu` carries no gradient. A
correction is called with ``(log_weight [B, A], mask [B, A])`` and returns ``[B, A]``, or ``[B, 1]`` for one weight per
sequence; its ``per_token`` says which. A plain function serves as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from torchrl_rloo.functional.choices import Choice, number
from torchrl_rloo.functional.ratios import ratio_of

Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Bounded(Choice):
    """Base of masks with bounds ``low`` and ``high``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("low", self.low, 0, math.inf)
        self._check("high", self.high, self.low, math.inf)


@dataclass(frozen=True)
class TIS(Choice):
    r"""Truncated importance sampling of each token, :math:`\min(w_t, h)`.

    Yao et al. 2025; Espeholt et al. 2018 (arXiv 1802.01561).

    Args:
        high: largest weight :math:`h`.

    Example:
        >>> TIS(2.0)(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool))
        tensor([[1., 2.]])
    """

    high: float = number(2.0, above=True)
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ratio_of(log_weight).clamp(max=self.high)


@dataclass(frozen=True)
class IcePop(_Bounded):
    r"""Mask of tokens on which the two policies disagree, :math:`w_t [l \le w_t \le h]` (arXiv 2510.18855).

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.
    """

    low: float = 0.5
    high: float = 5.0
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _within(ratio_of(log_weight), self.low, self.high)


@dataclass(frozen=True)
class SequenceTruncate(Choice):
    r"""One truncated weight for the whole sequence, :math:`\min(\prod_t w_t, h)`.

    Args:
        high: largest weight :math:`h`.
    """

    high: float = number(2.0, above=True)
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return ratio_of(_sum(log_weight, mask)).clamp(max=self.high)


@dataclass(frozen=True)
class SequenceMask(_Bounded):
    r"""Mask of sequences on which the policies disagree, :math:`W [l \le W \le h], \; W = \prod_t w_t`.

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.
    """

    low: float = 0.0
    high: float = 2.0
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _within(ratio_of(_sum(log_weight, mask)), self.low, self.high)


@dataclass(frozen=True)
class SeqMaskTIS(_Bounded):
    r"""TIS on sequences whose geometric mean weight :math:`(\prod_t w_t)^{1/L}` lies in :math:`[l, h]`, else 0.

    The mean does not grow with the length, so a sequence is not masked for being long.

    Args:
        low: smallest mean that is kept.
        high: largest mean that is kept.
        token_high: largest weight of a token.
    """

    low: float = 0.99
    high: float = 1.01
    token_high: float = number(2.0, above=True)
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean = ratio_of(_sum(log_weight, mask) / mask.sum(-1, keepdim=True).clamp(min=1))
        return TIS(self.token_high)(log_weight, mask) * ((mean >= self.low) & (mean <= self.high))


CORRECTIONS: dict[str, type] = {
    "tis": TIS,
    "icepop": IcePop,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "seq_mask_tis": SeqMaskTIS,
}


def off_policy_mask(
    log_probs: torch.Tensor,
    behavior_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    threshold: float,
) -> torch.Tensor:
    r"""Mask sequences of negative advantage that the policy has already moved away from.

    .. math:: M_i = 0 \text{ if } A_i < 0 \text{ and } \frac{1}{L_i} \sum_t \log \frac{\mu(a_t)}{\pi(a_t)} > \delta

    DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.

    Args:
        log_probs: ``[B, A]`` under the current weights.
        behavior_log_probs: ``[B, A]`` of the sampler.
        advantages: ``[B, 1]`` or ``[B, A]``.
        mask: ``[B, A]`` bool.
        threshold: :math:`\delta`, in nats per token.

    Returns:
        ``[B, 1]`` or ``[B, A]`` bool, True on what stays.
    """
    drift = _sum(behavior_log_probs - log_probs.detach(), mask) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (drift <= threshold)


def _sum(log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, log_weight, 0.0).sum(-1, keepdim=True)


def _within(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
