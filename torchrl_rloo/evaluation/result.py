"""Evaluation results: every completion with its scores, and the metrics computed from them."""

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

from torchrl_rloo.diagnostics.metrics import length_metrics, share_of_equal_groups
from torchrl_rloo.evaluation.statistics import best_at_k, maj_at_k, mean_interval
from torchrl_rloo.functional.statistics import Interval, distinct_share, nanstd, overlap
from torchrl_rloo.runtime.files import atomic_write, make_folder, write_text

FORMATS = ("parquet", "jsonl")  # file formats of saved completions

_SUMMARY, _SAMPLES = "evaluation.json", "samples"


@dataclass(frozen=True)
class EvaluatedSample:
    """One completion of an evaluation, with its scores."""

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
    surprisal: float | None = None
    kl_to_ref: float | None = None
    ngrams: list[int] | None = None

    def score(self, scorer: str) -> float:
        """Return the score for the metrics, 0 if the scorer abstained or failed."""
        value = self.scores[scorer]
        return 0.0 if value is None else value


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation."""

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
    """Samples of an evaluation, with metrics per prompt, means and confidence intervals computed from them.

    Args:
        samples: completions, ordered by prompt.
        settings: settings of the evaluation.
        failed: number of samples by scorer on which it raised, timed out or returned no finite number.
        rows: finished trajectory of each sample, or None; :meth:`save` leaves them out.

    Raises:
        ValueError: if ``samples`` is empty.
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
            raise ValueError("samples is empty; an evaluation requires at least one completion")

    @cached_property
    def values(self) -> dict[str, dict[int, float]]:
        """Value of each metric by ``prompt_id``.

        ``"greedy"`` and ``"sampled"`` (the mean of the samples) are scores of the headline scorer. Other scorers have
        ``"<scorer>/greedy"`` and ``"<scorer>/avg@<n>"``, and all have ``"<scorer>/pass@<k>"`` and
        ``"<scorer>/maj@<k>"``. A mixture of tasks adds every metric per task, as ``"tasks/<task>/<metric>"``.
        """
        found = {k: v for scorer in self.settings.scorers for k, v in self._scorer_metrics(scorer).items()}
        tasks = {s.prompt_id: s.task for s in self.samples}
        names = sorted({task for task in tasks.values() if task is not None})
        if len(names) < 2:
            return found
        return found | {
            f"tasks/{task}/{metric}": {i: value for i, value in by_prompt.items() if tasks[i] == task}
            for task in names
            for metric, by_prompt in found.items()
        }

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Mean of each metric over its prompts, with the bounds of its 95 % confidence interval."""
        return {
            name: mean_interval(
                torch.tensor(list(by_prompt.values()), dtype=torch.float64), draws=self._independent_draws(name)
            )
            for name, by_prompt in self.values.items()
        }

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by name: means with ``_low`` and ``_high``, lengths, truncation, failed and abstained scores."""
        metrics = {}
        for name, (mean, low, high) in self.intervals.items():
            metrics |= {f"eval/{name}": mean, f"eval/{name}_low": low, f"eval/{name}_high": high}
        for kind, samples in (("greedy", self._of_kind(True)), ("sampled", self._of_kind(False))):
            if samples:
                lengths = torch.tensor([s.tokens for s in samples], dtype=torch.float64)
                found = length_metrics(lengths, torch.tensor([s.truncated for s in samples]))
                names = {name: name.removeprefix("completions/").replace("mean_length", "length") for name in found}
                metrics |= {f"eval/{kind}_{names[name]}": float(value) for name, value in found.items()}
        metrics |= sample_metrics(list(self._groups.values()), answers=self.settings.votes)
        if self.settings.num_samples > 1:
            scores = [[s.scores[self.settings.scorers[0]] for s in group] for group in self._groups.values()]
            scores = torch.tensor([[math.nan if v is None else v for v in group] for group in scores])
            places = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
            metrics["eval/sampled_reward_std"] = float(nanstd(scores.flatten()))
            metrics["eval/sampled_frac_reward_zero_std"] = float(share_of_equal_groups(scores.flatten(), places))
        counts = {"failed": self.failed, "abstained": self.abstained}
        return metrics | {f"eval/{name}": float(sum(count.values())) for name, count in counts.items()}

    def metrics_of_set(self, name: str) -> dict[str, float]:
        """Return :attr:`metrics` as those of a further set, ``"eval/<name>/..."``; an empty name changes nothing."""
        start = f"eval/{name}/" if name else "eval/"
        return {start + key.removeprefix("eval/"): value for key, value in self.metrics.items()}

    @property
    def plain_metrics(self) -> dict[str, float | None]:
        """:attr:`metrics` for JSON, with None for values that are not finite."""
        return {name: value if math.isfinite(value) else None for name, value in self.metrics.items()}

    @property
    def abstained(self) -> dict[str, int]:
        """Number of samples by scorer on which it abstained."""
        missing = {name: sum(s.scores[name] is None for s in self.samples) for name in self.settings.scorers}
        return {name: number - self.failed.get(name, 0) for name, number in missing.items()}

    def _of_kind(self, greedy: bool) -> list[EvaluatedSample]:
        return [sample for sample in self.samples if (sample.sample is None) == greedy]

    def table(self, limit: int | None = None, *, page: str | None = None) -> list[dict[str, Any]]:
        """Return the greedy completions, or all if there are none, as readable dictionaries.

        Args:
            limit: largest number of completions; None takes all.
            page: address of the page of :func:`write_evaluation_transcripts`. Each dictionary then has the address of
                its conversation as ``transcript``. None adds none.
        """
        greedy = [s for s in self.samples if s.sample is None]
        records = [(s, self._to_record(s)) for s in (greedy or self.samples)[:limit]]
        if page is None:
            return [record for _, record in records]
        places = {id(s): i for i, s in enumerate(sorted(self.samples, key=lambda s: s.prompt_id))}
        return [record | {"transcript": f"{page}#row={places[id(s)]}"} for s, record in records]

    def summary(self) -> str:
        """Return the metrics as lines of text."""
        width = max(map(len, self.intervals))
        lines = [
            f"{name:<{width}}  {mean:.4g}  [{low:.4g}, {high:.4g}]"
            for name, (mean, low, high) in self.intervals.items()
        ]
        prompts, truncated = len({s.prompt_id for s in self.samples}), sum(s.truncated for s in self.samples)
        lines.append(f"{prompts} prompts, {len(self.samples)} completions, {truncated} truncated")
        found = sample_metrics(list(self._groups.values()), answers=self.settings.votes)
        lines += [f"{name.removeprefix('eval/'):<{width}}  {value:.4g}" for name, value in found.items()]
        for verb, counts in (("failed", self.failed), ("abstained", self.abstained)):
            lines += [f"scorer {name} {verb} on {n} completions, which count as 0" for name, n in counts.items() if n]
        return "\n".join(lines)

    def save(self, directory: str | os.PathLike, *, format: Literal["parquet", "jsonl"] = "parquet") -> Path:
        """Write ``samples.parquet`` or ``samples.jsonl``, one row per completion, then ``evaluation.json``.

        Args:
            directory: output directory, created if missing.
            format: file format of the completions. Both store the dataset's columns as one column of JSON text.

        Returns:
            ``directory`` as a path.

        Raises:
            ValueError: if ``format`` is unknown.
        """
        check_format(format)
        directory = Path(directory)
        make_folder(directory)
        # Delete an older evaluation first: its summary must not describe the new completions
        (directory / _SUMMARY).unlink(missing_ok=True)
        for other in directory.glob(f"{_SAMPLES}.*"):
            other.unlink()
        rows = [_to_row(sample) for sample in self.samples]
        if format == "parquet":
            _write_parquet(rows, self.settings.scorers, directory / f"{_SAMPLES}.parquet")
        else:
            lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
            write_text(directory / f"{_SAMPLES}.jsonl", "".join(lines))
        summary = {"settings": asdict(self.settings), "metrics": self.plain_metrics, "failed": self.failed}
        text = json.dumps(summary, indent=2, ensure_ascii=False, default=str)
        write_text(directory / _SUMMARY, text + "\n")
        return directory

    @classmethod
    def load(cls, directory: str | os.PathLike) -> EvaluationResult:
        """Load an evaluation written by :meth:`save`.

        Raises:
            FileNotFoundError: if the directory has no finished evaluation.
        """
        directory = Path(directory)
        if not (directory / _SUMMARY).is_file():
            raise FileNotFoundError(f"directory={directory} has no {_SUMMARY}; save an evaluation there first")
        summary = json.loads((directory / _SUMMARY).read_text(encoding="utf-8"))
        settings = summary["settings"]
        settings |= {name: tuple(settings[name]) for name in ("scorers", "ks")}
        if (directory / f"{_SAMPLES}.parquet").is_file():
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(directory / f"{_SAMPLES}.parquet").to_pylist()
        else:
            text = (directory / f"{_SAMPLES}.jsonl").read_text(encoding="utf-8")
            rows = [json.loads(line) for line in text.split("\n") if line]
        samples = [_from_row(row, settings["scorers"]) for row in rows]
        return cls(samples, EvaluationSettings(**settings), summary["failed"])

    def _scorer_metrics(self, scorer: str) -> dict[str, dict[int, float]]:
        """Return all metrics of one scorer; the means of the headline have short names."""
        settings, found = self.settings, {}
        headline, n = scorer == settings.scorers[0], settings.num_samples
        # Means of the greedy completions and of the samples
        if settings.greedy:
            found["greedy" if headline else f"{scorer}/greedy"] = self._greedy_scores(scorer)
        if not n:
            return found
        scores = {i: [s.score(scorer) for s in group] for i, group in self._groups.items()}
        found["sampled" if headline else f"{scorer}/avg@{n}"] = {i: math.fsum(g) / n for i, g in scores.items()}
        # pass@k and maj@k over subsets of the samples
        stacked = torch.tensor(list(scores.values()), dtype=torch.float64)
        for k in settings.ks:
            found[f"{scorer}/pass@{k}"] = dict(zip(scores, best_at_k(stacked, k).tolist(), strict=True))
        for k in settings.ks if settings.votes else ():
            if k > 1:  # the vote of one sample is the sample itself
                found[f"{scorer}/maj@{k}"] = {
                    i: maj_at_k([s.extracted for s in self._groups[i]], group, k) for i, group in scores.items()
                }
        return found

    def _greedy_scores(self, scorer: str) -> dict[int, float]:
        return {s.prompt_id: s.score(scorer) for s in self.samples if s.sample is None}

    @cached_property
    def _groups(self) -> dict[int, list[EvaluatedSample]]:
        groups: dict[int, list[EvaluatedSample]] = {}
        for sample in self.samples:
            if sample.sample is not None:
                groups.setdefault(sample.prompt_id, []).append(sample)
        return groups

    def _independent_draws(self, metric: str) -> float:
        """Return the number of independent draws behind a prompt's value: samples, or disjoint sets of ``k``."""
        kind, _, k = metric.rpartition("/")[2].partition("@")
        if kind == "greedy":
            return 1.0
        return self.settings.num_samples / (int(k) if kind in ("pass", "maj") else 1)

    def _to_record(self, sample: EvaluatedSample) -> dict[str, Any]:
        entry = {"prompt": sample.prompt, "completion": sample.completion, **sample.columns}
        scores = {name: math.nan if value is None else value for name, value in sample.scores.items()}
        entry["reward"] = scores[self.settings.scorers[0]]
        return entry | {name: scores[name] for name in self.settings.scorers[1:]} | {"truncated": sample.truncated}


def check_format(format: str) -> None:
    """Raise if :meth:`EvaluationResult.save` does not support a file format."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r} must be one of {FORMATS}")


def _to_row(sample: EvaluatedSample) -> dict[str, Any]:
    """Return a sample as a row of the saved table."""
    row = {name: value for name, value in vars(sample).items() if name not in ("scores", "columns")}
    row |= {name: _escape_surrogates(row[name]) for name in ("prompt", "completion", "extracted", "task")}
    row |= {f"score/{name}": value for name, value in sample.scores.items()}
    return row | {"columns": json.dumps(sample.columns, default=str)}


def _escape_surrogates(text: str | None) -> str | None:
    """Escape lone surrogates, which sampled bytes may decode to and UTF-8 files reject."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _from_row(row: dict[str, Any], scorers: Sequence[str]) -> EvaluatedSample:
    scores = {name: row.pop(f"score/{name}") for name in scorers}
    return EvaluatedSample(scores=scores, **(row | {"columns": json.loads(row["columns"])}))


def _write_parquet(rows: Sequence[dict[str, Any]], scorers: Sequence[str], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    # Set the types explicitly, since a column without values has none to infer
    text, integer = pyarrow.string(), pyarrow.int64()
    types = {
        "prompt_id": integer,
        "sample": integer,
        "prompt": text,
        "completion": text,
        "extracted": text,
        "seed": integer,
    }
    types |= {"truncated": pyarrow.bool_(), "tokens": integer, "task": text}
    types |= {"surprisal": pyarrow.float64(), "kl_to_ref": pyarrow.float64(), "ngrams": pyarrow.list_(integer)}
    types |= {f"score/{name}": pyarrow.float64() for name in scorers}
    types["columns"] = text
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=pyarrow.schema(types.items())), file)


def sample_metrics(groups: Sequence[Sequence[EvaluatedSample]], *, answers: bool) -> dict[str, float]:
    """Return entropy and KL per sampled token, and how different the samples of a prompt are."""
    samples, metrics = [sample for group in groups for sample in group], {}
    for name, entry in (("entropy", "surprisal"), ("kl", "kl_to_ref")):
        known = [s for s in samples if getattr(s, entry) is not None]
        if known:
            total = sum(getattr(s, entry) for s in known)
            metrics[f"eval/sampled_{name}"] = total / max(1, sum(s.tokens for s in known))
    several = [group for group in groups if len(group) > 1]
    if several:
        metrics["eval/sampled_distinct"] = _mean([distinct_share([s.completion for s in group]) for group in several])
    if several and answers:
        shares = [distinct_share([s.extracted for s in group]) for group in several]
        metrics["eval/sampled_distinct_answers"] = _mean(shares)
    if several and all(s.ngrams is not None for s in samples):
        shared = [overlap([torch.tensor(s.ngrams, dtype=torch.int64) for s in group]) for group in several]
        metrics["eval/sampled_ngram_overlap"] = _mean(shared)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
