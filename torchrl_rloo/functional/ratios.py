"""Importance ratios between the current policy and the one that sampled, and corrections for another sampler.

Every entry of :data:`RATIOS` has the signature ``(log_probs [B, A], old_log_probs [B, A], mask [B, A]) -> log_ratio``.
A ``log_ratio`` ``[B, 1]`` treats a whole sequence as one action; ``[B, A]`` has one value per token. While the policy
has not changed since sampling, all ratios are 1 and, under one aggregation, have the same gradient.

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

from torchrl_rloo.runtime.lookup import Choice, number_field

Ratio = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

MAX_LOG_RATIO = 20.0  # the ratio is linear beyond it: float32 overflows at 88, and infinity times 0 is NaN


def no_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log-ratios of 0 with the gradient of ``log pi(a_t)``: plain REINFORCE (Williams 1992).

    Shapes: ``log_probs [B, A]`` to ``[B, A]``.
    """
    return log_probs - log_probs.detach()


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return ``log pi(a_t) - log pi_old(a_t)`` of each token, as in PPO (1707.06347) and GRPO (arXiv 2402.03300).

    Shapes: ``log_probs [B, A]``, ``old_log_probs [B, A]``, ``mask [B, A]`` to ``[B, A]``.
    """
    return torch.where(mask, log_probs - old_log_probs, 0.0)


def sequence_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio of the whole sequence: ``sum_t m_t (log pi(a_t) - log pi_old(a_t))``.

    RLOO treats the sequence as one action (Ahmadian et al. 2024, arXiv 2402.14740, section 3.2).

    Shapes: ``log_probs [B, A]``, ``old_log_probs [B, A]``, ``mask [B, A]`` to ``[B, 1]``.
    """
    return token_log_ratio(log_probs, old_log_probs, mask).sum(-1, keepdim=True)


def mean_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean log-ratio of the sequence at each token: ``1/L sum_t m_t (log pi(a_t) - log pi_old(a_t))``.

    Token form of GSPO (equation 14 of Zheng et al. 2025, arXiv 2507.18071): the value is that of the sequence, the
    gradient that of the token's log-prob. Its average over the sequence has the gradient of GSPO.

    Shapes: ``log_probs [B, A]``, ``old_log_probs [B, A]``, ``mask [B, A]`` to ``[B, A]``.
    """
    total = sequence_log_ratio(log_probs.detach(), old_log_probs, mask)
    return total / mask.sum(-1, keepdim=True).clamp(min=1) + (log_probs - log_probs.detach())


@dataclass(frozen=True)
class RatioSpec:
    """Ratio with the level that losses and metrics query; calling it calls the ratio.

    Attributes:
        function: ratio to call.
        per_token: True if it returns ``[B, A]``, False if it returns ``[B, 1]``, one value for the whole sequence.
    """

    function: Ratio
    per_token: bool = True

    def __call__(self, log_probs: torch.Tensor, old_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the log-ratios."""
        log_ratio = self.function(log_probs, old_log_probs, mask)
        expected = mask.shape if self.per_token else (len(mask), 1)
        if log_ratio.shape != expected:
            raise ValueError(
                f"ratio={self.function!r:.80} returned {tuple(log_ratio.shape)}, but per_token={self.per_token} "
                f"requires {tuple(expected)}; pass RatioSpec(function, per_token={not self.per_token})"
            )
        return log_ratio


RATIOS: dict[str, RatioSpec] = {
    "none": RatioSpec(no_ratio),
    "token": RatioSpec(token_log_ratio),
    "sequence": RatioSpec(sequence_log_ratio, per_token=False),
    "sequence_mean": RatioSpec(mean_log_ratio),
}


def ratio_spec(ratio: Ratio) -> RatioSpec:
    """Return the spec of a ratio: itself, that of a function of :data:`RATIOS`, or that of one value per token."""
    if isinstance(ratio, RatioSpec):
        return ratio
    known = {spec.function: spec for spec in RATIOS.values()}
    return known.get(ratio) or RatioSpec(ratio, per_token=getattr(ratio, "per_token", True))


def exp_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ``exp(log_ratio)``, linear beyond ``exp(MAX_LOG_RATIO)``; any shape."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp() * (1 + (log_ratio - MAX_LOG_RATIO).relu())


def split_among_tokens(objective: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return an objective per token: equal shares of ``[B, 1]``, or ``[B, A]`` unchanged."""
    if objective.shape == mask.shape:
        return objective
    return (objective / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(mask)


Correction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Bounded(Choice):
    """Base class of corrections with bounds ``low`` and ``high``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("low", self.low, 0, math.inf)
        self._check("high", self.high, self.low, math.inf)


@dataclass(frozen=True)
class TIS(_Bounded):
    """Truncated importance sampling of each token: ``min(max(w_t, low), high)``.

    Yao et al. 2025; Espeholt et al. 2018 (arXiv 1802.01561). The lower bound, off by default, is that of OpenRLHF.
    """

    high: float = number_field(2.0, above=True)  # largest weight
    low: float = 0.0  # smallest weight
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return exp_log_ratio(log_weight).clamp(self.low, self.high)


@dataclass(frozen=True)
class IcePop(_Bounded):
    """Mask of tokens on which the two policies disagree: ``w_t`` if ``low <= w_t <= high``, else 0.

    IcePop (arXiv 2510.18855).
    """

    low: float = 0.5  # smallest weight that is kept
    high: float = 5.0  # largest weight that is kept
    per_token: ClassVar[bool] = True

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _zero_outside(exp_log_ratio(log_weight), self.low, self.high)


@dataclass(frozen=True)
class SequenceTruncate(_Bounded):
    """One truncated weight for the whole sequence: ``min(max(prod_t w_t, low), high)``."""

    high: float = number_field(2.0, above=True)  # largest weight
    low: float = 0.0  # smallest weight
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return exp_log_ratio(_masked_sum(log_weight, mask)).clamp(self.low, self.high)


@dataclass(frozen=True)
class SequenceMask(_Bounded):
    """Mask of sequences on which the two policies disagree: ``W = prod_t w_t`` if ``low <= W <= high``, else 0."""

    low: float = 0.0  # smallest weight that is kept
    high: float = 2.0  # largest weight that is kept
    per_token: ClassVar[bool] = False

    def __call__(self, log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return _zero_outside(exp_log_ratio(_masked_sum(log_weight, mask)), self.low, self.high)


@dataclass(frozen=True)
class SeqMaskTIS(_Bounded):
    """TIS on sequences whose geometric mean weight ``(prod_t w_t)^(1/L)`` is in ``[low, high]``, else 0.

    The mean does not grow with the length, so long sequences are not masked for being long.
    """

    low: float = 0.99  # smallest mean weight that is kept
    high: float = 1.01  # largest mean weight that is kept
    token_high: float = number_field(2.0, above=True)  # largest weight of a token
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

    Shapes: ``log_probs`` and ``mask`` ``[B, A]``, ``advantages [B, 1 or A]`` to bool ``[B, 1 or A]``.
    """
    drift = _masked_sum(behavior_log_probs - log_probs.detach(), mask) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (advantages >= 0) | (drift <= threshold)


def _masked_sum(log_weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, log_weight, 0.0).sum(-1, keepdim=True)


def _zero_outside(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
