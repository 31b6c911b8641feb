r"""Objectives of preference learning: which of two completions is better, or whether one is good.

All are functions of whole completions: of the log-prob of completion ``y`` after prompt ``x``, in nats. Those with a
reference take the *log-ratio* to it, :math:`h(x, y) = \log \pi_\theta(y|x) - \log \pi_{ref}(y|x)`; those without take
the log-prob itself. :data:`PREFERENCE_OBJECTIVES` says of each whether a completion's token log-probs are summed or
averaged. ``chosen`` and ``rejected`` are ``[P]``, one entry per pair; all return one loss to minimise per entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid


def dpo(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> torch.Tensor:
    r"""Direct preference optimisation, equation 7 of Rafailov et al. 2023 (arXiv 2305.18290), from *sums*.

    .. math:: L = -(1 - \epsilon) \log \sigma(\beta (h_w - h_l)) - \epsilon \log \sigma(-\beta (h_w - h_l))

    Args:
        chosen: ``[P]`` log-ratios :math:`h_w` of the better completions.
        rejected: ``[P]`` log-ratios :math:`h_l` of the worse ones.
        beta: strength of the pull towards the reference.
        label_smoothing: :math:`\epsilon`, the share of labels taken to be the wrong way round: conservative DPO
            (Mitchell 2023, "A note on DPO with noisy preferences"); 0 is the paper's.

    Returns:
        ``[P]``.
    """
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 0.1) -> torch.Tensor:
    r"""Identity preference optimisation, equation 17 of Azar et al. 2023 (arXiv 2310.12036), from *means*.

    .. math:: L = (h_w - h_l - 1 / (2 \beta))^2

    The paper writes whole log-ratios. In practice, its authors' included, they are averaged over the completion's
    tokens: a square of sums would be ruled by the longest completions.

    Args:
        chosen: ``[P]`` log-ratios per token :math:`h_w` of the better completions.
        rejected: ``[P]`` log-ratios per token :math:`h_l` of the worse ones.
        beta: the paper's :math:`\tau`; the margin aimed at is :math:`1 / (2 \beta)` nats per token.

    Returns:
        ``[P]``.
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def orpo(chosen: torch.Tensor, rejected: torch.Tensor, *, alpha: float = 0.1) -> torch.Tensor:
    r"""Odds-ratio preference optimisation, equation 6 of Hong et al. 2024 (arXiv 2403.07691), from *means*.

    .. math:: L = -\ell_w - \lambda \log \sigma\left(\log \frac{odds_w}{odds_l}\right), \quad
        odds = \frac{e^\ell}{1 - e^\ell}

    The first term is that of supervised fine-tuning on the better completions.

    Args:
        chosen: ``[P]`` log-probs per token :math:`\ell_w` of the better completions.
        rejected: ``[P]`` log-probs per token :math:`\ell_l` of the worse ones.
        alpha: the paper's :math:`\lambda`.

    Returns:
        ``[P]``.
    """
    return -chosen - alpha * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def simpo(
    chosen: torch.Tensor, rejected: torch.Tensor, *, beta: float = 2.0, gamma: float = 1.0, cpo_alpha: float = 0.0
) -> torch.Tensor:
    r"""Simple preference optimisation, equation 6 of Meng et al. 2024 (arXiv 2405.14734), from *means*.

    .. math:: L = -\log \sigma(\beta (\ell_w - \ell_l) - \gamma) - \alpha \ell_w

    The last term, of supervised fine-tuning on the better completions, makes it CPO-SimPO. Defaults are the paper's;
    TRL's and Axolotl's are ``beta=0.1, gamma=0.5, cpo_alpha=1.0``.

    Args:
        chosen: ``[P]`` log-probs per token :math:`\ell_w` of the better completions.
        rejected: ``[P]`` log-probs per token :math:`\ell_l` of the worse ones.
        beta: scale of the rewards.
        gamma: margin of rewards aimed at.
        cpo_alpha: :math:`\alpha`.

    Returns:
        ``[P]``.
    """
    return -logsigmoid(beta * (chosen - rejected) - gamma) - cpo_alpha * chosen


def kto(
    log_ratios: torch.Tensor,
    desirable: torch.Tensor,
    reference_point: torch.Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> torch.Tensor:
    r"""Kahneman-Tversky optimisation, section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306), from *sums*.

    .. math:: L = \lambda_D (1 - \sigma(\beta (h - z_0))) \text{ if desirable, else }
        \lambda_U (1 - \sigma(\beta (z_0 - h)))

    Args:
        log_ratios: ``[B]`` log-ratios :math:`h` of single completions.
        desirable: ``[B]`` bool.
        reference_point: scalar :math:`z_0`; see :func:`kto_reference_point`.
        beta: how soon gains and losses saturate.
        desirable_weight: :math:`\lambda_D`.
        undesirable_weight: :math:`\lambda_U`.

    Returns:
        ``[B]``.
    """
    gain = beta * (log_ratios - reference_point)
    return torch.where(desirable, desirable_weight * (1 - gain.sigmoid()), undesirable_weight * (1 - (-gain).sigmoid()))


def kto_reference_point(mismatched: torch.Tensor) -> torch.Tensor:
    r"""KTO's estimate of the divergence from the reference, :math:`z_0 = \max(0, \frac1m \sum_i h(x_i, y_j))`.

    Section 4 of Ethayarajh et al. 2024 (arXiv 2402.01306).

    Args:
        mismatched: ``[m]`` log-ratios (sums) of completions after prompts that are not theirs.

    Returns:
        A scalar in nats, without gradient.
    """
    return mismatched.detach().mean().clamp(min=0)


def _log_odds(log_probs: torch.Tensor) -> torch.Tensor:
    """``log(p / (1 - p))`` of ``p = exp(log_probs)``; ``p`` is kept from 1, where the odds are infinite."""
    log_probs = log_probs.clamp(max=-1e-6)
    return log_probs - torch.log(-torch.expm1(log_probs))


class PreferenceObjective(NamedTuple):
    """What an objective is a function of.

    Attributes:
        function: the formula.
        reference: whether it takes log-ratios to a reference rather than log-probs.
        mean: whether a completion's token log-probs are averaged rather than summed.
        paired: whether its rows are pairs of completions rather than single, labelled ones.
    """

    function: Callable[..., torch.Tensor]
    reference: bool
    mean: bool
    paired: bool = True


PREFERENCE_OBJECTIVES = {
    "dpo": PreferenceObjective(dpo, reference=True, mean=False),
    "ipo": PreferenceObjective(ipo, reference=True, mean=True),
    "orpo": PreferenceObjective(orpo, reference=False, mean=True),
    "simpo": PreferenceObjective(simpo, reference=False, mean=True),
    "kto": PreferenceObjective(kto, reference=True, mean=False, paired=False),
}
