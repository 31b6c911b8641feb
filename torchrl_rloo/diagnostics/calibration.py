"""Whether a reward model's margins can be read as probabilities: a report, and the temperature that makes them so."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchrl_rloo.diagnostics.statistics.calibration import (
    brier_score,
    fit_temperature,
    negative_log_likelihood,
    reliability,
)
from torchrl_rloo.functional.statistics import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "calibration.json"
PICTURE = "calibration.png"


@dataclass(frozen=True)
class CalibrationBin:
    """Predictions of like confidence.

    Attributes:
        low: of the confidence.
        high: of the confidence.
        count: pairs.
        confidence: their mean confidence; None without pairs.
        accuracy: share of them that is predicted right; None without pairs.
        interval: 95 % confidence interval of the accuracy (Wilson); None without pairs.
    """

    low: float
    high: float
    count: int
    confidence: float | None
    accuracy: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class CalibrationScores:
    """How well the confidences fit.

    Attributes:
        nll: mean negative log-likelihood of the labels, in nats; 0.693 without knowledge.
        brier: mean squared error of the labels' probabilities; 0.25 without knowledge.
        ece: expected calibration error: mean over the pairs of |accuracy - confidence| of their bin.
        bins: the reliability curve.
    """

    nll: float
    brier: float
    ece: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` finds.

    Attributes:
        temperature: what margins, and so scores, are to be divided by.
        pairs: how many it is fitted on.
        accuracy: share of them whose better completion has the higher score; a tie counts half.
        interval: 95 % confidence interval of the accuracy (Wilson), as if pairs were independent. Several pairs of one
            prompt are not, and make it too narrow, as those of the bins.
        separable: whether there is no error among them. The temperature then says how many pairs were looked at rather
            than how sure the model may be: take more pairs, or harder ones.
        before: at temperature 1.
        after: at ``temperature``. That one number was fitted on the same pairs makes ``nll`` about ``1 / (2 * pairs)``
            nats too good.
    """

    temperature: float
    pairs: int
    accuracy: float
    interval: tuple[float, float]
    separable: bool
    before: CalibrationScores
    after: CalibrationScores


def calibrate(margins: torch.Tensor, *, bins: int = 10) -> Calibration:
    """Judges the probabilities that a reward model gives to held-out labels, and fits a temperature to them.

    Args:
        margins: ``[P]``: score of the better completion minus score of the worse one. The pairs must not have been
            trained on: there a model is surer than it may be.
        bins: of the reliability curve, over confidences from 0.5 to 1.

    Raises:
        ValueError: for no margins, one that is not finite, or fewer than one bin.

    Example:
        >>> found = calibrate(torch.tensor([8.0, 8.0, -8.0, 8.0]))  # 75 % right, and far too sure
        >>> round(found.temperature, 2), round(found.before.ece, 2)
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
                confidence=_number(float(curve.confidence[k])),
                accuracy=_number(float(curve.accuracy[k])),
                interval=tuple(intervals[k]) if curve.counts[k] else None,
            )
            for k in range(bins)
        ),
    )


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def write_calibration(found: Calibration, directory: str | Path) -> Path:
    """Writes ``calibration.json`` and its picture, ``calibration.png``, next to a reward model.

    The file's ``"temperature"`` is what a reward is calibrated by that scores with the model.

    Args:
        found: of :func:`calibrate`.
        directory: of the model; made if it does not exist.

    Returns:
        The JSON file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    plot_calibration(found, directory / PICTURE)
    path = directory / FILE
    path.write_text(json.dumps(asdict(found), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return path


def plot_calibration(found: Calibration, path: str | Path) -> Path:
    """Draws the reliability curves before and after into a PNG, each above a histogram of its confidences."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: half a second that only a report needs
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharex=True, sharey="row", height_ratios=(3, 1))
    titles = ("Scores as they are", f"Scores divided by {found.temperature:.3g}")
    for column, (title, scores) in enumerate(zip(titles, (found.before, found.after), strict=True)):
        _draw_curve(axes[0, column], scores, f"{title}: ECE {scores.ece:.3f}, {scores.nll:.3f} nats")
        _draw_histogram(axes[1, column], scores)
    axes[0, 0].set_ylabel("predicted right")
    axes[0, 0].legend(fontsize=8, loc="lower right", frameon=True, framealpha=0.85, edgecolor="none")
    axes[1, 0].set_ylabel("share of pairs")
    path = Path(path)
    figure.savefig(path)
    return path


def _draw_curve(axes: Axes, scores: CalibrationScores, title: str) -> None:
    full = [b for b in scores.bins if b.count]
    confidence, accuracy = [b.confidence for b in full], [b.accuracy for b in full]
    below = [max(0.0, b.accuracy - b.interval[0]) for b in full]
    above = [max(0.0, b.interval[1] - b.accuracy) for b in full]
    axes.plot((0.5, 1), (0.5, 1), color="#8a8a8a", linewidth=1, linestyle="--", label="perfectly calibrated")
    style = {"color": "#1f5fa8", "ecolor": "#9dbbe0", "capsize": 3, "marker": "o", "markersize": 5, "linestyle": "none"}
    axes.errorbar(
        confidence, accuracy, yerr=(below, above), label="pairs of like confidence, with 95 % interval", **style
    )
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylim(-0.03, 1.03)
    _plain(axes)


def _draw_histogram(axes: Axes, scores: CalibrationScores) -> None:
    total = sum(b.count for b in scores.bins)
    centres, shares = [(b.low + b.high) / 2 for b in scores.bins], [b.count / total for b in scores.bins]
    bars = axes.bar(centres, shares, width=0.92 * (scores.bins[0].high - scores.bins[0].low), color="#9dbbe0")
    axes.bar_label(bars, [str(b.count) if b.count else "" for b in scores.bins], fontsize=7, padding=1)
    axes.set_ylim(0, 1.2)
    axes.set_xlabel("confidence")
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_xlim(0.49, 1.01)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
