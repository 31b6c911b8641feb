"""Calibration of a reward model: reliability report and temperature of its margins."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import softplus

from torchrl_rloo.functional.statistics import wilson_interval
from torchrl_rloo.runtime.files import atomic_write, make_folder, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CALIBRATION_FILE = "calibration.json"
CALIBRATION_PLOT = "calibration.png"
TEMPERATURES = (1e-3, 1e3)


@dataclass(frozen=True)
class CalibrationBin:
    """One bin of the reliability curve."""

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class CalibrationScores:
    """Calibration scores at one temperature."""

    nll: float
    brier: float
    ece: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class Calibration:
    """Result of :func:`calibrate`.

    Attributes:
        temperature: divisor that calibrates margins, and so scores.
        pairs: number of pairs that the temperature is fitted on.
        accuracy: share of the pairs whose better completion has the higher score; a tie counts half.
        interval: 95 % confidence interval of the accuracy (Wilson). It assumes independent pairs, so several pairs of
            one prompt make it too narrow, as they do the intervals of the bins.
        separable: True if every pair is predicted correctly. The temperature then depends on the number of pairs, not
            on the model's confidence: use more pairs, or harder ones.
        before: scores at temperature 1.
        after: scores at ``temperature``. Fitting on the same pairs makes ``nll`` about ``1 / (2 * pairs)`` nats too
            low.
    """

    temperature: float
    pairs: int
    accuracy: float
    interval: tuple[float, float]
    separable: bool
    before: CalibrationScores
    after: CalibrationScores


def calibrate(margins: torch.Tensor, *, bins: int = 10) -> Calibration:
    """Score a reward model's probabilities on held-out pairs, and fit a temperature to them.

    Args:
        margins: ``[P]``, score of the better completion minus score of the worse one. The model must not have been
            trained on these pairs, since it is overconfident on training pairs.
        bins: number of bins of the reliability curve, over confidences from 0.5 to 1.

    Returns:
        The temperature, with the scores before and after dividing the margins by it.

    Raises:
        ValueError: if there are no margins, a margin is not finite, or ``bins`` is below 1.

    Example:
        >>> calibration = calibrate(torch.tensor([8.0, 8.0, -8.0, 8.0]))  # 75 % correct, and overconfident
        >>> round(calibration.temperature, 2), round(calibration.before.ece, 2)
        (11.54, 0.25)
    """
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    margins = margins.detach().double().cpu()
    temperature = fit_temperature(margins)
    right = ((margins > 0).double() + 0.5 * (margins == 0)).mean()
    low, high = wilson_interval(right, torch.tensor(float(len(margins))))
    return Calibration(
        temperature=temperature,
        pairs=len(margins),
        accuracy=float(right),
        interval=(float(low), float(high)),
        separable=bool((margins > 0).all()),
        before=_scores(margins, bins),
        after=_scores(margins / temperature, bins),
    )


def _scores(margins: torch.Tensor, bins: int) -> CalibrationScores:
    curve = reliability(margins, bins)
    intervals = torch.stack(wilson_interval(curve.accuracy, curve.counts), -1).tolist()
    edges = torch.linspace(0.5, 1, bins + 1, dtype=torch.double).tolist()
    return CalibrationScores(
        nll=float(negative_log_likelihood(margins)),
        brier=float(brier_score(margins)),
        ece=float(curve.expected_calibration_error),
        bins=tuple(
            CalibrationBin(
                low=edges[k],
                high=edges[k + 1],
                count=int(curve.counts[k]),
                confidence=_finite_or_none(float(curve.confidence[k])),
                accuracy=_finite_or_none(float(curve.accuracy[k])),
                interval=tuple(intervals[k]) if curve.counts[k] else None,
            )
            for k in range(bins)
        ),
    )


def _finite_or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_calibration(found: Calibration, directory: str | Path) -> Path:
    """Write ``calibration.json`` and ``calibration.png`` next to a reward model.

    A :class:`~torchrl_rloo.envs.transforms.CalibrateScores` divides the model's scores by the file's ``"temperature"``.

    Args:
        found: result of :func:`calibrate`.
        directory: directory of the model, created if missing.

    Returns:
        Path of the JSON file.
    """
    directory = Path(directory)
    plot_calibration(found, directory / CALIBRATION_PLOT)
    return write_text(directory / CALIBRATION_FILE, json.dumps(asdict(found), indent=2, allow_nan=False) + "\n")


def plot_calibration(found: Calibration, path: str | Path) -> Path:
    """Plot the reliability curves before and after scaling as a PNG, each above a histogram of its confidences."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here because it takes half a second
    from matplotlib.figure import Figure

    # One column per curve, with the histogram of its confidences below
    figure = Figure(figsize=(9.0, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1))
    titles = ("Raw scores", f"Scores divided by {found.temperature:.3g}")
    for column, (title, scores) in enumerate(zip(titles, (found.before, found.after), strict=True)):
        _draw_curve(axes[0, column], scores, f"{title}: ECE {scores.ece:.3f}, {scores.nll:.3f} nats")
        _draw_histogram(axes[1, column], scores)
    # Label only the left panels, because the panels of a row share their axis
    axes[0, 0].set_ylabel("accuracy")
    axes[0, 0].legend(fontsize=8, loc="lower right", frameon=True, framealpha=0.85, edgecolor="none")
    axes[1, 0].set_ylabel("share of pairs")
    make_folder(Path(path).parent)
    with atomic_write(Path(path)) as file:
        figure.savefig(file, format="png")
    return Path(path)


def _draw_curve(axes: Axes, scores: CalibrationScores, title: str) -> None:
    filled = [b for b in scores.bins if b.count]
    confidence, accuracy = [b.confidence for b in filled], [b.accuracy for b in filled]
    below = [max(0.0, b.accuracy - b.interval[0]) for b in filled]
    above = [max(0.0, b.interval[1] - b.accuracy) for b in filled]
    axes.plot((0.5, 1), (0.5, 1), color="#8a8a8a", linewidth=1, linestyle="--", label="perfectly calibrated")
    style = {"color": "#1f5fa8", "ecolor": "#9dbbe0", "capsize": 3, "marker": "o", "markersize": 5, "linestyle": "none"}
    axes.errorbar(confidence, accuracy, yerr=(below, above), label="pairs per bin, with 95 % interval", **style)
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(-0.03, 1.03)
    _style_axes(axes)


def _draw_histogram(axes: Axes, scores: CalibrationScores) -> None:
    total = sum(b.count for b in scores.bins)
    centers, shares = [(b.low + b.high) / 2 for b in scores.bins], [b.count / total for b in scores.bins]
    bars = axes.bar(centers, shares, width=0.92 * (scores.bins[0].high - scores.bins[0].low), color="#9dbbe0")
    axes.bar_label(bars, [str(b.count) if b.count else "" for b in scores.bins], fontsize=7, padding=1)
    axes.set_ylim(0, 1.2)
    axes.set_xlabel("confidence")
    _style_axes(axes)


def _style_axes(axes: Axes) -> None:
    axes.set_xlim(0.49, 1.01)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


# Margins [P]: reward of the better completion minus reward of the worse one. At temperature T the model gives the label
# the probability sigmoid(m / T), and predicts with confidence sigmoid(|m| / T). A margin of 0 counts as half correct.


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
