"""EvaluationResult: every completion of an evaluation with its scores, and the metrics that follow from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.diagnostics.statistics.evaluation import Interval, best_at_k, maj_at_k, mean_interval

FORMATS = ("parquet", "jsonl")  # of saved completions

_SUMMARY, _SAMPLES = "evaluation.json", "samples"


@dataclass(frozen=True)
class EvaluatedSample:
    """One completion.

    Attributes:
        prompt_id: place of the prompt in the dataset.
        sample: which of the prompt's samples, from 0; None: the greedy completion.
        prompt: as text.
        completion: as text.
        scores: by scorer; None where it abstained or failed, which counts 0.
        extracted: the answer that votes; None: it has none.
        seed: of its random stream.
        truncated: a token, turn or time limit ended it.
        tokens: that the policy sampled.
        task: name of the task, in a mixture of several.
        columns: the dataset's other columns.
    """

    prompt_id: int
    sample: int | None
    prompt: str
    completion: str
    scores: dict[str, float | None]
    extracted: str | None = None
    seed: int = 0
    truncated: bool = False
    tokens: int = 0
    task: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)

    def score(self, scorer: str) -> float:
        """What counts: 0 where the scorer abstained or failed."""
        value = self.scores[scorer]
        return 0.0 if value is None else value


@dataclass(frozen=True)
class EvaluationSettings:
    """What an evaluation was asked for.

    Attributes:
        scorers: names; the first is the headline.
        num_samples: sampled completions of each prompt.
        ks: of pass@k and maj@k.
        greedy: whether there is a greedy completion of each prompt.
        votes: whether answers were extracted for maj@k.
        seed: of the samples.
        generate_kwargs: how was sampled.
        fingerprint: of the dataset.
        label: a name for people to read, e.g. of the checkpoint.
    """

    scorers: tuple[str, ...]
    num_samples: int = 1
    ks: tuple[int, ...] = ()
    greedy: bool = True
    votes: bool = True
    seed: int = 0
    generate_kwargs: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    label: str = ""


class EvaluationResult:
    """Metrics by prompt and in the mean, with confidence intervals, all computed from the samples.

    Args:
        samples: ordered by prompt.
        settings: what was asked for.
        failed: by scorer, the samples on which it raised, ran out of time or gave no finite number.
        rows: the finished trajectory of each sample, if they are kept; :meth:`save` leaves them out.

    Raises:
        ValueError: for no samples.
    """

    def __init__(
        self,
        samples: Sequence[EvaluatedSample],
        settings: EvaluationSettings,
        failed: Mapping[str, int] | None = None,
        rows: Sequence[TensorDictBase] | None = None,
    ):
        self.samples, self.settings, self.failed, self.rows = list(samples), settings, dict(failed or {}), rows
        if not self.samples:
            raise ValueError("samples is empty: an evaluation needs at least one completion")

    @cached_property
    def values(self) -> dict[str, dict[int, float]]:
        """By metric, its value for each ``prompt_id``.

        ``"greedy"`` and ``"sampled"`` (the mean of the samples) are of the headline scorer, ``"<scorer>/greedy"`` and
        ``"<scorer>/avg@<n>"`` the same of the others; ``"<scorer>/pass@<k>"`` and ``"<scorer>/maj@<k>"`` are of all. In
        a mixture of several tasks each metric is there once more for each, as ``"tasks/<task>/<metric>"``.
        """
        found = {k: v for scorer in self.settings.scorers for k, v in self._of_scorer(scorer).items()}
        tasks = {s.prompt_id: s.task for s in self.samples}
        names = sorted({task for task in tasks.values() if task is not None})
        if len(names) < 2:
            return found
        return found | {
            f"tasks/{task}/{metric}": {i: value for i, value in of_prompt.items() if tasks[i] == task}
            for task in names
            for metric, of_prompt in found.items()
        }

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """The mean of each metric over its prompts, with the ends of its 95 % confidence interval."""
        return {
            name: mean_interval(torch.tensor(list(of_prompt.values()), dtype=torch.float64), draws=self._draws(name))
            for name, of_prompt in self.values.items()
        }

    @property
    def metrics(self) -> dict[str, float]:
        """``"eval/<metric>"``, with ``_low`` and ``_high``; counts ``"eval/failed"``, ``"eval/abstained"``."""
        metrics = {}
        for name, (mean, low, high) in self.intervals.items():
            metrics |= {f"eval/{name}": mean, f"eval/{name}_low": low, f"eval/{name}_high": high}
        counts = {"failed": self.failed, "abstained": self.abstained}
        return metrics | {f"eval/{name}": float(sum(count.values())) for name, count in counts.items()}

    @property
    def plain_metrics(self) -> dict[str, float | None]:
        """:attr:`metrics` with None for what is not finite, as JSON takes them."""
        return {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}

    @property
    def abstained(self) -> dict[str, int]:
        """By scorer, the samples to which it gave no score without failing."""
        missing = {name: sum(s.scores[name] is None for s in self.samples) for name in self.settings.scorers}
        return {name: number - self.failed.get(name, 0) for name, number in missing.items()}

    def table(self, limit: int | None = None) -> list[dict[str, Any]]:
        """The greedy completions (or all, if there are none) as plain dictionaries for people to read."""
        greedy = [s for s in self.samples if s.sample is None]
        return [self._readable(s) for s in (greedy or self.samples)[:limit]]

    def summary(self) -> str:
        """The metrics as lines of text."""
        width = max(map(len, self.intervals))
        lines = [
            f"{name:<{width}}  {mean:.4g}  [{low:.4g}, {high:.4g}]"
            for name, (mean, low, high) in self.intervals.items()
        ]
        prompts, truncated = len({s.prompt_id for s in self.samples}), sum(s.truncated for s in self.samples)
        lines.append(f"{prompts} prompts, {len(self.samples)} completions, {truncated} of them cut off")
        for verb, counts in (("failed", self.failed), ("abstained", self.abstained)):
            lines += [f"scorer {name} {verb} on {n} of them, which count 0" for name, n in counts.items() if n]
        return "\n".join(lines)

    def save(self, directory: str | os.PathLike, *, format: Literal["parquet", "jsonl"] = "parquet") -> Path:
        """Writes ``samples.parquet`` or ``samples.jsonl``, one row a completion, and then ``evaluation.json``.

        Args:
            directory: where to; made if it does not exist.
            format: of the completions. Both take the columns of the dataset as one of JSON text.

        Raises:
            ValueError: for another format.
        """
        check_format(format)
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _SUMMARY).unlink(missing_ok=True)  # an older one must not stand beside the new completions
        for other in directory.glob(f"{_SAMPLES}.*"):
            other.unlink()
        rows = [_flat(sample) for sample in self.samples]
        if format == "parquet":
            _write_parquet(rows, self.settings.scorers, directory / f"{_SAMPLES}.parquet")
        else:
            lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
            (directory / f"{_SAMPLES}.jsonl").write_text("".join(lines), encoding="utf-8")
        summary = {"settings": asdict(self.settings), "metrics": self.plain_metrics, "failed": self.failed}
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
        (directory / _SUMMARY).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        return directory

    @classmethod
    def load(cls, directory: str | os.PathLike) -> EvaluationResult:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: if the directory holds no finished evaluation.
        """
        directory = Path(directory)
        if not (directory / _SUMMARY).is_file():
            raise FileNotFoundError(f"{directory} holds no {_SUMMARY}, so no finished evaluation: save one there first")
        summary = json.loads((directory / _SUMMARY).read_text(encoding="utf-8"))
        settings = summary["settings"]
        settings |= {name: tuple(settings[name]) for name in ("scorers", "ks")}
        if (directory / f"{_SAMPLES}.parquet").is_file():
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(directory / f"{_SAMPLES}.parquet").to_pylist()
        else:
            text = (directory / f"{_SAMPLES}.jsonl").read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.split("\n") if line]
        samples = [_sample(row, settings["scorers"]) for row in rows]
        return cls(samples, EvaluationSettings(**settings), summary["failed"])

    def _of_scorer(self, scorer: str) -> dict[str, dict[int, float]]:
        """All metrics of one scorer. The headline's means go by short names."""
        asked, found = self.settings, {}
        headline, n = scorer == asked.scorers[0], asked.num_samples
        if asked.greedy:
            found["greedy" if headline else f"{scorer}/greedy"] = self._greedy(scorer)
        if not n:
            return found
        scores = {i: [s.score(scorer) for s in group] for i, group in self._groups.items()}
        found["sampled" if headline else f"{scorer}/avg@{n}"] = {i: math.fsum(g) / n for i, g in scores.items()}
        stacked = torch.tensor(list(scores.values()), dtype=torch.float64)
        for k in asked.ks:
            found[f"{scorer}/pass@{k}"] = dict(zip(scores, best_at_k(stacked, k).tolist(), strict=True))
        for k in asked.ks if asked.votes else ():
            if k > 1:  # a vote of one is its sample
                found[f"{scorer}/maj@{k}"] = {
                    i: maj_at_k([s.extracted for s in self._groups[i]], group, k) for i, group in scores.items()
                }
        return found

    def _greedy(self, scorer: str) -> dict[int, float]:
        return {s.prompt_id: s.score(scorer) for s in self.samples if s.sample is None}

    @cached_property
    def _groups(self) -> dict[int, list[EvaluatedSample]]:
        groups: dict[int, list[EvaluatedSample]] = {}
        for sample in self.samples:
            if sample.sample is not None:
                groups.setdefault(sample.prompt_id, []).append(sample)
        return groups

    def _draws(self, metric: str) -> float:
        """Independent draws behind a prompt's value: its samples, in disjoint sets of ``k``."""
        kind, _, k = metric.rpartition("/")[2].partition("@")
        if kind == "greedy":
            return 1.0
        return self.settings.num_samples / (int(k) if kind in ("pass", "maj") else 1)

    def _readable(self, sample: EvaluatedSample) -> dict[str, Any]:
        entry = {"prompt": sample.prompt, "completion": sample.completion, **sample.columns}
        scores = {name: math.nan if value is None else value for name, value in sample.scores.items()}
        entry["reward"] = scores[self.settings.scorers[0]]
        return entry | {name: scores[name] for name in self.settings.scorers[1:]} | {"truncated": sample.truncated}


def check_format(format: str) -> None:
    """Refuse a file format that :meth:`EvaluationResult.save` does not write."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} must be one of {FORMATS}")


def _flat(sample: EvaluatedSample) -> dict[str, Any]:
    """A row of the saved table."""
    row = {name: value for name, value in vars(sample).items() if name not in ("scores", "columns")}
    row |= {name: _encodable(row[name]) for name in ("prompt", "completion", "extracted", "task")}
    row |= {f"score/{name}": value for name, value in sample.scores.items()}
    return row | {"columns": json.dumps(sample.columns, default=str)}


def _encodable(text: str | None) -> str | None:
    """Text that a file can take: a sampled byte sequence may decode to half a surrogate pair."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sample(row: dict[str, Any], scorers: Sequence[str]) -> EvaluatedSample:
    scores = {name: row.pop(f"score/{name}") for name in scorers}
    return EvaluatedSample(scores=scores, **(row | {"columns": json.loads(row["columns"])}))


def _write_parquet(rows: Sequence[dict[str, Any]], scorers: Sequence[str], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    text, whole = pyarrow.string(), pyarrow.int64()
    types = {"prompt_id": whole, "sample": whole, "prompt": text, "completion": text, "extracted": text, "seed": whole}
    types |= {"truncated": pyarrow.bool_(), "tokens": whole, "task": text}
    types |= {f"score/{name}": pyarrow.float64() for name in scorers}
    types["columns"] = text
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=pyarrow.schema(types.items())), path)
