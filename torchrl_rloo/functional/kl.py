"""Estimators of the Kullback-Leibler divergence on sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchrl_rloo.functional.ratios import MAX_LOG_RATIO, exp_log_ratio

LEAST_LOG_PROB = -1e4  # its probability is 0 in float64
KLEstimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio ``log pi(a) - log pi_ref(a)``: unbiased, of either sign.

    Schulman 2020, "Approximating KL divergence".

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: log-probs under the reference, same shape.

    Returns:
        Same shape.
    """
    return log_probs - ref_log_probs


def k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Return half the squared log-ratio, ``k1^2 / 2``: biased, of low variance, never negative.

    Schulman 2020, "Approximating KL divergence".

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: log-probs under the reference, same shape.

    Returns:
        Same shape.
    """
    return 0.5 * k1(log_probs, ref_log_probs).square()


def k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Return ``exp(-k1) - 1 + k1``: unbiased, of low variance, never negative.

    Schulman 2020, "Approximating KL divergence". The exponential is linear beyond ``exp(MAX_LOG_RATIO)``.

    Args:
        log_probs: log-probs of the sampled tokens under the policy that sampled them, in nats, any shape.
        ref_log_probs: log-probs under the reference, same shape.

    Returns:
        Same shape.
    """
    x = ref_log_probs - log_probs
    beyond = math.exp(MAX_LOG_RATIO) * (x - MAX_LOG_RATIO).relu()
    return torch.expm1(x.clamp(max=MAX_LOG_RATIO)) + beyond - x


def generalized_jsd(log_probs: torch.Tensor, teacher_log_probs: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of whole distributions, in nats.

    Equation 1 of Agarwal et al. 2024 (arXiv 2306.13649), of student ``q`` and teacher ``p``::

        D = beta KL(p || m) + (1 - beta) KL(q || m),    m = beta p + (1 - beta) q

    ``beta=0`` is the forward ``KL(p || q)`` and ``beta=1`` the reverse ``KL(q || p)``, as in TRL: both are limits of
    ``D`` divided by ``beta`` and ``1 - beta``.

    Shapes: ``log_probs [N, V]``, ``teacher_log_probs [N, V]`` to ``[N]``.
    """
    # An excluded token has probability 0 in both, where 0 * -inf would be NaN
    q, p = log_probs.clamp(min=LEAST_LOG_PROB), teacher_log_probs.clamp(min=LEAST_LOG_PROB)
    if beta in (0, 1):
        first, second = (p, q) if beta == 0 else (q, p)
        return (first.exp() * (first - second)).sum(-1)
    mixture = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    return (beta * p.exp() * (p - mixture) + (1 - beta) * q.exp() * (q - mixture)).sum(-1)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


def kl_penalized_reward(rewards: torch.Tensor, kl: torch.Tensor, coeff: float) -> torch.Tensor:
    """Subtract the KL of the whole trajectory from its return, before any baseline.

    Equation 3 of Ahmadian et al. 2024 (arXiv 2402.14740)::

        R_i = r_i - coeff * sum_t m_it (log pi(a_it) - log pi_ref(a_it))

    Shapes: ``rewards [B]``, ``kl [B, A]`` to ``[B]``.
    """
    return rewards - coeff * kl.detach().sum(-1)


def kl_loss_terms(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: str | KLEstimator = "k3",
    log_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the KL at each token, as a term of the loss.

    Without ``log_ratio`` the term is the estimator ``k(pi, pi_ref)``. Its gradient on samples of the policy itself
    depends on the estimator (Liu et al. 2025, arXiv 2510.01555):

    - ``"k1"``: the gradient is 0 on average;
    - ``"k2"``: the gradient is that of the reverse KL;
    - ``"k3"``: the gradient is that of the forward KL, as in GRPO (arXiv 2402.03300).

    With ``log_ratio`` the importance ratio weights the term. Its mean over samples of the old policy ``mu`` then has
    the gradient of the reverse KL for every estimator::

        E_{a ~ mu} grad [pi(a) / mu(a) * k(pi, pi_ref)] = grad sum_a pi(a) log(pi(a) / pi_ref(a))

    For k3 this is the unbiased estimate of DeepSeek-V3.2 (arXiv 2512.02556, equation 7). The gradient passes through
    the ratio for k1, k3 and functions. For k2 the ratio is a constant, because the gradient of k2 is already that of a
    score function.
    """
    function = KL_ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
    terms = function(log_probs, ref_log_probs)
    if log_ratio is None:
        return terms
    return terms * exp_log_ratio(log_ratio.detach() if function is k2 else log_ratio)


def adapt_coefficient(coeff: float, kl: float, target: tuple[float, float], gain: float) -> float:
    """Return the KL coefficient after one step of a proportional controller towards a window ``(low, high)``.

    Section 2.2 of Ziegler et al. 2019 (arXiv 1909.08593), where both bounds are the target; nothing changes inside::

        coeff' = coeff * (1 + gain * clip(kl / bound - 1, -0.2, 0.2))
    """
    error = kl / min(max(kl, target[0]), target[1]) - 1
    return coeff * (1 + gain * min(max(error, -0.2), 0.2))
