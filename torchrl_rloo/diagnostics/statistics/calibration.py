r"""Calibration of pairwise probabilities, and temperature scaling.

All functions take *margins* ``[P]``, reward of the better completion minus reward of the worse one. At temperature
``T`` the model gives the label the probability :math:`\sigma(m / T)`. It predicts the completion of the higher reward
with confidence :math:`\sigma(|m| / T)` in [0.5, 1]. A margin of 0 counts as half correct.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

TEMPERATURES = (1e-3, 1e3)


def fit_temperature(margins: torch.Tensor, *, bounds: tuple[float, float] = TEMPERATURES) -> float:
    r"""Fit the temperature that maximizes the likelihood of the labels (Guo et al. 2017, arXiv 1706.04599).

    .. math:: \max_T \sum_i t \log \sigma(m_i / T) + (1 - t) \log \sigma(-m_i / T), \quad t = \frac{P + 1}{P + 2}

    The objective is concave in :math:`1 / T` and solved by bisection. The targets :math:`t` in place of 1 follow Platt
    1999 ("Probabilistic outputs for support vector machines") and change the result by :math:`O(1 / P)`. They keep
    :math:`T` above 0 if every margin is positive, where maximum likelihood gives :math:`T \to 0`, so certainty. ``P``
    correct predictions are evidence of a probability of about :math:`t`, not of 1.

    Args:
        margins: ``[P]``.
        bounds: smallest and largest temperature; a model no better than chance gets the largest.

    Returns:
        The temperature; 1 if all margins are 0.

    Raises:
        ValueError: if there are no margins, a margin is not finite, or ``bounds`` are not positive and ascending.
    """
    m = margins.double()
    if not m.numel() or not m.isfinite().all():
        raise ValueError(f"margins={margins} must be at least one number, all finite")
    if not 0 < bounds[0] < bounds[1]:
        raise ValueError(f"bounds={bounds} must be two positive temperatures in ascending order")
    if not m.any():
        return 1.0
    # Find the zero of the slope, or take the bound beyond which it lies
    target = (m.numel() + 1) / (m.numel() + 2)

    def slope(temperature: float) -> float:
        """Return the slope of the negative log-likelihood in ``1 / T``, which decreases with ``T``."""
        wrong = torch.sigmoid(-m / temperature)
        return float((m * ((1 - target) * (1 - wrong) - target * wrong)).mean())

    for bound, best in zip(bounds, (slope(bounds[0]) <= 0, slope(bounds[1]) >= 0), strict=True):
        if best:
            return float(bound)
    low, high = (math.log(b) for b in bounds)
    for _ in range(60):  # halve a range of 14 to below the spacing of floats
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def negative_log_likelihood(margins: torch.Tensor) -> torch.Tensor:
    r"""Return the mean of :math:`-\log \sigma(m)` of margins ``[P]``, in nats; :math:`\log 2` at chance."""
    return softplus(-margins).mean()


def brier_score(margins: torch.Tensor) -> torch.Tensor:
    r"""Return the mean of :math:`(1 - \sigma(m))^2` of margins ``[P]`` (Brier 1950); 1/4 at chance."""
    return torch.sigmoid(-margins).square().mean()


class Reliability(NamedTuple):
    """Reliability curve of ``K`` bins of equal width over confidences from 0.5 to 1; NaN in bins without pairs.

    Attributes:
        counts: ``[K]``, number of pairs per bin.
        confidence: ``[K]``, mean confidence of the pairs.
        accuracy: ``[K]``, share of the pairs that are predicted correctly.
    """

    counts: torch.Tensor
    confidence: torch.Tensor
    accuracy: torch.Tensor

    @property
    def expected_calibration_error(self) -> torch.Tensor:
        r"""Mean over the pairs of :math:`|accuracy - confidence|` of their bin (Naeini et al. 2015), a scalar.

        With few pairs per bin it is above 0 even if the model is perfectly calibrated.
        """
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return (gaps * self.counts).sum() / self.counts.sum()


def reliability(margins: torch.Tensor, bins: int = 10) -> Reliability:
    """Compute the reliability curve of margins.

    Args:
        margins: ``[P]``, already divided by a temperature.
        bins: number of bins, ``K``.

    Returns:
        Counts, mean confidences and accuracies of the bins, ``[K]`` each.
    """
    confidence = torch.sigmoid(margins.double().abs())
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    counts, sums, hits = (torch.zeros(bins, dtype=torch.double, device=margins.device) for _ in range(3))
    counts.index_add_(0, index, torch.ones_like(confidence))
    sums.index_add_(0, index, confidence)
    hits.index_add_(0, index, right)
    return Reliability(counts, sums / counts, hits / counts)
