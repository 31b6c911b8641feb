"""Evaluation of a policy on held-out prompts."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import token_statistics
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.segments import sampled_versions
from torchrl_rloo.data.templates import image_paths
from torchrl_rloo.diagnostics.transcripts import write_transcripts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.evaluation.result import EvaluatedSample, EvaluationResult, EvaluationSettings
from torchrl_rloo.images.parts import content_text
from torchrl_rloo.modules import Scorer, TurnPolicy, record_log_probs
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.matching import extract_answer, final_answer
from torchrl_rloo.rewards.protocol import (
    RewardBatch,
    RewardFunction,
    check_columns,
    find_missing_columns,
    reward_name,
)
from torchrl_rloo.rewards.registry import RewardSpec, load_reward
from torchrl_rloo.rewards.runner import Quarantine, RewardFailureError, RewardRunner

Scorers = RewardSpec | Mapping[str, RewardSpec | None] | None


class Evaluation:
    """Evaluation of a policy on held-out prompts, with greedy and sampled completions.

    Every call uses the same prompts and random numbers, whatever the batch size, and leaves the run's random streams
    unchanged. If a scorer fails on some completions, their scores count as 0 and the failures are counted. If it fails
    on all, the evaluation raises: a broken scorer must not look like a poor policy.

    Args:
        policy: policy to evaluate, with its current weights. It must use the seeds in the rows.
        dataset: held-out prompts. A column ``"task"`` adds every metric per task.
        scorers: reward function, or its name or settings (:func:`~torchrl_rloo.rewards.load_reward`), or a mapping of
            several by name, whose first is the headline. None in place of a function takes the environment's return.
            Scorers are independent of the training reward.
        num_samples: sampled completions per prompt; 0 disables sampling.
        ks: values of ``k`` for pass@k and maj@k, each at most ``num_samples``. The mean of the samples, which is always
            reported, is pass@1.
        greedy: also complete each prompt greedily.
        generate_kwargs: changes to the policy's sampling settings (``temperature``, ``max_new_tokens``, ...).
        extract: function from a completion's final text to the answer that it votes for, or None if it has none. None
            disables votes and maj@k.
        batch_size: number of concurrent conversations.
        executor: executor that runs the scorers, with its time limit; None runs them inline.
        quarantine: JSON-lines file of completions that a scorer failed on; None writes none.
        seed: seed of the sampled completions.
        make_transforms: factory of the environment's transforms (feedback, tools). They are separate from those of
            training, so their counters are also separate.
        env_kwargs: further arguments of :class:`DatasetChatEnv`.
        label: display name, e.g. of the checkpoint.
        reference: scorer of the frozen reference, for ``eval/sampled_kl``. It must have the policy's sampling settings.
            None leaves the metric out.
        score_limits: arguments of :func:`~torchrl_rloo.modules.record_log_probs` that limit the reference's passes.

    Raises:
        ValueError: if a number is out of range, or arguments cannot be combined.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
        >>> from torchrl_rloo.modules import TransformersWrapper
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("test", size=4))
        >>> policy = TransformersWrapper(
        ...     build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
        ... )
        >>> result = Evaluation(policy, prompts, boxed_accuracy, num_samples=2, ks=[2]).run()
        >>> list(result.values)
        ['greedy', 'sampled', 'boxed_accuracy/pass@2', 'boxed_accuracy/maj@2']
    """

    def __init__(
        self,
        policy: TurnPolicy,
        dataset: PromptDataset,
        scorers: Scorers,
        *,
        num_samples: int = 1,
        ks: Sequence[int] = (),
        greedy: bool = True,
        generate_kwargs: Mapping[str, Any] | None = None,
        extract: Callable[[str], str | None] | None = final_answer,
        batch_size: int = 256,
        executor: Executor | None = None,
        quarantine: str | os.PathLike | Quarantine | None = None,
        seed: int = 0,
        make_transforms: Callable[[], Sequence[Transform]] = tuple,
        env_kwargs: Mapping[str, Any] | None = None,
        label: str = "",
        reference: Scorer | None = None,
        score_limits: Mapping[str, Any] | None = None,
    ):
        dataset = dataset.for_tokenizer(policy.tokenizer)
        self.policy, self.dataset, self.batch_size, self.extract = policy, dataset, batch_size, extract
        self.reference, self.score_limits = reference, dict(score_limits or {})
        self.scorers, self.executor = name_scorers(scorers), executor
        self.quarantine = quarantine if isinstance(quarantine, Quarantine) else Quarantine(quarantine)
        self.make_transforms, self.env_kwargs = make_transforms, dict(env_kwargs or {})
        # Record all settings that affect scores, so that comparisons can list differences
        sampling = {k: v for k, v in policy.generate_kwargs.items() if k != "do_sample"} | dict(generate_kwargs or {})
        self.settings = EvaluationSettings(
            scorers=tuple(self.scorers),
            num_samples=num_samples,
            ks=tuple(ks),
            greedy=greedy,
            votes=extract is not None,
            seed=seed,
            generate_kwargs={k: v for k, v in sampling.items() if k != "seed"},
            fingerprint=dataset.fingerprint,
            label=label,
        )
        # Report wrong arguments now, not when the evaluation runs
        self._check()
        self._check_columns()
        self._make_policy()  # raise now on an unknown argument in generate_kwargs

    def _check(self) -> None:
        settings = self.settings
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        if settings.num_samples < 0 or not (settings.num_samples or settings.greedy):
            raise ValueError(f"num_samples={settings.num_samples} must be at least {0 if settings.greedy else 1}")
        if bad := [k for k in settings.ks if not 1 <= k <= settings.num_samples]:
            raise ValueError(
                f"ks={settings.ks} must be between 1 and num_samples={settings.num_samples}, got {bad}; raise "
                "num_samples"
            )
        if settings.num_samples > 1 and settings.generate_kwargs.get("temperature", 1.0) == 0:
            raise ValueError(
                f"temperature=0 cannot be combined with num_samples={settings.num_samples}: all samples would be "
                "equal; raise temperature"
            )
        distribution = getattr(self.reference, "distribution", None)
        if distribution is not None and distribution != (sampled := self._make_policy().distribution):
            raise ValueError(
                f"reference has the distribution {distribution}, but the samples have {sampled}; give both the same "
                "sampling settings"
            )

    def _check_columns(self) -> None:
        """Raise if a scorer requires a column that neither the dataset nor a transform provides."""
        functions, columns = [f for f in self.scorers.values() if f is not None], self.dataset.columns
        if any(find_missing_columns(f, columns) for f in functions) and not self.make_transforms():
            check_columns(functions, columns, "scorer")

    def __call__(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run the evaluation and return its metrics and the table of greedy completions; see :meth:`run`."""
        result = self.run()
        return result.metrics, result.table()

    def run(self, *, keep_rows: bool = False, policy_version: int | None = None) -> EvaluationResult:
        """Complete all prompts and score all completions.

        Args:
            keep_rows: keep the finished rows in the result, with tokens and messages, at a few kB each.
            policy_version: version of the policy's weights, for kept rows whose engine reports none. None leaves their
                version out.

        Returns:
            Every completion with its scores, and the metrics.

        Raises:
            RuntimeError: if a scorer fails on every completion.
        """
        # Complete each prompt greedily, then by sampling
        settings, prompts = self.settings, range(len(self.dataset))
        requests = [(i, None) for i in prompts] if settings.greedy else []
        rows = self._complete(requests, greedy=True)
        sampled = [(i, k) for i in prompts for k in range(settings.num_samples)]
        rows += self._complete(sampled, greedy=False)
        self._score_reference(rows[len(requests) :])
        # Score the completions with each scorer, except those of conversations that failed
        batch, scores, failed = to_reward_batch(rows), {}, {}
        usable = [i for i, row in enumerate(rows) if not row[keys.REWARD].isnan().any()]
        for name, scorer in self.scorers.items():
            if scorer is None:
                scores[name], failed[name] = _returns(rows), 0
            else:
                scores[name] = [None] * len(rows)
                given, failed[name] = self._score(name, scorer, batch.select(usable))
                for i, score in zip(usable, given, strict=True):
                    scores[name][i] = score
        samples = [
            self._sample(batch, i, place, {name: column[i] for name, column in scores.items()}, rows[i])
            for i, place in enumerate(requests + sampled)
        ]
        for row in rows if keep_rows else ():
            _set_version(row, policy_version)
        return EvaluationResult(samples, settings, failed, rows if keep_rows else None)

    def _score_reference(self, rows: Sequence[TensorDictBase]) -> None:
        """Write the reference's log-probs into the sampled rows, except those of conversations that failed."""
        usable = [
            row for row in rows if not row[keys.REWARD].isnan().any() and keys.PREVIOUS_SEGMENTS not in row.keys()
        ]
        if self.reference is not None and usable:
            record_log_probs(self.reference, stack_rows(usable), log_probs=keys.REF_LOG_PROBS, **self.score_limits)

    def _complete(self, requests: Sequence[tuple[int, int | None]], *, greedy: bool) -> list[TensorDictBase]:
        """Return a finished row for each ``(prompt, sample)``, in order."""
        policy = self._make_policy(temperature=0.0) if greedy else self._make_policy()
        parts = [requests[start : start + self.batch_size] for start in range(0, len(requests), self.batch_size)]
        return [row for part in parts for row in self._collect(part, policy)]

    def _collect(self, part: Sequence[tuple[int, int | None]], policy: TurnPolicy) -> list[TensorDictBase]:
        prompts = self.dataset.select(i for i, _ in part)
        env = DatasetChatEnv(
            prompts,
            self.policy.tokenizer,
            prompts_per_batch=len(prompts),
            transforms=self.make_transforms(),
            shuffle=False,
            **self.env_kwargs,
        )
        seeds = [self._seed(*place) for place in part]

        # Give each conversation its own seed, so that samples do not depend on the batch
        def seeded_policy(rows: TensorDictBase) -> TensorDictBase:
            for row in rows.unbind(0):
                row.set(keys.SEED, torch.tensor(seeds[int(row[keys.PROMPT_ID])]))
            return policy(rows)

        collector = LLMCollector(env, seeded_policy)
        try:
            rows = collector.collect().unbind(0)
        finally:
            collector.shutdown(close_env=False)
        found = {int(row[keys.PROMPT_ID]): row for row in rows}
        return [found[i] for i in range(len(part))]

    def _make_policy(self, **changes: Any) -> TurnPolicy:
        kwargs = self.settings.generate_kwargs | {"seed": self.settings.seed} | changes
        return self.policy.get_new_version(generate_kwargs=kwargs)

    def _seed(self, prompt: int, sample: int | None) -> int:
        digest = hashlib.sha256(f"{self.settings.seed} {prompt} {sample}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % 2**62

    def _score(self, name: str, scorer: RewardFunction, batch: RewardBatch) -> tuple[list[float | None], int]:
        """Return the scores of all completions and the number of failures of the scorer."""
        runner = RewardRunner(
            scorer,
            executor=self.executor,
            max_consecutive_failures=max(1, len(batch)),
            quarantine=self.quarantine,
        )
        try:
            scores = runner(batch).scores[0]
        except RewardFailureError as error:
            raise RuntimeError(
                f"scorer {name} failed on all {len(batch)} completions: {error.report} "
                "Fix it, or set scorers= to others"
            ) from error
        finally:
            runner.close()
        kinds = {key.rpartition("/")[2]: number for key, number in runner.counts.items()}
        return scores, sum(number for kind, number in kinds.items() if kind not in ("duplicates", "repeated"))

    def _sample(
        self,
        batch: RewardBatch,
        i: int,
        place: tuple[int, int | None],
        scores: dict[str, float | None],
        row: TensorDictBase,
    ) -> EvaluatedSample:
        columns = {name: values[i] for name, values in batch.columns.items()}
        task = columns.pop(keys.TASK, None)
        return EvaluatedSample(
            prompt_id=place[0],
            sample=place[1],
            prompt=_text(batch.prompts[i]),
            completion=_text(batch.completions[i]),
            scores=scores,
            extracted=None if self.extract is None else extract_answer(self.extract, batch.completions[i]),
            seed=self._seed(*place),
            truncated=batch.truncated[i],
            tokens=len(batch.completion_ids[i]),
            task=None if task is None else str(task),
            columns=columns,
            **_statistics(row, place),
        )


def _set_version(row: TensorDictBase, version: int | None) -> None:
    """Replace the version that the evaluation's own collector counted, unless the engine reported those of tokens."""
    reported = sampled_versions(row)
    if reported is None or not len(reported):
        row.pop(keys.POLICY_VERSION, None)
        if version is not None:
            row.set(keys.POLICY_VERSION, torch.tensor(version))


def name_scorers(scorers: Scorers) -> dict[str, RewardFunction | None]:
    """Return scorers by name, the headline first; None stands for the environment's return."""
    if not isinstance(scorers, Mapping) or "_target_" in scorers:
        scorers = None if scorers is None else load_reward(scorers)
        scorers = {"return" if scorers is None else reward_name(scorers): scorers}
    if not scorers:
        raise ValueError("scorers is empty; pass at least one reward function")
    if bad := [name for name in scorers if "/" in name or name in ("greedy", "sampled")]:
        raise ValueError(f"scorer names {bad} clash with metric names; rename them, without '/'")
    return {name: None if scorer is None else load_reward(scorer) for name, scorer in scorers.items()}


def to_reward_batch(rows: Sequence[TensorDictBase]) -> RewardBatch:
    """Convert finished rows to the input of reward functions."""
    names = [name for name in rows[0].keys() if name not in keys.RESERVED]
    return RewardBatch(
        prompts=[row[keys.QUERY] for row in rows],
        completions=[row[keys.COMPLETION] for row in rows],
        completion_ids=[row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() for row in rows],
        columns={name: [_plain(row[name]) for row in rows] for name in names},
        truncated=[bool(row[keys.TRUNCATED]) for row in rows],
    )


def _statistics(row: TensorDictBase, place: tuple[int, int | None]) -> dict[str, Any]:
    """Return surprisal, KL and n-grams of a sampled row; greedy tokens are not samples of the distribution."""
    if place[1] is None:
        return {}
    found = token_statistics(row)
    sums = {"surprisal": keys.SURPRISAL, "kl_to_ref": keys.KL_TO_REF}
    sums = {name: float(found[key]) for name, key in sums.items() if key in found}
    return sums | {"ngrams": found[keys.NGRAM_SKETCH].tolist()}


def _returns(rows: Sequence[TensorDictBase]) -> list[float | None]:
    values = [float(row[keys.REWARD]) for row in rows]
    return [value if math.isfinite(value) else None for value in values]


def completion_table(rows: TensorDictBase | Sequence[TensorDictBase], limit: int | None = None) -> list[dict[str, Any]]:
    """Convert rows to readable dictionaries: prompt, completion, other columns, reward and advantage.

    Rows of conversations with images also have ``"images"``, their paths in order.

    Args:
        rows: finished trajectories, batch size ``[B]``.
        limit: largest number of rows; None converts all.
    """
    rows = rows.unbind(0) if isinstance(rows, TensorDictBase) else rows
    return [_to_record(row) for row in rows[:limit]]


def _to_record(row: TensorDictBase) -> dict[str, Any]:
    entry = {"prompt": _text(row[keys.QUERY]), "completion": _text(row[keys.COMPLETION])}
    entry |= {k: _plain(row[k]) for k in row.keys() if k not in keys.RESERVED}
    messages = [m for part in (row[keys.QUERY], row[keys.COMPLETION]) if not isinstance(part, str) for m in part]
    if paths := image_paths(messages):
        entry["images"] = paths
    if keys.LOG_EXTRA in row.keys(True):
        entry = row[keys.LOG_EXTRA] | entry
    entry["reward"] = float(row[keys.REWARD])
    if keys.ADVANTAGE in row.keys():
        entry["advantage"] = float(row[keys.ADVANTAGE])
    return entry | {"truncated": bool(row[keys.TRUNCATED])}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(f"{m['role']}: {content_text(m['content'])}" for m in value)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def write_evaluation_transcripts(
    path: str | Path,
    result: EvaluationResult,
    tokenizer,
    *,
    title: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the conversations of an evaluation as a page, with its scores in place of rewards.

    See :func:`write_transcripts`.

    Args:
        path: HTML file to write.
        result: result of ``Evaluation.run(keep_rows=True)``.
        tokenizer: tokenizer of the policy.
        title: title of the page; empty takes the evaluation's label.
        settings: settings to show in addition to those of the evaluation; None adds none.

    Returns:
        ``path``.

    Raises:
        ValueError: if the result has no rows.
    """
    if result.rows is None:
        raise ValueError("result has no rows; keep them with Evaluation.run(keep_rows=True)")
    pairs = sorted(zip(result.samples, result.rows, strict=True), key=lambda pair: pair[0].prompt_id)
    scorers = result.settings.scorers
    fields = [
        {
            "group": sample.prompt_id,
            "kind": "greedy" if sample.sample is None else f"sample {sample.sample}",
            "reward": sample.scores[scorers[0]],
            "rewards": [sample.scores[name] for name in scorers],
            "columns": {"extracted": sample.extracted, **sample.columns},
        }
        for sample, _ in pairs
    ]
    # Show metrics and settings of the evaluation with the given settings
    evaluation = {name: value for name, value in vars(result.settings).items() if name != "scorers"}
    metrics = {name: f"{mean:.4g} [{low:.4g}, {high:.4g}]" for name, (mean, low, high) in result.intervals.items()}
    return write_transcripts(
        path,
        [row for _, row in pairs],
        tokenizer,
        title=title or f"Evaluation {result.settings.label}".strip(),
        settings={**(settings or {}), "metrics": metrics, "evaluation": evaluation},
        reward_names=scorers,
        fields=fields,
    )
