"""Completions of the start model on training prompts, with their returns."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.diagnostics.checks.base import Sample
from torchrl_rloo.diagnostics.checks.probes import score_each, total_values
from torchrl_rloo.evaluation.evaluation import Evaluation, to_reward_batch
from torchrl_rloo.modules import TurnPolicy
from torchrl_rloo.rewards.executors import Executor
from torchrl_rloo.rewards.protocol import RewardCall, RewardFailure, RewardFunction, reward_name


@dataclass(frozen=True)
class StartSamples:
    """Completions of the start model."""

    samples: list[Sample]
    failures: dict[str, tuple[int, str]]
    reward_seconds: float
    sample_seconds: float


def sample_start(
    policy: TurnPolicy,
    dataset: PromptDataset,
    functions: Sequence[RewardFunction],
    *,
    prompts: int,
    num_generations: int,
    weights: Sequence[float] | None = None,
    clip_range: tuple[float, float] | None = None,
    executor: Executor | Mapping[str, Executor] | None = None,
    make_transforms: Callable[[], Sequence[Transform]] = tuple,
    env_kwargs: Mapping[str, Any] | None = None,
) -> StartSamples:
    """Sample groups of training prompts, and score each completion. The run's random streams stay unchanged.

    Args:
        policy: policy with the start weights.
        dataset: training prompts, of which the same ones are chosen in every run.
        functions: reward functions; empty if only the environment rewards.
        prompts: number of prompts, or all if there are fewer.
        num_generations: completions of each prompt.
        weights: one weight per function. None means 1 each.
        clip_range: bounds of the weighted sum.
        executor: executor of the functions, or a mapping from their names. None runs them inline.
        make_transforms: factory of the environment's transforms.
        env_kwargs: further arguments of :class:`~torchrl_rloo.envs.DatasetChatEnv`.
    """
    # Sample with a seed for each completion
    chosen = dataset.select(sorted(random.Random(0).sample(range(len(dataset)), min(prompts, len(dataset)))))
    settings = {"make_transforms": make_transforms, "env_kwargs": env_kwargs, "batch_size": prompts * num_generations}
    start = perf_counter()
    evaluation = Evaluation(policy, chosen, None, num_samples=num_generations, greedy=False, extract=None, **settings)
    result = evaluation.run(keep_rows=True)
    sample_seconds = perf_counter() - start
    # Score the completions, and add what the environment gives
    scored = {reward_name(f): score_each(f, to_reward_batch(result.rows), executor) for f in functions}
    scores = [[r.scores[0] if isinstance(r, RewardCall) else None for r in each] for each in scored.values()]
    given = [sample.scores["return"] for sample in result.samples]
    totals = total_values(scores, weights, clip_range) if functions else [0.0] * len(given)
    values = [None if g is None or t is None else g + t for g, t in zip(given, totals, strict=True)]
    samples = [
        Sample(s.prompt_id, s.completion, value, s.truncated, s.tokens)
        for s, value in zip(result.samples, values, strict=True)
    ]
    failed = {name: [r for r in each if isinstance(r, RewardFailure)] for name, each in scored.items()}
    failures = {name: (len(each), each[0].message) for name, each in failed.items() if each}
    seconds = sum(result.seconds for each in scored.values() for result in each)
    return StartSamples(samples, failures, seconds, sample_seconds)
