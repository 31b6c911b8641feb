"""Evaluation on held-out prompts, by a scorer of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.modules import TurnPolicy
from torchrl_rloo.rewards.protocol import RewardFunction


class Evaluation:
    """Scores a policy on held-out prompts, greedily and sampled, each prompt once.

    Every call sees the same prompts and the same random numbers, and touches no random stream of the run. A scorer that
    raises ends it: a wrong scorer must not look like a poor policy.

    Args:
        policy: the policy being trained; its present weights are evaluated.
        dataset: the held-out prompts.
        scorer: a reward function whose mean is reported: what counts, whatever the training reward is.
        batch_size: prompts at once.
        seed: of the sampled answers.
        make_transforms: makes the environment's own transforms (feedback, tools), as in training; they are not shared
            with it, so that their counters are not either.
        env_kwargs: further arguments of :class:`DatasetChatEnv`.
    """

    def __init__(
        self,
        policy: TurnPolicy,
        dataset: PromptDataset,
        scorer: RewardFunction,
        *,
        batch_size: int = 256,
        seed: int = 0,
        make_transforms: Callable[[], Sequence[Transform]] = tuple,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1")
        self.policy, self.dataset, self.scorer, self.seed = policy, dataset, scorer, seed
        self.batch_size, self.make_transforms, self.env_kwargs = batch_size, make_transforms, dict(env_kwargs or {})

    def __call__(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """``({"eval/greedy": ..., "eval/sampled": ...}, table of greedy completions)``."""
        greedy = self._run(temperature=0.0)
        sampled = self._run()
        metrics = {"eval/greedy": _mean_score(greedy), "eval/sampled": _mean_score(sampled)}
        return metrics, completion_table(greedy)

    def _run(self, **generate_kwargs: Any) -> list[TensorDictBase]:
        kwargs = {k: v for k, v in self.policy.generate_kwargs.items() if k != "do_sample"}
        policy = self.policy.get_new_version(generate_kwargs=kwargs | {"seed": self.seed} | generate_kwargs)
        return [row for part in self._parts() for row in self._collect(part, policy).unbind(0)]

    def _parts(self) -> list[PromptDataset]:
        n = len(self.dataset)
        return [self.dataset.select(range(i, min(i + self.batch_size, n))) for i in range(0, n, self.batch_size)]

    def _collect(self, part: PromptDataset, policy: TurnPolicy) -> TensorDictBase:
        env = DatasetChatEnv(
            part,
            self.policy.tokenizer,
            prompts_per_batch=len(part),
            rewards=RewardTransform(self.scorer, max_failures=1),
            transforms=self.make_transforms(),
            shuffle=False,
            **self.env_kwargs,
        )
        return LLMCollector(env, policy).collect()


def _mean_score(rows: Sequence[TensorDictBase]) -> float:
    """Mean over the prompts; a prompt on which the scorer abstained counts 0."""
    return float(torch.stack([row[keys.REWARD].reshape(()) for row in rows]).double().nan_to_num(0.0).mean())


def completion_table(rows: TensorDictBase | Sequence[TensorDictBase], limit: int | None = None) -> list[dict[str, Any]]:
    """Rows as plain dictionaries for people to read: prompt, completion, other columns, reward and advantage."""
    rows = rows.unbind(0) if isinstance(rows, TensorDictBase) else rows
    return [_readable(row) for row in rows[:limit]]


def _readable(row: TensorDictBase) -> dict[str, Any]:
    entry = {"prompt": _text(row[keys.QUERY]), "completion": _text(row[keys.COMPLETION])}
    entry |= {k: _plain(row[k]) for k in row.keys() if k not in keys.RESERVED}
    entry["reward"] = float(row[keys.REWARD])
    if keys.ADVANTAGE in row.keys():
        entry["advantage"] = float(row[keys.ADVANTAGE])
    return entry | {"truncated": bool(row[keys.TRUNCATED])}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(f"{m['role']}: {m['content']}" for m in value)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value
