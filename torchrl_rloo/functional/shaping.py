"""What scores go through before they become returns: running moments, calibration, truncated rows."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from torchrl_rloo.functional.advantages import NOISE

TruncationMode = Literal["keep", "scale", "replace", "penalty", "abstain"]
TRUNCATION_MODES: tuple[TruncationMode, ...] = ("keep", "scale", "replace", "penalty", "abstain")


class Moments(NamedTuple):
    """Count, mean and sum of squared deviations of each of ``F`` columns, float64 ``[F]`` each.

    The count is a sum of weights, which are 1 unless old scores are forgotten.
    """

    count: torch.Tensor
    mean: torch.Tensor
    squares: torch.Tensor

    @staticmethod
    def zeros(columns: int) -> Moments:
        """Of no scores."""
        return Moments(*torch.zeros(3, columns, dtype=torch.float64).unbind(0))

    @property
    def std(self) -> torch.Tensor:
        """Standard deviation ``[F]``, divided by the count; 0 for a column without scores."""
        return (self.squares / self.count.clamp(min=torch.finfo(torch.float64).tiny)).sqrt()


def column_moments(scores: torch.Tensor) -> Moments:
    """Moments of each column of ``scores`` ``[N, F]`` over the entries that are not NaN."""
    given = ~scores.isnan()
    values = torch.where(given, scores, 0.0).double()
    count = given.sum(0).double()
    mean = values.sum(0) / count.clamp(min=1)
    return Moments(count, mean, torch.where(given, values - mean, 0.0).square().sum(0))


def merge_moments(first: Moments, second: Moments) -> Moments:
    r"""Moments of two disjoint sets of scores together, exactly.

    .. math:: M = M_a + M_b + \delta^2 \frac{n_a n_b}{n_a + n_b}, \qquad \delta = \bar x_b - \bar x_a

    Chan, Golub and LeVeque 1979, eq. 2.1, which unlike a sum of squares does not cancel for a mean far from 0.
    """
    count = first.count + second.count
    delta, divisor = second.mean - first.mean, count.clamp(min=torch.finfo(torch.float64).tiny)
    mean = first.mean + delta * second.count / divisor
    return Moments(count, mean, first.squares + second.squares + delta.square() * first.count * second.count / divisor)


def forget(moments: Moments, decay: float) -> Moments:
    """The moments with every score weighing ``decay`` times as much as before; mean and standard deviation stay."""
    return Moments(moments.count * decay, moments.mean, moments.squares * decay)


def normalize_scores(
    scores: torch.Tensor, moments: Moments, *, center: bool, min_count: float, epsilon: float
) -> torch.Tensor:
    r"""Scores of each function divided by the standard deviation of that function's scores.

    .. math:: r'_{ik} = \frac{r_{ik} - c_k}{\sigma_k + \epsilon}, \qquad c_k = \mu_k \text{ if centered, else } 0

    A column with fewer than ``min_count`` scores stays as it is. One whose scores have all been equal up to rounding
    has no scale, so it is not divided.

    Args:
        scores: ``[N, F]``, NaN where a function abstained, which stays.
        moments: of the ``F`` functions.
        center: whether to subtract the mean.
        min_count: scores that moments have to be of.
        epsilon: added to the standard deviation.

    Returns:
        ``[N, F]`` in the dtype of ``scores``.
    """
    std = moments.std
    scale = torch.where(std > NOISE * moments.mean.abs(), std + epsilon, 1.0)
    values = scores.double() - moments.mean if center else scores.double()
    return torch.where(moments.count >= min_count, values / scale, scores.double()).to(scores.dtype)


def calibrate_scores(scores: torch.Tensor, temperature: float, bias: float = 0.0, sigmoid: bool = False):
    r"""A reward model's logits on the scale on which it is calibrated: :math:`r / T + b`, or :math:`\sigma(r / T + b)`.

    Temperature scaling, Guo et al. 2017, section 4.2 (arXiv 1706.04599); with a bias Platt's scaling.

    Args:
        scores: any shape; NaN stays.
        temperature: :math:`T > 0`.
        bias: :math:`b`.
        sigmoid: whether to return probabilities.

    Returns:
        The shape and dtype of ``scores``.
    """
    logits = scores / temperature + bias
    return logits.sigmoid() if sigmoid else logits


def truncated_scores(
    scores: torch.Tensor, truncated: torch.Tensor, weights: torch.Tensor, mode: TruncationMode, value: float = 0.0
) -> torch.Tensor:
    r"""Scores of which truncated rows have the return :math:`R_i = \sum_k w_k r_{ik}` that the mode says.

    ``"keep"``: the same. ``"scale"``: :math:`cR_i`. ``"replace"``: :math:`c`. ``"penalty"``: :math:`R_i + c`.
    ``"abstain"``: none. In ``"replace"`` and ``"penalty"`` each function that answered gets the same share, so that the
    scores stay apart and still sum up to the return. A row on which all abstained goes on abstaining.

    ``"scale"`` with :math:`0 \le c \le 1` and ``"replace"`` with a negative value are the two forms of ProRL v2's
    stop-properly penalty.

    Args:
        scores: ``[N, F]``, NaN where a function abstained.
        truncated: bool ``[N]``.
        weights: ``[F]``, positive for ``"replace"`` and ``"penalty"``.
        mode: one of :data:`TRUNCATION_MODES`.
        value: :math:`c`.

    Returns:
        ``[N, F]`` in the dtype of ``scores``.
    """
    if mode == "keep":
        return scores
    if mode == "abstain":
        changed = torch.full_like(scores, torch.nan)
    elif mode == "scale":
        changed = scores * value
    else:
        given = (~scores.isnan()).to(scores.dtype)
        total = (given * weights.to(scores)).sum(-1, keepdim=True)
        share = value / torch.where(total > 0, total, 1.0)
        changed = scores + share if mode == "penalty" else torch.where(scores.isnan(), scores, share.expand_as(scores))
    return torch.where(truncated[:, None], changed, scores)
