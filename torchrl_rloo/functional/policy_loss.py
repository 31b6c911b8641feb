r"""Surrogate objectives: what is minimised, given importance ratios and advantages.

Every entry of :data:`SURROGATES` has the signature ``(log_ratio [B, 1 or A], advantages [B, 1 or A], log_probs [B, A],
old_log_probs [B, A], **settings) -> loss``. The loss has the shape ``[B, A]``, or ``[B, 1]`` where ratio and advantage
are of whole sequences; :func:`~torchrl_rloo.functional.ratios.share_out` deals it out to the tokens. At a ratio of 1
all have the gradient of REINFORCE, :math:`-A \nabla \log \pi`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch

from torchrl_rloo.functional.ratios import MAX_LOG_RATIO, ratio_of

Surrogate = Callable[..., torch.Tensor]


def clipped_surrogate(
    log_ratio, advantages, log_probs, old_log_probs, *, epsilon_low=0.2, epsilon_high=0.2, dual_clip=None
) -> torch.Tensor:
    r"""PPO's pessimistic objective, with bounds of its own on each side, and a floor under it if asked for.

    .. math:: -\min(\rho A, \; \mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high}) A)

    Equation 7 of Schulman et al. 2017 (arXiv 1707.06347); two bounds as in DAPO (arXiv 2503.14476, equation 10). With
    ``dual_clip`` :math:`c > 1` a negative advantage's objective is no lower than :math:`c A` (Ye et al. 2020, arXiv
    1912.09729, equation 5), so that a single huge ratio cannot rule a step.

    Args:
        log_ratio: ``[B, 1]`` or ``[B, A]``.
        advantages: ``[B, 1]`` or ``[B, A]``.
        log_probs: not used.
        old_log_probs: not used.
        epsilon_low: how far below 1 the ratio may go.
        epsilon_high: how far above 1 the ratio may go.
        dual_clip: :math:`c`, or None.
    """
    ratio = ratio_of(log_ratio)
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return -objective


def cispo_surrogate(
    log_ratio, advantages, log_probs, old_log_probs, *, epsilon_low=1.0, epsilon_high=4.0
) -> torch.Tensor:
    r"""REINFORCE with a clipped importance weight, so that no token loses its gradient.

    .. math:: -\mathrm{sg}(\mathrm{clip}(\rho, 1 - \epsilon_{low}, 1 + \epsilon_{high})) \, A \log \pi(a_t)

    CISPO, equation 4 of the MiniMax-M1 report (arXiv 2506.13585); sg stops the gradient. The lower bound is off by
    default, as there.

    Args:
        log_ratio: ``[B, 1]`` or ``[B, A]``.
        advantages: ``[B, 1]`` or ``[B, A]``.
        log_probs: ``[B, A]``, carries the gradient.
        old_log_probs: not used.
        epsilon_low: how far below 1 the weight may go.
        epsilon_high: how far above 1 the weight may go.
    """
    weight = ratio_of(log_ratio.detach()).clamp(1 - epsilon_low, 1 + epsilon_high)
    return -weight * advantages * log_probs


def sapo_surrogate(
    log_ratio, advantages, log_probs, old_log_probs, *, tau_positive=1.0, tau_negative=1.05
) -> torch.Tensor:
    r"""A smooth gate in place of the clip: the gradient fades as the ratio leaves 1, faster for negative advantages.

    .. math:: -\frac{4}{\tau} \sigma(\tau (\rho - 1)) A
        \quad \tau = \tau_{pos} \text{ if } A > 0 \text{ else } \tau_{neg}

    SAPO (arXiv 2511.20347).

    Args:
        log_ratio: ``[B, 1]`` or ``[B, A]``.
        advantages: ``[B, 1]`` or ``[B, A]``.
        log_probs: not used.
        old_log_probs: not used.
        tau_positive: steepness of the gate for positive advantages.
        tau_negative: for the others.
    """
    tau = _by_sign(advantages, advantages > 0, tau_positive, tau_negative)
    return -torch.sigmoid(tau * (ratio_of(log_ratio) - 1)) * 4 / tau * advantages


def dppo_surrogate(log_ratio, advantages, log_probs, old_log_probs, *, delta=0.15) -> torch.Tensor:
    r"""A trust region in probability rather than in ratio: rare tokens may move by large factors, common ones may not.

    .. math:: -M \rho A, \quad M = 0 \text{ if } |\pi(a_t) - \pi_{old}(a_t)| > \delta
        \text{ and } (\rho - 1) A > 0 \text{, else } 1

    DPPO with the binary total-variation divergence (arXiv 2602.04879).

    Args:
        log_ratio: ``[B, A]``.
        advantages: ``[B, 1]`` or ``[B, A]``.
        log_probs: ``[B, A]``.
        old_log_probs: ``[B, A]``.
        delta: largest shift of a sampled token's probability, in (0, 1].
    """
    shift = log_probs.detach().exp() - old_log_probs.exp()
    inside = (shift.abs() <= delta) | (shift * advantages <= 0)
    return -torch.where(inside, ratio_of(log_ratio) * advantages, 0.0)


def vespo_surrogate(
    log_ratio,
    advantages,
    log_probs,
    old_log_probs,
    *,
    k_positive=2.0,
    k_negative=3.0,
    lambda_positive=3.0,
    lambda_negative=2.0,
) -> torch.Tensor:
    r"""REINFORCE with a soft weight that falls to 0 on both sides of a ratio near 1.

    .. math:: -\mathrm{sg}(\rho^k e^{\lambda (1 - \rho)}) \, A \log \pi(a_t)

    VESPO (arXiv 2602.10693), with :math:`k` and :math:`\lambda` by the sign of the advantage; meant for ratios of whole
    sequences.

    Args:
        log_ratio: ``[B, 1]`` or ``[B, A]``.
        advantages: ``[B, 1]`` or ``[B, A]``.
        log_probs: ``[B, A]``, carries the gradient.
        old_log_probs: not used.
        k_positive: :math:`k` for advantages of at least 0.
        k_negative: for the others.
        lambda_positive: :math:`\lambda` for advantages of at least 0.
        lambda_negative: for the others.
    """
    log_weight = log_ratio.detach().clamp(math.log(1e-8), MAX_LOG_RATIO)
    k = _by_sign(advantages, advantages >= 0, k_positive, k_negative)
    rate = _by_sign(advantages, advantages >= 0, lambda_positive, lambda_negative)
    weight = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return -weight * advantages * log_probs


def _by_sign(like: torch.Tensor, condition: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """One setting or the other, in the precision of ``like``."""
    return torch.where(condition, like.new_tensor(positive), like.new_tensor(negative))


SURROGATES: dict[str, Surrogate] = {
    "clip": clipped_surrogate,
    "cispo": cispo_surrogate,
    "sapo": sapo_surrogate,
    "dppo": dppo_surrogate,
    "vespo": vespo_surrogate,
}


def settings_of(function: Callable) -> dict[str, object]:
    """A formula's settings and their defaults: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
