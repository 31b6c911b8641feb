"""Estimators of the Kullback-Leibler divergence from sampled tokens."""

from __future__ import annotations

import torch


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r"""The plain log-ratio, unbiased and signed: :math:`k_1 = \log \pi(a) - \log \pi_{ref}(a)`.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: the same under the reference, same shape.

    Returns:
        Same shape. Source: Schulman 2020, "Approximating KL divergence".
    """
    return log_probs - ref_log_probs


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r"""The non-negative, low-variance estimator :math:`k_3 = e^{-k_1} - 1 + k_1`.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: the same under the reference, same shape.

    Returns:
        Same shape, never negative. Source: Schulman 2020, "Approximating KL divergence".
    """
    difference = k1(log_probs, ref_log_probs)
    return torch.expm1(-difference) + difference


def kl_penalised_reward(rewards: torch.Tensor, kl: torch.Tensor, coeff: float) -> torch.Tensor:
    r"""Subtracts the KL of the whole trajectory from its return, before any baseline.

    .. math:: R_i = r_i - \beta \sum_t m_{it} \, (\log \pi(a_{it}) - \log \pi_{ref}(a_{it}))

    Equation 3 of Ahmadian et al. 2024 (arXiv 2402.14740).

    Args:
        rewards: ``[B]``.
        kl: ``[B, A]``, k1 at each action token, 0 elsewhere.
        coeff: :math:`\beta`.

    Returns:
        ``[B]``. No gradient flows through the penalty.
    """
    return rewards - coeff * kl.detach().sum(-1)
