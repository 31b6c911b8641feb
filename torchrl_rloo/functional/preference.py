r"""Objectives of preference learning: which of two completions is better, or whether one is good.

All take values of whole completions: the log-prob of completion ``y`` after prompt ``x``, in nats. Those with a
``reference`` take the *log-ratio* to it, :math:`h(x, y) = \log \pi_\theta(y|x) - \log \pi_{ref}(y|x)`; those without
take the log-prob itself. ``mean`` says whether a completion's token log-probs are averaged rather than summed. Paired
objectives are called with ``chosen`` and ``rejected``, ``[P]`` each, and return one loss per pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from torchrl_rloo.functional.choices import Choice, number


class PreferenceObjective(Choice):
    """Base of the objectives.

    Attributes:
        reference: whether it takes log-ratios to a reference rather than log-probs.
        mean: whether a completion's token log-probs are averaged rather than summed.
        paired: whether its rows are pairs of completions rather than single, labelled ones.
    """

    reference: ClassVar[bool] = True
    mean: ClassVar[bool] = False
    paired: ClassVar[bool] = True


@dataclass(frozen=True)
class DPO(PreferenceObjective):
    r"""Direct preference optimization, equation 7 of Rafailov et al. 2023 (arXiv 2305.18290), from *sums*.

    .. math:: L = -(1 - \epsilon) \log \sigma(\beta (h_w - h_l)) - \epsilon \log \sigma(-\beta (h_w - h_l))

    Args:
        beta: strength of the pull towards the reference.
        label_smoothing: :math:`\epsilon`, assumed share of swapped labels: conservative DPO (Mitchell 2023, "A note on
            DPO with noisy preferences"); 0 is the paper's.
    """

    beta: float = number(0.1, above=True)
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"DPO: label_smoothing={self.label_smoothing} must be at least 0 and below 0.5")

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from its log-ratios :math:`h_w` and :math:`h_l`."""
        margin, eps = self.beta * (chosen - rejected), self.label_smoothing
        return -(1 - eps) * logsigmoid(margin) - eps * logsigmoid(-margin)


@dataclass(frozen=True)
class IPO(PreferenceObjective):
    r"""Identity preference optimization, equation 17 of Azar et al. 2023 (arXiv 2310.12036), from *means*.

    .. math:: L = (h_w - h_l - 1 / (2 \beta))^2

    The paper writes whole log-ratios. In practice, its authors' included, they are averaged over the completion's
    tokens: the longest completions would dominate a square of sums.

    Args:
        beta: the paper's :math:`\tau`; the target margin is :math:`1 / (2 \beta)` nats per token.
    """

    beta: float = number(0.1, above=True)
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from its log-ratios per token."""
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@dataclass(frozen=True)
class ORPO(PreferenceObjective):
    r"""Odds-ratio preference optimization, equation 6 of Hong et al. 2024 (arXiv 2403.07691), from *means*.

    .. math:: L = -\ell_w - \lambda \log \sigma\left(\log \frac{odds_w}{odds_l}\right), \quad
        odds = \frac{e^\ell}{1 - e^\ell}

    The first term is that of supervised fine-tuning on the better completions.

    Args:
        alpha: the paper's :math:`\lambda`.
    """

    alpha: float = number(0.1)
    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        r"""Return the loss of each pair from its log-probs per token :math:`\ell_w` and :math:`\ell_l`."""
        return -chosen - self.alpha * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


@dataclass(frozen=True)
class SimPO(PreferenceObjective):
    r"""Simple preference optimization, equation 6 of Meng et al. 2024 (arXiv 2405.14734), from *means*.

    .. math:: L = -\log \sigma(\beta (\ell_w - \ell_l) - \gamma) - \alpha \ell_w

    The last term, of supervised fine-tuning on the better completions, makes it CPO-SimPO. Defaults are the paper's;
    TRL's and Axolotl's are ``beta=0.1, gamma=0.5, cpo_alpha=1.0``.

    Args:
        beta: scale of the rewards.
        gamma: target margin of the rewards.
        cpo_alpha: :math:`\alpha`.
    """

    beta: float = number(2.0, above=True)
    gamma: float = number(1.0)
    cpo_alpha: float = number(0.0)
    reference: ClassVar[bool] = False
    mean: ClassVar[bool] = True

    def __call__(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair from its log-probs per token."""
        return -logsigmoid(self.beta * (chosen - rejected) - self.gamma) - self.cpo_alpha * chosen


@dataclass(frozen=True)
class KTO(PreferenceObjective):
    r"""Kahneman-Tversky optimization, section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306), from *sums*.

    .. math:: L = \lambda_D (1 - \sigma(\beta (h - z_0))) \text{ if desirable, else }
        \lambda_U (1 - \sigma(\beta (z_0 - h)))

    Args:
        beta: rate at which gains and losses saturate.
        desirable_weight: :math:`\lambda_D`.
        undesirable_weight: :math:`\lambda_U`.
    """

    beta: float = number(0.1, above=True)
    desirable_weight: float = number(1.0)
    undesirable_weight: float = number(1.0)
    paired: ClassVar[bool] = False

    def __call__(
        self, log_ratios: torch.Tensor, desirable: torch.Tensor, reference_point: torch.Tensor | float
    ) -> torch.Tensor:
        """Return the loss of each completion.

        Args:
            log_ratios: ``[B]`` log-ratios :math:`h` of single completions.
            desirable: ``[B]`` bool.
            reference_point: scalar :math:`z_0`; see :func:`kto_reference_point`.
        """
        gain = self.beta * (log_ratios - reference_point)
        good, bad = self.desirable_weight * (1 - gain.sigmoid()), self.undesirable_weight * (1 - (-gain).sigmoid())
        return torch.where(desirable, good, bad)


PREFERENCE_OBJECTIVES: dict[str, type] = {"dpo": DPO, "ipo": IPO, "orpo": ORPO, "simpo": SimPO, "kto": KTO}


def kto_reference_point(mismatched: torch.Tensor) -> torch.Tensor:
    r"""Estimate KTO's divergence from the reference, :math:`z_0 = \max(0, \frac1m \sum_i h(x_i, y_j))`.

    Section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306).

    Args:
        mismatched: ``[m]`` log-ratios (sums) of completions after prompts that are not theirs.

    Returns:
        A scalar in nats, without gradient.
    """
    return mismatched.detach().mean().clamp(min=0)


def _log_odds(log_probs: torch.Tensor) -> torch.Tensor:
    """Return ``log(p / (1 - p))`` of ``p = exp(log_probs)``; ``p`` is kept from 1, where the odds are infinite."""
    log_probs = log_probs.clamp(max=-1e-6)
    return log_probs - torch.log(-torch.expm1(log_probs))
