"""Preference-learning objectives on pairs of completions or on single labeled completions, also of reward models.

All objectives take values of whole completions, in nats. Those with ``reference`` take the *log-ratio*
``h = log pi(y|x) - log pi_ref(y|x)`` of completion ``y`` after prompt ``x``. The others take the log-prob itself.
``mean`` averages the token log-probs of a completion instead of summing them. Paired objectives are called with
``chosen`` and ``rejected``, ``[P]`` each, and return one loss per pair. In the equations ``w`` marks the chosen
completion and ``l`` the rejected one.

Objectives of reward models take rewards, scores without a unit. In the Bradley-Terry model (Bradley and Terry 1952,
"Rank analysis of incomplete block designs") their difference is the log-odds that the first completion is better:
``P = sigmoid(r_w - r_l)``. ``chosen`` (``r_w``) and ``rejected`` (``r_l``) are ``[P]``, one entry per pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from torchrl_rloo.runtime.lookup import Choice, number_field

_NODES = 64  # of quadrature


class PreferenceObjective(Choice):
    """Base class of the objectives.

    Attributes:
        reference: True if it takes log-ratios to a reference, False if it takes log-probs.
        mean: True averages the token log-probs of a completion, False sums them.
        paired: True if its rows are pairs of completions, False if they are single labeled completions.
    """

    reference: ClassVar[bool] = True
    mean: ClassVar[bool] = False
    paired: ClassVar[bool] = True


@dataclass(frozen=True)
class DPO(PreferenceObjective):
    """Direct preference optimization, from *summed* log-ratios.

    Equation 7 of Rafailov et al. 2023 (arXiv 2305.18290), with ``eps`` the label smoothing::

        L = -(1 - eps) * log sigmoid(beta * (h_w - h_l)) - eps * log sigmoid(-beta * (h_w - h_l))

    Args:
        beta: strength of the pull towards the reference.
        label_smoothing: assumed share of swapped labels, in [0, 0.5): conservative DPO (Mitchell 2023, "A note on DPO
            with noisy preferences"). 0 is the DPO of the paper.
    """

    beta: float = number_field(0.1, above=True)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"{type(self).__name__}: label_smoothing={self.label_smoothing} must be in [0, 0.5)")

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss ``[P]`` of each pair from its log-ratios ``[P]``."""
        margin, eps = self.beta * (chosen - rejected), self.label_smoothing
        return -(1 - eps) * logsigmoid(margin) - eps * logsigmoid(-margin)


@dataclass(frozen=True)
class DPONorm(DPO):
    """Length-normalized DPO: that of *mean* log-ratios, so that long completions weigh no more than short ones.

    Section 5.1 of Lambert et al. 2024 (Tulu 3, arXiv 2411.15124), with their ``beta=5``, which is per token.
    """

    beta: float = number_field(5.0, above=True)
    mean: ClassVar[bool] = True


@dataclass(frozen=True)
class IPO(PreferenceObjective):
    """Identity preference optimization, from *mean* log-ratios.

    Equation 17 of Azar et al. 2023 (arXiv 2310.12036)::

        L = (h_w - h_l - 1 / (2 * beta))^2

    The paper uses summed log-ratios. Implementations, including the authors', average over tokens, because the longest
    completions would dominate a squared sum.

    Args:
        beta: strength of the regularization (``tau`` in the paper). The target margin is ``1 / (2 * beta)`` nats per
            token.
    """

    beta: float = number_field(0.1, above=True)
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss ``[P]`` of each pair from its log-ratios per token ``[P]``."""
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class ORPO(PreferenceObjective):
    """Odds-ratio preference optimization, from *mean* log-probs.

    Equation 6 of Hong et al. 2024 (arXiv 2403.07691), with ``logp`` the log-probs per token::

        L = -logp_w - alpha * log sigmoid(log(odds_w / odds_l)),    odds = exp(logp) / (1 - exp(logp))

    The first term is that of supervised fine-tuning on the chosen completions.
    """

    alpha: float = number_field(0.1)  # weight of the odds ratio (lambda in the paper)
    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss ``[P]`` of each pair from its log-probs per token ``[P]``."""
        return -chosen - self.alpha * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


@dataclass(frozen=True)
class SimPO(PreferenceObjective):
    """Simple preference optimization, from *mean* log-probs.

    Equation 6 of Meng et al. 2024 (arXiv 2405.14734), with ``logp`` the log-probs per token::

        L = -log sigmoid(beta * (logp_w - logp_l) - gamma) - cpo_alpha * logp_w

    The last term is that of supervised fine-tuning on the chosen completions and gives CPO-SimPO. The defaults are the
    paper's; those of TRL and Axolotl are ``beta=0.1, gamma=0.5, cpo_alpha=1.0``.
    """

    beta: float = number_field(2.0, above=True)  # scale of the rewards
    gamma: float = number_field(1.0)  # target margin of the rewards
    cpo_alpha: float = number_field(0.0)  # weight of the supervised term. 0 disables it
    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss ``[P]`` of each pair from its log-probs per token ``[P]``."""
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma) - self.cpo_alpha * chosen


@dataclass(frozen=True)
class KTO(PreferenceObjective):
    """Kahneman-Tversky optimization, from *summed* log-ratios of single completions.

    Section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306), with ``z_0`` from :func:`kto_reference_point`::

        L = desirable_weight * (1 - sigmoid(beta * (h - z_0)))    if desirable
        L = undesirable_weight * (1 - sigmoid(beta * (z_0 - h)))  otherwise
    """

    beta: float = number_field(0.1, above=True)  # rate at which gains and losses saturate
    desirable_weight: float = number_field(1.0)  # weight of desirable completions
    undesirable_weight: float = number_field(1.0)  # weight of undesirable completions
    paired: ClassVar[bool] = False

    def __call__(
        self, log_ratios: torch.Tensor, desirable: torch.Tensor, reference_point: torch.Tensor | float
    ) -> torch.Tensor:
        """Return the loss of each completion.

        Shapes: ``log_ratios [B]``, ``desirable [B]`` to ``[B]``.
        """
        gain = self.beta * (log_ratios - reference_point)
        good, bad = self.desirable_weight * (1 - gain.sigmoid()), self.undesirable_weight * (1 - (-gain).sigmoid())
        return torch.where(desirable, good, bad)


PREFERENCE_OBJECTIVES: dict[str, type] = {
    "dpo": DPO,
    "dpo_norm": DPONorm,
    "ipo": IPO,
    "orpo": ORPO,
    "simpo": SimPO,
    "kto": KTO,
}


def kto_reference_point(mismatched: torch.Tensor) -> torch.Tensor:
    """Estimate KTO's divergence from the reference: ``z_0 = max(0, mean_i h(x_i, y_j))``.

    Section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306).

    Shapes: ``mismatched [m]``.
    """
    return mismatched.detach().mean().clamp(min=0)


def _log_odds(log_probs: torch.Tensor) -> torch.Tensor:
    """Return ``log(p / (1 - p))`` for ``p = exp(log_probs)``, with ``p`` kept below 1, where the odds are infinite."""
    log_probs = log_probs.clamp(max=-1e-6)
    return log_probs - torch.log(-torch.expm1(log_probs))


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | float = 0.0,
    *,
    variance: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return the negative log-likelihood of the labels, with margins.

    Equation 2 of Llama 2 (arXiv 2307.09288), with ``eps`` the label smoothing::

        L = -(1 - eps) * log sigmoid(r_w - r_l - margin) - eps * log sigmoid(r_l - r_w - margin)

    If rewards are Gaussian, ``r_w`` and ``r_l`` are their means, ``variance`` is the sum of their variances, and
    :func:`log_mean_sigmoid` takes the place of ``log sigmoid``: equation 4 of PURM (arXiv 2503.22480).

    Shapes: ``chosen [P]``, ``rejected [P]``, ``margin [P]``, ``variance [P]`` to ``[P]``.
    """
    difference = chosen - rejected
    log_odds = logsigmoid if variance is None else partial(log_mean_sigmoid, variance=variance)
    return -(1 - label_smoothing) * log_odds(difference - margin) - label_smoothing * log_odds(-difference - margin)


def log_mean_sigmoid(mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    """Return ``log E[sigmoid(z)]`` of ``z ~ N(mean, variance)`` by Gauss-Hermite quadrature, ``[P]``."""
    # Nodes and weights from the Jacobi matrix of Hermite polynomials (Golub and Welsch 1969)
    off = torch.arange(1, _NODES, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    nodes, log_weights = nodes.to(mean), vectors[0].square().log().to(mean)
    return (logsigmoid(mean[:, None] + variance.sqrt()[:, None] * nodes) + log_weights).logsumexp(-1)


def centering(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return the squared sum of a pair's rewards, ``(r_w + r_l)^2`` (Eisenstein et al. 2023, arXiv 2312.09244).

    The likelihood does not change if a constant is added to all rewards of a prompt. This term fixes that constant.

    Shapes: ``chosen [P]``, ``rejected [P]`` to ``[P]``.
    """
    return (chosen + rejected).square()


def batch_sum_to_zero(part: torch.Tensor, mean: torch.Tensor | float) -> torch.Tensor:
    """Return a part's share of batch-wise sum-to-zero regularization, the squared mean of all rewards of a batch.

    Hong et al. 2025 (arXiv 2505.07271), against rewards of extreme size::

        L = (1 / (2 P) * sum_i (r_w_i + r_l_i))^2

    The mean is squared, not the sum, as in the authors' code. Their code also multiplies by the number of pairs ``P``,
    so a coefficient ``c`` there is ``c * P`` here.

    The squared mean is not a sum over micro-batches. With the mean ``mu`` of the whole batch known,
    ``2 * mu * part - mu * part.detach()`` is: over all parts the values add up to ``mu^2``, the gradients to
    ``2 * mu * grad mu``.
    """
    mean = torch.as_tensor(mean, dtype=part.dtype, device=part.device).detach()
    return mean * (2 * part - part.detach())
