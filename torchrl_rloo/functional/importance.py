"""Corrections: importance weights for samples from another policy than the denominator of the ratio.

The sampler's log-probs ``log mu`` and the (proximal) ones of the training model ``log pi_old`` differ if an engine uses
other kernels or a batch is stale. The weight ``w = pi_old / mu`` carries no gradient. A correction is called with
``(log_weight [B, A], mask [B, A])``. It returns ``[B, A]`` if its ``per_token`` is True, else one weight per sequence,
``[B, 1]``. A plain function is also accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from torchrl_rloo.functional.choices import Choice, number_field
from torchrl_rloo.functional.ratios import exp_log_ratio

Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Bounded(Choice):
    """Base class of masks with bounds ``low`` and ``high``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("low", self.low, 0, math.inf)
        self._check("high", self.high, self.low, math.inf)


@dataclass(frozen=True)
class TIS(Choice):
    """Truncated importance sampling of each token: ``min(w_t, high)``.

    Yao et al. 2025; Espeholt et al. 2018 (arXiv 1802.01561).

    Args:
        high: largest weight.

    Example:
        >>> TIS(2.0)(torch.tensor([[0.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool))
        tensor([[1., 2.]])
    """

    high: float = number_field(2.0, above=True)
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return exp_log_ratio(log_weight).clamp(max=self.high)


@dataclass(frozen=True)
class IcePop(_Bounded):
    """Mask of tokens on which the two policies disagree: ``w_t`` if ``low <= w_t <= high``, else 0.

    IcePop (arXiv 2510.18855).

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.
    """

    low: float = 0.5
    high: float = 5.0
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _zero_outside(exp_log_ratio(log_weight), self.low, self.high)


@dataclass(frozen=True)
class SequenceTruncate(Choice):
    """One truncated weight for the whole sequence: ``min(prod_t w_t, high)``.

    Args:
        high: largest weight.
    """

    high: float = number_field(2.0, above=True)
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return exp_log_ratio(_masked_sum(log_weight, mask)).clamp(max=self.high)


@dataclass(frozen=True)
class SequenceMask(_Bounded):
    """Mask of sequences on which the two policies disagree: ``W = prod_t w_t`` if ``low <= W <= high``, else 0.

    Args:
        low: smallest weight that is kept.
        high: largest weight that is kept.
    """

    low: float = 0.0
    high: float = 2.0
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _zero_outside(exp_log_ratio(_masked_sum(log_weight, mask)), self.low, self.high)


@dataclass(frozen=True)
class SeqMaskTIS(_Bounded):
    """TIS on sequences whose geometric mean weight ``(prod_t w_t)^(1/L)`` is in ``[low, high]``, else 0.

    The mean does not grow with the length, so long sequences are not masked for being long.

    Args:
        low: smallest mean weight that is kept.
        high: largest mean weight that is kept.
        token_high: largest weight of a token.
    """

    low: float = 0.99
    high: float = 1.01
    token_high: float = number_field(2.0, above=True)
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        mean = exp_log_ratio(_masked_sum(log_weight, mask) / mask.sum(-1, keepdim=True).clamp(min=1))
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
    """Mask sequences of negative advantage that the policy has already moved away from.

    Section 3.1 of DeepSeek-V3.2 (arXiv 2512.02556)::

        M_i = 0 if A_i < 0 and 1/L_i sum_t (log mu(a_t) - log pi(a_t)) > threshold else 1

    Args:
        log_probs: ``[B, A]`` under the current weights.
        behavior_log_probs: ``[B, A]`` of the sampler.
        advantages: ``[B, 1]`` or ``[B, A]``.
        mask: ``[B, A]`` bool, True on action tokens.
        threshold: largest mean drift that is kept, in nats per token.

    Returns:
        ``[B, 1]`` or ``[B, A]`` bool, False on what is masked.
    """
    drift = _masked_sum(behavior_log_probs - log_probs.detach(), mask) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (drift <= threshold)


def _masked_sum(log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, log_weight, 0.0).sum(-1, keepdim=True)


def _zero_outside(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
