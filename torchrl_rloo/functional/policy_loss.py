r"""Surrogates: the loss of a token or a sequence, given importance ratios and advantages.

A surrogate is called with ``(log_ratio [B, 1 or A], advantages [B, 1 or A], log_probs [B, A], old_log_probs [B, A])``
and returns a loss ``[B, A]``, or ``[B, 1]`` where ratio and advantage are of whole sequences;
:func:`~torchrl_rloo.functional.ratios.share_out` divides that among the tokens. Its method ``clipped`` takes the same
arguments and returns a bool mask: True where the surrogate removes the gradient. A plain function serves as well; it
has no clip fraction. At a ratio of 1 all surrogates have the gradient of REINFORCE, :math:`-A \nabla \log \pi`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchrl_rloo.functional.choices import Choice, number
from torchrl_rloo.functional.ratios import MAX_LOG_RATIO, ratio_of

Surrogate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _KeepsGradient(Choice):
    """Base of surrogates that weigh gradients down but never remove one."""

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return False everywhere."""
        return torch.zeros_like(log_ratio * advantages, dtype=torch.bool)


@dataclass(frozen=True)
class Clip(Choice):
    r"""PPO's pessimistic objective, with separate bounds below and above 1.

    .. math:: -\min(\rho A, \; \mathrm{clip}(\rho, 1 - l, 1 + h) A)

    Equation 7 of Schulman et al. 2017 (arXiv 1707.06347); two bounds as in DAPO (arXiv 2503.14476, equation 10). With
    ``dual`` :math:`c` a negative advantage's objective is no lower than :math:`c A` (Ye et al. 2020, arXiv 1912.09729,
    equation 5), which bounds the effect of a single huge ratio.

    Args:
        low: :math:`l`, distance below 1, in (0, 1].
        high: :math:`h`, distance above 1; None: the same as ``low``.
        dual: :math:`c`, above 1; None disables it.

    Example:
        >>> log_ratio, advantages = torch.tensor([[0.5, 0.1]]), torch.ones(1, 1)
        >>> Clip(0.2)(log_ratio, advantages, log_ratio, torch.zeros(1, 2))
        tensor([[-1.2000, -1.1052]])
        >>> Clip(0.2).clipped(log_ratio, advantages, log_ratio, torch.zeros(1, 2))
        tensor([[ True, False]])
    """

    low: float = number(0.2, above=True, high=1)
    high: float | None = number(None, above=True)
    dual: float | None = number(None, low=1, above=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high is None:
            object.__setattr__(self, "high", self.low)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        ratio = ratio_of(log_ratio)
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        objective = torch.minimum(ratio * advantages, bounded * advantages)
        if self.dual is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, self.dual * advantages), objective)
        return -objective

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return True where the ratio is out of bounds in the direction of the advantage."""
        ratio = ratio_of(log_ratio)
        bad = ratio < 1 - self.low if self.dual is None else (ratio < 1 - self.low) | (ratio > self.dual)
        return torch.where(advantages < 0, bad, (ratio > 1 + self.high) & (advantages > 0))


@dataclass(frozen=True)
class Unclipped(_KeepsGradient):
    r"""Importance sampling without a bound: :math:`-\rho A`."""

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        return -ratio_of(log_ratio) * advantages


@dataclass(frozen=True)
class CISPO(_KeepsGradient):
    r"""REINFORCE with a clipped importance weight: no token loses its gradient.

    .. math:: -\mathrm{sg}(\mathrm{clip}(\rho, 1 - l, 1 + h)) \, A \log \pi(a_t)

    Equation 4 of the MiniMax-M1 report (arXiv 2506.13585); sg stops the gradient. The lower bound is off by default,
    as there.

    Args:
        low: :math:`l`, distance below 1, in (0, 1].
        high: :math:`h`, distance above 1.
    """

    low: float = number(1.0, above=True, high=1)
    high: float = number(4.0, above=True)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        weight = ratio_of(log_ratio.detach()).clamp(1 - self.low, 1 + self.high)
        return -weight * advantages * log_probs


@dataclass(frozen=True)
class SAPO(_KeepsGradient):
    r"""A smooth gate instead of a clip: the gradient fades as the ratio leaves 1, faster for negative advantages.

    .. math:: -\frac{4}{\tau} \sigma(\tau (\rho - 1)) A
        \quad \tau = \tau_{pos} \text{ if } A > 0 \text{ else } \tau_{neg}

    SAPO (arXiv 2511.20347).

    Args:
        tau_positive: steepness of the gate for positive advantages.
        tau_negative: steepness for the others.
    """

    tau_positive: float = number(1.0, above=True)
    tau_negative: float = number(1.05, above=True)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        tau = _by_sign(advantages, advantages > 0, self.tau_positive, self.tau_negative)
        return -torch.sigmoid(tau * (ratio_of(log_ratio) - 1)) * 4 / tau * advantages


@dataclass(frozen=True)
class DPPO(Choice):
    r"""A trust region in probability instead of ratio: rare tokens may move by large factors, common ones may not.

    .. math:: -M \rho A, \quad M = 0 \text{ if } |\pi(a_t) - \pi_{old}(a_t)| > \delta
        \text{ and } (\rho - 1) A > 0 \text{, else } 1

    DPPO with the binary total-variation divergence (arXiv 2602.04879). It is of tokens: use it with ``ratio="token"``.

    Args:
        delta: largest shift of a sampled token's probability, in (0, 1].
    """

    delta: float = number(0.15, above=True, high=1)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        outside = self.clipped(log_ratio, advantages, log_probs, old_log_probs)
        return -torch.where(outside, 0.0, ratio_of(log_ratio) * advantages)

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return True where the probability has moved too far in the direction of the advantage."""
        shift = log_probs.detach().exp() - old_log_probs.exp()
        return (shift.abs() > self.delta) & (shift * advantages > 0)


@dataclass(frozen=True)
class VESPO(_KeepsGradient):
    r"""REINFORCE with a soft weight that falls to 0 on both sides of a ratio near 1.

    .. math:: -\mathrm{sg}(\rho^k e^{\lambda (1 - \rho)}) \, A \log \pi(a_t)

    VESPO (arXiv 2602.10693), with :math:`k` and :math:`\lambda` by the sign of the advantage; meant for ratios of whole
    sequences.

    Args:
        k_positive: :math:`k` for advantages of at least 0.
        k_negative: :math:`k` for the others.
        lambda_positive: :math:`\lambda` for advantages of at least 0.
        lambda_negative: :math:`\lambda` for the others.
    """

    k_positive: float = number(2.0)
    k_negative: float = number(3.0)
    lambda_positive: float = number(3.0)
    lambda_negative: float = number(2.0)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        log_weight = log_ratio.detach().clamp(math.log(1e-8), MAX_LOG_RATIO)
        k = _by_sign(advantages, advantages >= 0, self.k_positive, self.k_negative)
        rate = _by_sign(advantages, advantages >= 0, self.lambda_positive, self.lambda_negative)
        return -(rate + k * log_weight - rate * log_weight.exp()).exp() * advantages * log_probs


def _by_sign(like: torch.Tensor, condition: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Return one setting or the other, in the precision of ``like``."""
    return torch.where(condition, like.new_tensor(positive), like.new_tensor(negative))


SURROGATES: dict[str, type] = {
    "clip": Clip,
    "unclipped": Unclipped,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo": DPPO,
    "vespo": VESPO,
}
