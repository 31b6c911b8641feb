"""Paired comparison of two evaluations on the same prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_rloo.evaluation.result import EvaluatedSample, EvaluationResult
from torchrl_rloo.evaluation.statistics import PairedTest, paired_test, round_values
from torchrl_rloo.functional.statistics import Interval
from torchrl_rloo.runtime.files import make_folder, write_text

_COMPARED_SETTINGS = ("scorers", "num_samples", "greedy", "generate_kwargs", "votes")


@dataclass(frozen=True)
class MetricComparison:
    """Comparison of one metric."""

    metric: str
    prompts: int
    first: Interval
    second: Interval
    test: PairedTest
    improved_ids: tuple[int, ...]
    worsened_ids: tuple[int, ...]


class Comparison:
    """Result of :func:`compare`: one :class:`MetricComparison` per metric that both evaluations have.

    Attributes:
        first: first evaluation.
        second: second evaluation.
        metrics: comparisons by metric name.
        differing_settings: settings that differ, as ``{name: (value of first, value of second)}``.
    """

    def __init__(
        self,
        first: EvaluationResult,
        second: EvaluationResult,
        metrics: dict[str, MetricComparison],
        differing_settings: dict[str, tuple[Any, Any]],
    ):
        self.first, self.second, self.metrics = first, second, metrics
        self.differing_settings = differing_settings

    @property
    def labels(self) -> tuple[str, str]:
        """Display names of the two evaluations, always distinct."""
        first, second = self.first.settings.label or "first", self.second.settings.label or "second"
        return (first, second) if first != second else (f"{first} (1)", f"{second} (2)")

    def table(self) -> str:
        """Return all metrics as a Markdown table; p-values are not corrected for multiple comparisons."""
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
                _format_p_value(m.test),
                str(m.test.better),
                str(m.test.worse),
            )
            for m in self.metrics.values()
        ]
        # Pad the columns, so that the table is also readable as plain text
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        # Add differences of the settings, which may explain those of the metrics
        lines += [f"note: {name} differs: {a!r} and {b!r}" for name, (a, b) in self.differing_settings.items()]
        return "\n".join(lines)

    def changed_prompts(self, metric: str | None = None) -> list[dict[str, Any]]:
        """Return the prompts on which a metric, by default the first, differs, gains before losses.

        Each is a dictionary of ``prompt_id``, ``change``, ``prompt`` and a completion of each evaluation.
        """
        metric = next(iter(self.metrics)) if metric is None else metric
        if metric not in self.metrics:
            raise KeyError(f"metric={metric!r} must be one of {list(self.metrics)}")
        chosen = self.metrics[metric]
        # Show completions of the kind that the metric measures
        greedy = metric.rpartition("/")[2] == "greedy"
        before, after = _completions_by_prompt(self.first, greedy), _completions_by_prompt(self.second, greedy)
        return [
            {
                "prompt_id": i,
                "change": self.second.values[metric][i] - self.first.values[metric][i],
                "prompt": before[i].prompt,
                "first": before[i].completion,
                "second": after[i].completion,
            }
            for i in (*chosen.improved_ids, *chosen.worsened_ids)
        ]

    def save(self, directory: str | Path) -> None:
        """Write ``comparison.json``, with the prompts whose first metric changed."""
        make_folder(Path(directory))
        content = self.to_dict() | {"changed_prompts": self.changed_prompts()}
        text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
        write_text(Path(directory) / "comparison.json", text + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        return {
            "labels": list(self.labels),
            "differing_settings": {name: list(both) for name, both in self.differing_settings.items()},
            "metrics": {
                name: {
                    "prompts": m.prompts,
                    "first": m.first.mean,
                    "second": m.second.mean,
                    **m.test._asdict(),
                    "improved_ids": list(m.improved_ids),
                    "worsened_ids": list(m.worsened_ids),
                }
                for name, m in self.metrics.items()
            },
        }


def compare(first: EvaluationResult, second: EvaluationResult, *, same_settings: bool = True) -> Comparison:
    """Compare two evaluations prompt by prompt, as ``second - first``.

    Args:
        first: evaluation, e.g. of the base model; :meth:`EvaluationResult.load` reads a saved one.
        second: evaluation, e.g. of a trained checkpoint.
        same_settings: True rejects evaluations whose sampling or scorers differ. False notes the differences in the
            table and compares the shared metrics.

    Returns:
        The comparison of each shared metric.

    Raises:
        ValueError: if the prompts differ, the evaluations share no metric, or ``same_settings`` is True and sampling or
            scorers differ.
    """
    _check_prompts(first, second)
    # Compare settings as they are saved: a loaded evaluation has lists where a new one has tuples
    ours, theirs = (json.loads(json.dumps(asdict(r.settings), default=str)) for r in (first, second))
    differing_settings = {name: (ours[name], theirs[name]) for name in _COMPARED_SETTINGS if ours[name] != theirs[name]}
    if differing_settings and same_settings:
        shown = "; ".join(f"{name}: {a!r} and {b!r}" for name, (a, b) in differing_settings.items())
        raise ValueError(
            f"the evaluations differ in {shown}; evaluate both with the same settings, or pass same_settings=False"
        )
    # Test each shared metric over the prompts, in the order of the first evaluation
    metrics = {}
    for name in [name for name in first.values if name in second.values]:
        ids = list(first.values[name])
        if missing := first.values[name].keys() ^ second.values[name].keys():
            raise ValueError(
                f"metric={name!r} has {len(missing)} prompts in one evaluation only, e.g. prompt_id={min(missing)}; "
                "evaluate both on the same dataset"
            )
        before, after = (
            round_values(torch.tensor([r.values[name][i] for i in ids], dtype=torch.float64)) for r in (first, second)
        )
        test = paired_test(before, after)
        improved_ids = tuple(i for i, up in zip(ids, (after > before).tolist(), strict=True) if up)
        worsened_ids = tuple(i for i, down in zip(ids, (after < before).tolist(), strict=True) if down)
        metrics[name] = MetricComparison(
            name, len(ids), first.intervals[name], second.intervals[name], test, improved_ids, worsened_ids
        )
    if not metrics:
        raise ValueError(
            f"the evaluations must share a metric, got {list(first.values)} and {list(second.values)}; evaluate both "
            "with the same scorers"
        )
    return Comparison(first, second, metrics, differing_settings)


def _format_p_value(test: PairedTest) -> str:
    """Format a p-value to two digits, or as an upper bound if too few drawn sign patterns are as extreme."""
    if test.p_error > 0.1 * test.p_value:
        return f"< {test.p_value + 2 * test.p_error:.1g}"
    return f"{test.p_value:.2g}"


def _completions_by_prompt(result: EvaluationResult, greedy: bool) -> dict[int, EvaluatedSample]:
    """Return the greedy completion of each prompt, or its first sample."""
    return {s.prompt_id: s for s in result.samples if s.sample == (None if greedy else 0)}


def _check_prompts(first: EvaluationResult, second: EvaluationResult) -> None:
    ours, theirs = ({s.prompt_id: s.prompt for s in r.samples} for r in (first, second))
    if missing := ours.keys() ^ theirs.keys():
        raise ValueError(
            f"the evaluations have {len(ours)} and {len(theirs)} prompts, and only one has {len(missing)} of them, "
            f"e.g. prompt_id={min(missing)}; evaluate both on the same dataset"
        )
    for i, prompt in ours.items():
        if prompt != theirs[i]:
            raise ValueError(
                f"prompt_id={i} is {prompt!r:.150} in the first evaluation and {theirs[i]!r:.150} in the second; "
                "evaluate both on the same dataset"
            )
