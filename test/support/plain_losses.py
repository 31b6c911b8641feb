"""Formulas of the papers for one token or one sequence, on scalars: a surrogate, a correction, a KL estimate."""

from __future__ import annotations

import math

import torch


def logistic(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def smaller(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a if a.item() <= b.item() else b


def plain_surrogate(name, rho, advantage, log_prob, old, *, low=None, high=None, dual=None, **chosen) -> torch.Tensor:
    """Compute the loss of one token (or one sequence) from the papers' equations; all are scalars with gradient."""
    if name == "clip":
        low = 0.2 if low is None else low
        high = low if high is None else high
        inside = rho if 1 - low <= rho.item() <= 1 + high else rho.new_tensor(1 - low if rho.item() < 1 else 1 + high)
        objective = smaller(rho * advantage, inside * advantage)
        if dual is not None and advantage < 0 and objective.item() < dual * advantage:
            objective = rho.new_tensor(dual * advantage)
        return -objective
    if name == "unclipped":
        return -rho * advantage
    if name == "cispo":
        low, high = 1.0 if low is None else low, 4.0 if high is None else high
        return -min(max(rho.item(), 1 - low), 1 + high) * advantage * log_prob
    if name == "sapo":
        tau = chosen.get("tau_positive", 1.0) if advantage > 0 else chosen.get("tau_negative", 1.05)
        return -4 / tau * logistic(tau * (rho - 1)) * advantage
    if name == "dppo":
        p, q = math.exp(old), math.exp(log_prob.item())
        divergence = abs(p - q)
        if chosen.get("divergence") == "kl":
            divergence = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
        shifted = divergence > chosen.get("delta", 0.15)
        return -rho * advantage * (0 if shifted and (rho.item() - 1) * advantage > 0 else 1)
    if name == "dro":
        beta = chosen.get("beta", 0.05)
        return ((advantage - beta * rho.log()) ** 2 - advantage**2) / (2 * beta)
    if name == "shaping":
        return -rho / (rho + chosen.get("gamma", 0.1)) * advantage
    assert name == "vespo"
    default_k, default_lambda, sign = (2.0, 3.0, "positive") if advantage >= 0 else (3.0, 2.0, "negative")
    k, lambda_ = chosen.get(f"k_{sign}", default_k), chosen.get(f"lambda_{sign}", default_lambda)
    return -(rho.item() ** k) * math.exp(lambda_ * (1 - rho.item())) * advantage * log_prob


def plain_weight(name, log_weights: list[float], t: int, *, low=None, high=None, token_high=2.0) -> float:
    token, product = math.exp(log_weights[t]), math.exp(sum(log_weights))
    if name == "tis":
        return max(min(token, 2.0 if high is None else high), low or 0.0)
    if name == "icepop":
        return token if (0.5 if low is None else low) <= token <= (5.0 if high is None else high) else 0.0
    if name == "sequence_truncate":
        return max(min(product, 2.0 if high is None else high), low or 0.0)
    if name == "sequence_mask":
        return product if (0.0 if low is None else low) <= product <= (2.0 if high is None else high) else 0.0
    assert name == "seq_mask_tis"
    mean = math.exp(sum(log_weights) / len(log_weights))
    inside = (0.99 if low is None else low) <= mean <= (1.01 if high is None else high)
    return min(token, token_high) if inside else 0.0


def plain_kl(estimator: str, log_prob: torch.Tensor, other: float, sampler: float | None) -> torch.Tensor:
    """Compute the KL of one token; ``sampler`` is the denominator of the importance weight, if given."""
    gap = log_prob - other
    value = {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[estimator]
    if sampler is None:
        return value
    weight = (log_prob - sampler).exp()
    return (weight.detach() if estimator == "k2" else weight) * value
