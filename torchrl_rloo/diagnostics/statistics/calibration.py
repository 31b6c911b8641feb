r"""How far probabilities can be believed, and the one number that makes them more believable.

All of it is about *margins* ``[P]``: reward of the better completion minus reward of the worse one. At temperature
``T`` the model gives the label the probability :math:`\sigma(m / T)`. It *predicts* the completion of the higher
reward, with confidence :math:`\sigma(|m| / T)` in [0.5, 1], and a margin of 0 is right by half.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import softplus

TEMPERATURES = (1e-3, 1e3)


def fit_temperature(margins: torch.Tensor, *, bounds: tuple[float, float] = TEMPERATURES) -> float:
    r"""The temperature under which the labels are most likely (Guo et al. 2017, arXiv 1706.04599), for pairs.

    .. math:: \max_T \sum_i t \log \sigma(m_i / T) + (1 - t) \log \sigma(-m_i / T), \quad t = \frac{P + 1}{P + 2}

    This is concave in :math:`1 / T` and solved by bisection. The targets :math:`t` in place of 1 are those of Platt
    1999 ("Probabilistic outputs for support vector machines"). They change the result by :math:`O(1 / P)`, and keep it
    finite where plain maximum likelihood is not: if every margin is positive, that would be sure of everything,
    :math:`T \to 0`, while ``P`` right predictions are no evidence of more than about :math:`t`.

    Args:
        margins: ``[P]``.
        bounds: smallest and largest temperature; a model no better than chance gets the largest.

    Returns:
        The temperature; 1 if all margins are 0.

    Raises:
        ValueError: for no margins, one that is not finite, or bounds that are none.
    """
    m = margins.double()
    if not m.numel() or not m.isfinite().all():
        raise ValueError(f"margins must be at least one number, all finite, got {margins}")
    if not 0 < bounds[0] < bounds[1]:
        raise ValueError(f"bounds={bounds} must be two positive temperatures in ascending order")
    if not m.any():
        return 1.0
    target = (m.numel() + 1) / (m.numel() + 2)

    def slope(temperature: float) -> float:
        """Of the negative log-likelihood in ``1 / T``; falls as ``T`` rises."""
        wrong = torch.sigmoid(-m / temperature)
        return float((m * ((1 - target) * (1 - wrong) - target * wrong)).mean())

    for bound, best in zip(bounds, (slope(bounds[0]) <= 0, slope(bounds[1]) >= 0), strict=True):
        if best:
            return float(bound)
    low, high = (math.log(b) for b in bounds)
    for _ in range(60):  # halves a range of 14 to below the spacing of floats
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def negative_log_likelihood(margins: torch.Tensor) -> torch.Tensor:
    r"""Mean of :math:`-\log \sigma(m)` in nats; :math:`\log 2` for a model that knows nothing."""
    return softplus(-margins).mean()


def brier_score(margins: torch.Tensor) -> torch.Tensor:
    r"""Mean squared error of the labels' probabilities, :math:`(1 - \sigma(m))^2` (Brier 1950); 1/4 for ignorance."""
    return torch.sigmoid(-margins).square().mean()


class Reliability(NamedTuple):
    """A reliability curve of ``K`` bins of equal width over confidences from 0.5 to 1; NaN in bins without pairs.

    Attributes:
        counts: ``[K]``, pairs in each bin.
        confidence: ``[K]``, their mean confidence.
        accuracy: ``[K]``, the share of them that is predicted right.
    """

    counts: torch.Tensor
    confidence: torch.Tensor
    accuracy: torch.Tensor

    @property
    def expected_calibration_error(self) -> torch.Tensor:
        r"""Mean over the pairs of :math:`|accuracy - confidence|` of their bin (Naeini et al. 2015), a scalar.

        Few pairs to a bin make it larger than 0 even where the confidences are right.
        """
        gaps = (self.accuracy - self.confidence).abs().nan_to_num(0.0)
        return (gaps * self.counts).sum() / self.counts.sum()


def reliability(margins: torch.Tensor, bins: int = 10) -> Reliability:
    """How often predictions of like confidence are right.

    Args:
        margins: ``[P]``, divided by a temperature already.
        bins: number of bins, ``K``.
    """
    confidence = torch.sigmoid(margins.double().abs())
    right = (margins > 0).double() + 0.5 * (margins == 0).double()
    index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    counts, sums, hits = (torch.zeros(bins, dtype=torch.double, device=margins.device) for _ in range(3))
    counts.index_add_(0, index, torch.ones_like(confidence))
    sums.index_add_(0, index, confidence)
    hits.index_add_(0, index, right)
    return Reliability(counts, sums / counts, hits / counts)
