"""Estimators of the Kullback-Leibler divergence from sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchrl_rloo.functional.ratios import MAX_LOG_RATIO, ratio_of

KLEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r"""Return the plain log-ratio, unbiased and signed: :math:`k_1 = \log \pi(a) - \log \pi_{ref}(a)`.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: the same under the reference, same shape.

    Returns:
        Same shape. Source: Schulman 2020, "Approximating KL divergence".
    """
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r"""Return half the squared log-ratio: :math:`k_2 = k_1^2 / 2`; biased, low-variance and never negative.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: the same under the reference, same shape.

    Returns:
        Same shape, never negative. Source: Schulman 2020, "Approximating KL divergence".
    """
    return 0.5 * k1(log_probs, ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    r"""Return the non-negative, low-variance estimator :math:`k_3 = e^{-k_1} - 1 + k_1`.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: the same under the reference, same shape.

    Returns:
        Same shape, never negative. The exponential goes on as a straight line beyond ``exp(MAX_LOG_RATIO)``. Source:
        Schulman 2020, "Approximating KL divergence".
    """
    x = ref_log_probs - log_probs
    beyond = math.exp(MAX_LOG_RATIO) * (x - MAX_LOG_RATIO).relu()
    return torch.expm1(x.clamp(max=MAX_LOG_RATIO)) + beyond - x


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalized_reward(rewards: torch.Tensor, kl: torch.Tensor, coeff: float) -> torch.Tensor:
    r"""Subtract the KL of the whole trajectory from its return, before any baseline.

    .. math:: R_i = r_i - \beta \sum_t m_{it} \, (\log \pi(a_{it}) - \log \pi_{ref}(a_{it}))

    Equation 3 of Ahmadian et al. 2024 (arXiv 2402.14740).

    Args:
        rewards: ``[B]``.
        kl: ``[B, A]``, an estimate at each action token (k1 in the paper), 0 elsewhere.
        coeff: :math:`\beta`.

    Returns:
        ``[B]``. No gradient flows through the penalty.
    """
    return rewards - coeff * kl.detach().sum(-1)


def kl_loss_terms(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: str | KLEstimator = "k3",
    log_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""Compute the KL at each token, as a term of the loss.

    Without ``log_ratio`` it is the estimator alone, :math:`k(\pi, \pi_{ref})`. Its gradient on samples of the policy
    itself differs in meaning from its value: that of k1 is 0 on average, that of k3 belongs to the forward KL (so it is
    in GRPO, arXiv 2402.03300), and only that of k2 is the reverse KL's (Liu et al. 2025, arXiv 2510.01555).

    With ``log_ratio`` it is weighted by the importance ratio, and its mean over samples of the old policy :math:`\mu`
    has the gradient of the reverse KL, whichever the estimator:

    .. math:: E_{a \sim \mu} \nabla \left[ \frac{\pi(a)}{\mu(a)} \, k(\pi, \pi_{ref}) \right]
        = \nabla \sum_a \pi(a) \log \frac{\pi(a)}{\pi_{ref}(a)}

    For k3 this is DeepSeek-V3.2's unbiased estimate (arXiv 2512.02556, equation 7). The gradient passes through the
    ratio for k1, k3 and functions; for k2, whose gradient is a score function's as it stands, the ratio is a constant.

    Args:
        log_probs: ``[B, A]`` in nats under the current weights; carries the gradient.
        ref_log_probs: ``[B, A]`` under the reference, in nats.
        estimator: a name in :data:`KL_ESTIMATORS`, or a function of the two.
        log_ratio: ``[B, A]``, log-prob under the current weights less that under those that sampled, with its gradient;
            None for no weights.

    Returns:
        ``[B, A]``, 0 where both log-probs are.

    Example:
        >>> kl_loss_terms(torch.tensor([[-1.0, 0.0]]), torch.tensor([[-2.0, 0.0]]), "k2")
        tensor([[0.5000, 0.0000]])
    """
    function = KL_ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
    terms = function(log_probs, ref_log_probs)
    if log_ratio is None:
        return terms
    return terms * ratio_of(log_ratio.detach() if function is k2 else log_ratio)


def adapted_coefficient(coeff: float, kl: float, target: float, gain: float) -> float:
    r"""Return the KL coefficient after one step of a proportional controller.

    .. math:: \beta' = \beta \, (1 + K e), \quad
        e = \mathrm{clip}\left( \frac{KL}{KL_{target}} - 1, \; -0.2, \; 0.2 \right)

    Section 2.2 of Ziegler et al. 2019 (arXiv 1909.08593).

    Args:
        coeff: :math:`\beta`.
        kl: the KL that was measured, in the unit of ``target``.
        target: the KL to hold, above 0.
        gain: :math:`K`, samples of the step over the horizon of the controller; 0.1 in the paper. Below 5.

    Returns:
        :math:`\beta'`.
    """
    return coeff * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
