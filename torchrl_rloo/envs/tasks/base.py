"""Task: prompts, rewards and an evaluation metric that belong together."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from torchrl.envs import Transform

from torchrl_rloo.data.prompts import PromptDataset, load_prompts, split_prompts
from torchrl_rloo.data.sampling import PromptSampler
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.rewards.protocol import RewardFunction, reward_name
from torchrl_rloo.rewards.registry import load_reward

_LOGGER = logging.getLogger(__name__)

Scorer = RewardFunction | Mapping[str, RewardFunction] | None
EMBEDDED = "embedded"  # the source that names a task's synthetic rows
_WHOLE = {"limit": None, "streaming": None}  # options of held-out prompts


class TaskBase:
    """Interface that environments, runs and evaluations use of a task, or of a mixture of tasks.

    Attributes:
        name: name of the task.
        reward_weights: one weight per reward function; None means 1 each.
        extract_answer: ``f(text) -> answer | None`` for majority votes; None if the task has no votes.
        limits: limits of a conversation, as arguments of :class:`~torchrl_rloo.envs.ChatEnv`.
        different_limits: values by task of each limit that the tasks of a mixture do not share, which the user sets.
        takes_arguments: whether :meth:`load` takes ``arguments`` of an environment or a family of problems.
    """

    name: str
    takes_arguments = False
    reward_weights: Sequence[float] | None
    extract_answer: Callable[[str], str | None] | None = None
    limits: Mapping[str, Any] = MappingProxyType({})
    different_limits: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def load(self, source: Any = None, **kwargs: Any) -> tuple[PromptDataset, PromptDataset]:
        """Load training and held-out prompts.

        Args:
            source: source of the prompts; None loads the task's default.
            **kwargs: options of the subclass.

        Returns:
            ``(train, held_out)``.
        """
        raise NotImplementedError

    def load_held_out(self, source: Any, *, eval_size: int = 256, **kwargs: Any) -> PromptDataset:
        """Load held-out prompts from a separate source."""
        raise ValueError(
            f"source={source!r} cannot hold the held-out prompts of every task of a {self.name}; set one per task"
        )

    def make_rewards(self) -> list[RewardFunction]:
        """Return the reward functions; an empty list if the environment itself rewards."""
        raise NotImplementedError

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the evaluation metric, called like a reward; None uses the return that the environment gives."""
        raise NotImplementedError

    def make_transforms(self) -> list[Transform]:
        """Return new transforms that answer turns (tools, feedback, a game); an empty list for single-turn tasks."""
        return []

    def make_sampler(self, dataset: PromptDataset) -> PromptSampler | None:
        """Return a sampler that chooses the prompts; None draws shuffled epochs."""
        return None

    def env(self, dataset: PromptDataset, tokenizer: Any, *, prompts_per_batch: int, **kwargs: Any) -> DatasetChatEnv:
        """Build the environment: the dataset's prompts with the task's transforms, limits and rewards."""
        kwargs = dict(self.limits) | kwargs
        if "rewards" not in kwargs and (rewards := self.make_rewards()):
            kwargs["rewards"] = RewardTransform(rewards, weights=self.reward_weights)
        if "transforms" not in kwargs:
            kwargs["transforms"] = self.make_transforms()
        kwargs.setdefault("sampler", self.make_sampler(dataset))
        return DatasetChatEnv(dataset, tokenizer, prompts_per_batch=prompts_per_batch, **kwargs)


@dataclass(frozen=True)
class Task(TaskBase):
    """Definition of a task: dataset format, prompts, rewards and evaluation metric.

    Attributes:
        name: name of the task, as in ``task=gsm8k``.
        synthetic_rows: ``f(split, size, seed) -> rows``, which generates rows in the dataset's format. The splits
            ``"train"`` and ``"test"`` share no prompt. ``size=None`` gives all rows, or a sensible number of them.
        row_map: function from a row of the dataset to one with a ``"prompt"`` (or messages) and the columns that the
            rewards read; None uses rows as they are.
        rewards: training rewards, each a spec of :func:`~torchrl_rloo.rewards.load_reward`; empty if the environment
            itself rewards.
        scorer: spec of the metric on held-out completions, independent of the rewards. None uses the rewards, or
            without any the return that the environment gives.
        reward_weights: one weight per reward; None means 1 each.
        dataset: arguments of :func:`~torchrl_rloo.data.load_prompts` for the published dataset (``source``, ``name``,
            ``split``); empty if there is none.
        eval_split: split of the published dataset to evaluate on; None holds out some of the training prompts.
        system_prompt: system message of prompts that have none; None adds none.
        extract_answer: ``f(text) -> answer | None`` of a completion, for majority votes; None if the task has no votes.
        transforms: factory of the transforms that answer turns; the default makes none, for single-turn tasks.
        limits: limits of a conversation, as arguments of :class:`~torchrl_rloo.envs.ChatEnv` (``max_turns``, ...).
    """

    name: str
    synthetic_rows: Callable[[str, int | None, int], list[dict[str, Any]]]
    rewards: Sequence[str | Mapping[str, Any]]
    scorer: str | Mapping[str, Any] | None
    row_map: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    reward_weights: Sequence[float] | None = None
    dataset: Mapping[str, Any] = field(default_factory=dict)
    eval_split: str | None = None
    system_prompt: str | None = None
    extract_answer: Callable[[str], str | None] | None = None
    transforms: Callable[[], Sequence[Transform]] = tuple
    limits: Mapping[str, Any] = field(default_factory=dict)

    def load(
        self,
        source: Any = None,
        *,
        eval_source: Any = None,
        eval_split: str | None = None,
        eval_size: int = 256,
        seed: int = 0,
        **kwargs: Any,
    ) -> tuple[PromptDataset, PromptDataset]:
        """Load training and held-out prompts; prompts of ``eval_source`` are removed from training.

        Args:
            source: ``"embedded"`` for the synthetic rows, or a source in the published format for
                :func:`~torchrl_rloo.data.load_prompts`. None loads the published dataset, or the synthetic rows if
                there is none.
            eval_source: source of the held-out prompts, in the same format. None uses the evaluation split of the
                published dataset, or the synthetic held-out rows; without them it splits prompts off ``source``.
            eval_split: split of the held-out prompts; None uses the published evaluation split, or that of ``kwargs``.
            eval_size: number of held-out prompts; of a separate source at most that many (:meth:`load_held_out`).
            seed: seed of the split and of the synthetic rows.
            **kwargs: see :func:`~torchrl_rloo.data.load_prompts`.

        Returns:
            ``(train, held_out)``.

        Raises:
            ValueError: if the arguments cannot be combined, or all training prompts are held out.
        """
        # Resolve the source: the published dataset has its own options and evaluation split
        options, eval_options = dict(kwargs), dict(kwargs)
        if source is None and self.dataset:
            options = dict(self.dataset) | kwargs
            source = options.pop("source")
            if eval_source is None and self.eval_split is not None:
                eval_source, eval_split, eval_options = source, eval_split or self.eval_split, options
        if source in (None, EMBEDDED):
            return self._load_synthetic(eval_source, eval_split, eval_size, seed, options)
        # Without a source of held-out prompts, split them off the training prompts
        if eval_source is None:
            if options.get("streaming"):
                given = f"streaming={options['streaming']}"
                raise ValueError(f"{given} requires eval_source: no prompts can be split off a stream; set it")
            if eval_split is not None:
                raise ValueError(f"eval_split={eval_split!r} requires eval_source, which is null; set eval_source")
            train, held_out = split_prompts(self._load(source, **options), eval_size, seed)
            if len(held_out) > len(train):
                _LOGGER.warning(
                    "eval_size=%d holds out %d prompts and leaves %d to train on; lower it, or set eval_source",
                    eval_size,
                    len(held_out),
                    len(train),
                )
            return train, held_out
        # Otherwise load both, and remove prompts that are in both from training
        eval_options = eval_options | ({"split": eval_split} if eval_split else {}) | _WHOLE
        held_out = self.load_held_out(eval_source, eval_size=eval_size, **eval_options)
        if options.get("streaming"):
            return self._load(source, **options, exclude={str(row["query"]) for row in held_out.rows}), held_out
        return _remove_held_out(self._load(source, **options), held_out), held_out

    def load_held_out(self, source: Any, *, eval_size: int = 256, **kwargs: Any) -> PromptDataset:
        """Load held-out prompts from a separate source.

        If there are more than ``eval_size``, a random choice is taken, which is the same in every run. A test split may
        be sorted by subject or difficulty.
        """
        held_out = self._load(source, **kwargs)
        if len(held_out) <= eval_size:
            return held_out
        return held_out.select(sorted(random.Random(0).sample(range(len(held_out)), eval_size)))

    def _load(self, source: Any, **options: Any) -> PromptDataset:
        return load_prompts(source, **{"system_prompt": self.system_prompt, "row_map": self.row_map} | options)

    def _load_synthetic(
        self, eval_source: Any, eval_split: str | None, eval_size: int, seed: int, options: dict[str, Any]
    ) -> tuple[PromptDataset, PromptDataset]:
        if eval_source is not None or eval_split is not None:
            raise ValueError(f"source={EMBEDDED!r} has its own held-out prompts; leave eval_source and eval_split null")
        train, held_out = self.synthetic_rows("train", None, seed), self.synthetic_rows("test", eval_size, seed)
        return self._load(train, **options), self._load(held_out, **options | _WHOLE)

    def make_rewards(self) -> list[RewardFunction]:
        """Return the reward functions; an empty list if the environment itself rewards."""
        return [load_reward(spec) for spec in self.rewards]

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the scorer, or without one the rewards; None uses the return that the environment gives."""
        if self.scorer is not None:
            return load_reward(self.scorer)
        scorers = self.make_rewards() if rewards is None else rewards
        return {reward_name(function): function for function in scorers} or None

    def make_transforms(self) -> list[Transform]:
        """Return new transforms that answer turns."""
        return list(self.transforms())


def _remove_held_out(train: PromptDataset, held_out: PromptDataset) -> PromptDataset:
    """Remove held-out prompts from the training prompts."""
    prompts = {str(row["query"]) for row in held_out.rows}
    kept = [i for i, row in enumerate(train.rows) if str(row["query"]) not in prompts]
    if len(kept) == len(train):
        return train
    if not kept:
        raise ValueError(f"all {len(train)} training prompts are held out; set eval_split, or use other prompts")
    shared = len(train) - len(kept)
    _LOGGER.warning("removing %d of %d training prompts, which are held out", shared, len(train))
    return train.select(kept)
