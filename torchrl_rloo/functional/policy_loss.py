"""Surrogates: losses of tokens or sequences, given ratios and advantages; and their aggregation to a scalar.

A surrogate is called with ``(log_ratio [B, 1 or A], advantages [B, 1 or A], log_probs [B, A], old_log_probs [B, A])``.
It returns losses ``[B, A]``, or ``[B, 1]`` if ratio and advantage are of whole sequences.
:func:`~torchrl_rloo.functional.ratios.split_among_tokens` divides the latter among the tokens. The method ``clipped``
takes the same arguments and returns a bool mask, True where the surrogate removes the gradient. A plain function is
also accepted; it has no clip fraction. A surrogate whose ``wants_mask`` is True is also called with ``mask [B, A]``.

In the equations ``rho`` is the ratio and ``A`` the advantage. At ``rho = 1`` every surrogate but :class:`Shaping` has
the gradient of REINFORCE, ``-A * grad log pi``.

An aggregation is called with ``(values [B, A], mask [B, A], num_rows, num_tokens)``. The caller passes the two
normalizers, so the gradient of a step does not depend on micro-batches, ranks, padding or packing. In its equations
``l_it`` is the loss of token ``t`` in row ``i`` and ``m_it`` its mask. Row ``i`` has ``L_i`` tokens, and ``N`` is
``num_rows``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from torchrl_rloo.functional.ratios import MAX_LOG_RATIO, exp_log_ratio
from torchrl_rloo.runtime.lookup import Choice, number_field, resolve

Surrogate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _UnmaskedSurrogate(Choice):
    """Base class of surrogates that scale gradients but never mask one."""

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return False everywhere."""
        return torch.zeros_like(log_ratio * advantages, dtype=torch.bool)


@dataclass(frozen=True)
class Clip(Choice):
    """PPO's clipped objective, with separate bounds below and above 1.

    Equation 7 of Schulman et al. 2017 (arXiv 1707.06347), with two bounds as in equation 10 of DAPO
    (arXiv 2503.14476)::

        -min(rho * A, clip(rho, 1 - low, 1 + high) * A)

    With ``dual`` the objective of a negative advantage is at least ``dual * A``, which bounds the effect of a huge
    ratio (equation 5 of Ye et al. 2020, arXiv 1912.09729).

    Args:
        low: distance of the lower bound from 1, in (0, 1].
        high: distance of the upper bound from 1, above 0. None takes ``low``.
        dual: bound of the ratio for negative advantages, above 1. None disables it.

    Example:
        >>> log_ratio, advantages = torch.tensor([[0.5, 0.1]]), torch.ones(1, 1)
        >>> Clip(0.2)(log_ratio, advantages, log_ratio, torch.zeros(1, 2))
        tensor([[-1.2000, -1.1052]])
        >>> Clip(0.2).clipped(log_ratio, advantages, log_ratio, torch.zeros(1, 2))
        tensor([[ True, False]])
    """

    low: float = number_field(0.2, above=True, high=1)
    high: float | None = number_field(None, above=True)
    dual: float | None = number_field(None, low=1, above=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.high is None:
            object.__setattr__(self, "high", self.low)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        ratio = exp_log_ratio(log_ratio)
        bounded = ratio.clamp(1 - self.low, 1 + self.high)
        objective = torch.minimum(ratio * advantages, bounded * advantages)
        if self.dual is not None:
            objective = torch.where(advantages < 0, torch.maximum(objective, self.dual * advantages), objective)
        return -objective

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return True where the ratio is beyond the bound on the advantage's side, or above ``dual`` if ``A < 0``."""
        ratio = exp_log_ratio(log_ratio)
        bad = ratio < 1 - self.low if self.dual is None else (ratio < 1 - self.low) | (ratio > self.dual)
        return torch.where(advantages < 0, bad, (ratio > 1 + self.high) & (advantages > 0))


@dataclass(frozen=True)
class Unclipped(_UnmaskedSurrogate):
    """Importance sampling without a bound: ``-rho * A``."""

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        return -exp_log_ratio(log_ratio) * advantages


@dataclass(frozen=True)
class CISPO(_UnmaskedSurrogate):
    """REINFORCE with a clipped importance weight, so every token keeps its gradient.

    Equation 4 of the MiniMax-M1 report (arXiv 2506.13585), where ``sg`` stops the gradient::

        -sg(clip(rho, 1 - low, 1 + high)) * A * log pi(a_t)

    The lower bound is off by default, as in the report.

    Args:
        low: distance of the lower bound from 1, in (0, 1].
        high: distance of the upper bound from 1, above 0.
    """

    low: float = number_field(1.0, above=True, high=1)
    high: float = number_field(4.0, above=True)

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        weight = exp_log_ratio(log_ratio.detach()).clamp(1 - self.low, 1 + self.high)
        return -weight * advantages * log_probs


@dataclass(frozen=True)
class SAPO(_UnmaskedSurrogate):
    """Soft clip: the gradient decays as the ratio leaves 1, faster for negative advantages.

    SAPO (arXiv 2511.20347)::

        -4 / tau * sigmoid(tau * (rho - 1)) * A,    tau = tau_positive if A > 0 else tau_negative
    """

    tau_positive: float = number_field(1.0, above=True)  # steepness for positive advantages
    tau_negative: float = number_field(1.05, above=True)  # steepness for the other advantages

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        tau = _select_by_sign(advantages, advantages > 0, self.tau_positive, self.tau_negative)
        return -torch.sigmoid(tau * (exp_log_ratio(log_ratio) - 1)) * 4 / tau * advantages


@dataclass(frozen=True)
class DPPO(Choice):
    """Trust region in probability: rare tokens may change by large factors, common tokens may not.

    DPPO with a divergence ``D`` of the two probabilities ``p`` (old) and ``q`` of the token (arXiv 2602.04879)::

        -M * rho * A,    M = 0 if D > delta and (rho - 1) * A > 0 else 1
        D = |p - q| (total variation), or p log(p / q) + (1 - p) log((1 - p) / (1 - q)) (KL)

    The bound applies to tokens, so use it with ``ratio="token"``.
    """

    delta: float = number_field(0.15, above=True, high=1)  # largest divergence
    divergence: Literal["tv", "kl"] = "tv"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.divergence not in ("tv", "kl"):
            raise ValueError(f"DPPO: divergence={self.divergence!r} must be 'tv' or 'kl'")

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        outside = self.clipped(log_ratio, advantages, log_probs, old_log_probs)
        return -torch.where(outside, 0.0, exp_log_ratio(log_ratio) * advantages)

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return True where the divergence is above ``delta`` and the change is in the advantage's direction."""
        new, old = log_probs.detach().exp(), old_log_probs.exp()
        divergence = (new - old).abs()
        if self.divergence == "kl":
            rest = [(1 - p).clamp(min=torch.finfo(p.dtype).eps).log() for p in (old, new)]
            divergence = old * (old_log_probs - log_probs.detach()) + (1 - old) * (rest[0] - rest[1])
        return (divergence > self.delta) & ((new - old) * advantages > 0)


@dataclass(frozen=True)
class VESPO(_UnmaskedSurrogate):
    """REINFORCE with a soft weight that falls to 0 on both sides of a ratio near 1.

    VESPO (arXiv 2602.10693), meant for ratios of whole sequences; ``sg`` stops the gradient::

        -sg(rho^k * exp(lambda * (1 - rho))) * A * log pi(a_t)
    """

    k_positive: float = number_field(2.0)  # k for advantages of at least 0
    k_negative: float = number_field(3.0)  # k for negative advantages
    lambda_positive: float = number_field(3.0)  # lambda for advantages of at least 0
    lambda_negative: float = number_field(2.0)  # lambda for negative advantages

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        log_weight = log_ratio.detach().clamp(math.log(1e-8), MAX_LOG_RATIO)
        k = _select_by_sign(advantages, advantages >= 0, self.k_positive, self.k_negative)
        rate = _select_by_sign(advantages, advantages >= 0, self.lambda_positive, self.lambda_negative)
        return -(rate + k * log_weight - rate * log_weight.exp()).exp() * advantages * log_probs


@dataclass(frozen=True)
class GMPO(Choice):
    """Geometric mean of the sequence's token ratios, each clipped in log space on the side of its advantage.

    GMPO, Zhao et al. 2025 (arXiv 2507.20673), with ``c_t = log rho_t`` clipped to at most ``high`` if ``A > 0``
    and to at least ``-low`` if ``A < 0``::

        -exp(1/L sum_t c_t) * A

    Each token has this value and the gradient of ``c_t``; ``aggregation="sequence_mean"`` makes it that of GMPO.
    """

    low: float = number_field(0.4, above=True)  # largest decrease of a token's log-prob, in nats
    high: float | None = number_field(None, above=True)  # largest increase; None takes low
    wants_mask: ClassVar[bool] = True

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs, mask=None) -> torch.Tensor:
        high = self.low if self.high is None else self.high
        clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-self.low))
        mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
        mean = torch.where(mask, clipped.detach(), 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        return -exp_log_ratio(mean) * (1 + clipped - clipped.detach()) * advantages

    def clipped(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        """Return True where the log-ratio is beyond the bound on the advantage's side."""
        high = self.low if self.high is None else self.high
        return torch.where(advantages < 0, log_ratio < -self.low, (log_ratio > high) & (advantages > 0))


@dataclass(frozen=True)
class DRO(_UnmaskedSurrogate):
    """Direct reward optimization: REINFORCE with a quadratic penalty of the log-ratio.

    The square ``1/2 (A - beta log rho)^2`` of Richemond et al. 2024 (arXiv 2405.19107), divided by ``beta`` and without
    its constant. ``A`` is the reward minus the value of the prompt, ``rho`` the ratio of the sequence (in verl of the
    token)::

        -(A * log rho - beta / 2 * (log rho)^2)
    """

    beta: float = number_field(0.05, above=True)  # strength of the penalty

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        return self.beta / 2 * log_ratio.square() - log_ratio * advantages


@dataclass(frozen=True)
class Shaping(_UnmaskedSurrogate):
    """Policy shaping: a concave function of the ratio, whose gradient is largest for improbable tokens.

    LUFFY (Yan et al. 2025, arXiv 2504.14945), where the ratio to demonstrations is ``pi(a_t)``::

        -rho / (rho + gamma) * A
    """

    gamma: float = number_field(0.1, above=True)  # ratio at which the objective is half of its limit

    def __call__(self, log_ratio, advantages, log_probs, old_log_probs) -> torch.Tensor:
        return -torch.sigmoid(log_ratio - math.log(self.gamma)) * advantages


def _select_by_sign(like: torch.Tensor, condition: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """Return ``positive`` where the condition holds, else ``negative``, in the dtype of ``like``."""
    return torch.where(condition, like.new_tensor(positive), like.new_tensor(negative))


SURROGATES: dict[str, type] = {
    "clip": Clip,
    "unclipped": Unclipped,
    "cispo": CISPO,
    "sapo": SAPO,
    "dppo": DPPO,
    "vespo": VESPO,
    "gmpo": GMPO,
    "dro": DRO,
    "shaping": Shaping,
}


Aggregation = Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]


def sequence_sum(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Sum over tokens, average over rows: ``1/N sum_i sum_t m_it l_it`` (RLOO, arXiv 2402.14740)."""
    return torch.where(mask, values, 0.0).sum() / num_rows


def sequence_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Average over tokens, then over rows: ``1/N sum_i 1/L_i sum_t m_it l_it`` (GRPO, arXiv 2402.03300)."""
    sums = torch.where(mask, values, 0.0).sum(-1)
    return (sums / mask.sum(-1).clamp(min=1)).sum() / num_rows


def token_mean(values, mask, num_rows, num_tokens) -> torch.Tensor:
    """Average over all tokens: ``1/num_tokens sum_i sum_t m_it l_it`` (DAPO, arXiv 2503.14476)."""
    return torch.where(mask, values, 0.0).sum() / num_tokens


@dataclass(frozen=True)
class ConstantLength(Choice):
    """Division by a fixed length ``C``: ``1/(N C) sum_i sum_t m_it l_it`` (Dr. GRPO, arXiv 2503.20783)."""

    length: float = number_field(above=True)  # C in tokens, e.g. max_new_tokens

    def __call__(self, values, mask, num_rows, num_tokens) -> torch.Tensor:
        return torch.where(mask, values, 0.0).sum() / (num_rows * self.length)


AGGREGATIONS: dict[str, Aggregation | type] = {
    "sequence_sum": sequence_sum,
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
    "constant": ConstantLength,
}


def aggregate(
    values: torch.Tensor,
    mask: torch.Tensor,
    mode: str | Aggregation,
    *,
    num_rows: float | None = None,
    num_tokens: float | None = None,
) -> torch.Tensor:
    """Reduce per-token losses to a scalar.

    Shapes: ``values [B, A]``, ``mask [B, A]``.
    """
    num_rows = len(values) if num_rows is None else num_rows
    num_tokens = int(mask.sum()) if num_tokens is None else num_tokens
    return resolve("aggregation", mode, AGGREGATIONS)(values, mask, max(num_rows, 1e-12), max(num_tokens, 1e-12))
