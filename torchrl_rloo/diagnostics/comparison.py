"""Two evaluations of the same prompts, side by side: what differs, by how much, and whether chance alone would."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_rloo.diagnostics.evaluation_result import EvaluatedSample, EvaluationResult
from torchrl_rloo.diagnostics.statistics.evaluation import Interval, clean
from torchrl_rloo.diagnostics.statistics.paired import PairedTest, paired_test

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MUST_AGREE = ("scorers", "num_samples", "greedy", "generate_kwargs", "votes")
_COLOURS = ("#4a4a4a", "#1f5fa8")


@dataclass(frozen=True)
class MetricComparison:
    """One metric of both.

    Attributes:
        metric: its name in :attr:`EvaluationResult.values`.
        prompts: that it is a mean of.
        first: mean and interval of the first evaluation.
        second: of the second.
        test: of ``second - first``, prompt by prompt.
        gained: prompts on which the second is higher.
        lost: prompts on which it is lower.
    """

    metric: str
    prompts: int
    first: Interval
    second: Interval
    test: PairedTest
    gained: tuple[int, ...]
    lost: tuple[int, ...]


class Comparison:
    """What :func:`compare` gives: one :class:`MetricComparison` for each metric that both have.

    Attributes:
        first: the first evaluation.
        second: the second.
        metrics: by name.
        differing: settings that differ, ``{name: (first's, second's)}``.
    """

    def __init__(
        self,
        first: EvaluationResult,
        second: EvaluationResult,
        metrics: dict[str, MetricComparison],
        differing: dict[str, tuple[Any, Any]],
    ):
        self.first, self.second, self.metrics, self.differing = first, second, metrics, differing

    @property
    def labels(self) -> tuple[str, str]:
        """Names of the two for people to read, never the same."""
        first, second = self.first.settings.label or "first", self.second.settings.label or "second"
        return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")

    def table(self) -> str:
        """All metrics as a Markdown table, which reads as plain text too; p-values are of each metric by itself."""
        first, second = self.labels
        header = ("metric", "prompts", first, second, "difference", "95 % interval", "p", "better", "worse")
        rows = [header] + [
            (
                m.metric,
                str(m.prompts),
                f"{m.first.mean:.4g}",
                f"{m.second.mean:.4g}",
                f"{m.test.difference:+.4g}",
                f"{m.test.low:+.3g} to {m.test.high:+.3g}",
                _p_value(m.test),
                str(m.test.better),
                str(m.test.worse),
            )
            for m in self.metrics.values()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        lines += [f"note: {name} differs: {a!r} and {b!r}" for name, (a, b) in self.differing.items()]
        return "\n".join(lines)

    def flipped(self, metric: str | None = None) -> list[dict[str, Any]]:
        """The prompts on which a metric differs, those that gained first, each with a completion of either evaluation.

        Args:
            metric: default: the first, ``"greedy"`` where there is one.

        Raises:
            KeyError: for a metric that the two do not share.
        """
        metric = next(iter(self.metrics)) if metric is None else metric
        if metric not in self.metrics:
            raise KeyError(f"metric={metric!r} is not one of {list(self.metrics)}")
        chosen = self.metrics[metric]
        greedy = metric.rpartition("/")[2] == "greedy"
        before, after = _by_prompt(self.first, greedy), _by_prompt(self.second, greedy)
        return [
            {
                "prompt_id": i,
                "change": self.second.values[metric][i] - self.first.values[metric][i],
                "prompt": before[i].prompt,
                "first": before[i].completion,
                "second": after[i].completion,
            }
            for i in (*chosen.gained, *chosen.lost)
        ]

    def save(self, directory: str | Path) -> None:
        """Write ``comparison.json``, with the prompts whose metric changed, and ``comparison.png``."""
        path = plot_comparison(self, Path(directory) / "comparison.png")
        text = json.dumps(self.to_dict() | {"flipped": self.flipped()}, indent=2, ensure_ascii=False, default=str)
        path.with_suffix(".json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "labels": list(self.labels),
            "differing": {name: list(both) for name, both in self.differing.items()},
            "metrics": {
                name: {
                    "prompts": m.prompts,
                    "first": m.first.mean,
                    "second": m.second.mean,
                    **m.test._asdict(),
                    "gained": list(m.gained),
                    "lost": list(m.lost),
                }
                for name, m in self.metrics.items()
            },
        }


def compare(first: EvaluationResult, second: EvaluationResult, *, same_settings: bool = True) -> Comparison:
    """Compares two evaluations prompt by prompt, ``second - first``.

    Args:
        first: e.g. of the base model; :meth:`EvaluationResult.load` reads a saved one.
        second: e.g. of a trained checkpoint.
        same_settings: refuse evaluations whose sampling or scorers differ; False notes the differences in the table and
            compares the metrics that both have.

    Raises:
        ValueError: if the prompts differ, the settings do where they must not, or no metric is in both.
    """
    _check_prompts(first, second)
    ours, theirs = (json.loads(json.dumps(asdict(r.settings), default=str)) for r in (first, second))  # as saved
    differing = {name: (ours[name], theirs[name]) for name in _MUST_AGREE if ours[name] != theirs[name]}
    if differing and same_settings:
        shown = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in differing.items())
        raise ValueError(f"the evaluations differ in {shown}. Evaluate alike, or pass same_settings=False")
    metrics = {}
    for name in [name for name in first.values if name in second.values]:
        ids = list(first.values[name])
        before, after = (
            clean(torch.tensor([r.values[name][i] for i in ids], dtype=torch.float64)) for r in (first, second)
        )
        test = paired_test(before, after)
        gained = tuple(i for i, up in zip(ids, (after > before).tolist(), strict=True) if up)
        lost = tuple(i for i, down in zip(ids, (after < before).tolist(), strict=True) if down)
        metrics[name] = MetricComparison(
            name, len(ids), first.intervals[name], second.intervals[name], test, gained, lost
        )
    if not metrics:
        raise ValueError(f"no metric is in both: {list(first.values)} and {list(second.values)}")
    return Comparison(first, second, metrics, differing)


def plot_comparison(comparison: Comparison, path: str | Path, *, metrics: Sequence[str] | None = None) -> Path:
    """Draws the metrics of both with their intervals, and beside them the paired differences with theirs, into a PNG.

    Args:
        comparison: of :func:`compare`.
        path: the PNG to write; its directory is made if it does not exist.
        metrics: which to show, from top to bottom; default: all.

    Raises:
        KeyError: for a metric that the comparison has not.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: half a second that only a figure needs
    from matplotlib.figure import Figure

    names = list(comparison.metrics) if metrics is None else list(metrics)
    if unknown := [name for name in names if name not in comparison.metrics]:
        raise KeyError(f"metrics {unknown} are not among {list(comparison.metrics)}")
    chosen = [comparison.metrics[name] for name in names]
    figure = Figure(figsize=(10.5, 1.9 + 0.45 * len(chosen)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    means, differences = figure.subplots(1, 2, sharey=True, width_ratios=(1.2, 1))
    places = range(len(chosen))
    for shift, colour, label, side in zip((-0.13, 0.13), _COLOURS, comparison.labels, ("first", "second"), strict=True):
        intervals = [getattr(m, side) for m in chosen]
        _bars(means, [y + shift for y in places], intervals, colour, label)
    tests = [Interval(m.test.difference, m.test.low, m.test.high) for m in chosen]
    _bars(differences, list(places), tests, "#8a5fb0", None)
    differences.locator_params(axis="x", nbins=6)
    differences.axvline(0, color="#999999", linewidth=1)
    for y, metric in zip(places, chosen, strict=True):
        place = {"xycoords": ("axes fraction", "data"), "xytext": (6, 0), "textcoords": "offset points"}
        differences.annotate(f"p {_p_value(metric.test)}", (1, y), va="center", fontsize=8, color="#444444", **place)
    means.set_yticks(list(places), [m.metric for m in chosen], fontsize=9)
    means.set_ylim(len(chosen) - 0.4, -0.6)
    figure.legend(*means.get_legend_handles_labels(), fontsize=9, frameon=False, loc="outside lower left", ncols=2)
    means.set_title("Mean over the prompts, 95 % interval", fontsize=11, loc="left")
    differences.set_title("Second minus first, prompt by prompt", fontsize=11, loc="left")
    for axes in (means, differences):
        axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _bars(axes: Axes, places: Sequence[float], intervals: Sequence[Interval], colour: str, label: str | None) -> None:
    means = [i.mean for i in intervals]
    reach = [[i.mean - i.low for i in intervals], [i.high - i.mean for i in intervals]]
    axes.errorbar(means, places, xerr=reach, fmt="o", color=colour, markersize=5, capsize=3, linewidth=1.4, label=label)


def _p_value(test: PairedTest) -> str:
    """Two digits, or a bound where sign patterns were drawn and hardly one was as far from 0 as what was observed."""
    if test.p_error > 0.1 * test.p_value:
        return f"< {test.p_value + 2 * test.p_error:.1g}"
    return f"{test.p_value:.2g}"


def _by_prompt(result: EvaluationResult, greedy: bool) -> dict[int, EvaluatedSample]:
    """The greedy completion of each prompt, or its first sample."""
    return {s.prompt_id: s for s in result.samples if s.sample == (None if greedy else 0)}


def _check_prompts(first: EvaluationResult, second: EvaluationResult) -> None:
    ours, theirs = ({s.prompt_id: s.prompt for s in r.samples} for r in (first, second))
    if missing := ours.keys() ^ theirs.keys():
        raise ValueError(
            f"the evaluations are of {len(ours)} and {len(theirs)} prompts; {len(missing)} are in one alone, prompt "
            f"{min(missing)} first: evaluate both on the same dataset"
        )
    for i, prompt in ours.items():
        if prompt != theirs[i]:
            raise ValueError(
                f"prompt {i} is {prompt!r:.150} in the first evaluation and {theirs[i]!r:.150} in the second: evaluate "
                "both on the same dataset"
            )
