"""What a task is: prompts, rewards and an evaluation metric that belong together."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torchrl.envs import Transform

from torchrl_rloo.data.prompts import PromptDataset, load_prompts, split_prompts
from torchrl_rloo.data.sampling import PromptSampler
from torchrl_rloo.envs.dataset import DatasetChatEnv
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.rewards.protocol import RewardFunction, reward_name
from torchrl_rloo.rewards.registry import load_reward

_LOGGER = logging.getLogger(__name__)

Scorer = RewardFunction | Mapping[str, RewardFunction] | None
EMBEDDED = "embedded"  # the source that stands for a task's own generated rows


class TaskBase:
    """What an environment, a run and an evaluation ask of a task, or of a mixture of several."""

    name: str
    reward_weights: Sequence[float] | None
    extract_answer: Callable[[str], str | None] | None = None
    limits: Mapping[str, Any] = MappingProxyType({})

    def load(self, source: Any = None, **kwargs: Any) -> tuple[PromptDataset, PromptDataset]:
        """Training and held-out prompts."""
        raise NotImplementedError

    def load_held_out(self, source: Any, *, eval_size: int = 256, **kwargs: Any) -> PromptDataset:
        """Held-out prompts alone, of a source of their own."""
        raise ValueError(
            f"{source!r} cannot hold the held-out prompts of every task of a {self.name}: give each its own"
        )

    def make_rewards(self) -> list[RewardFunction]:
        """The reward functions; none where the environment itself rewards."""
        raise NotImplementedError

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the evaluation metric, called like a reward; None: the return that the environment itself gives.

        Args:
            rewards: what a run trains on, if that is not the task's own. A task without a metric judges by them.
        """
        raise NotImplementedError

    def make_transforms(self) -> list[Transform]:
        """What makes turns of the environment (tools, feedback, a game), new at every call; none for a single turn."""
        return []

    def make_sampler(self, dataset: PromptDataset) -> PromptSampler | None:
        """In what order to draw the prompts; None: shuffled epochs."""
        return None

    def env(self, dataset: PromptDataset, tokenizer: Any, *, prompts_per_batch: int, **kwargs: Any) -> DatasetChatEnv:
        """The environment: the dataset's prompts with the task's transforms, limits and rewards.

        Args:
            dataset: of :meth:`load`.
            tokenizer: of the policy.
            prompts_per_batch: see :class:`DatasetChatEnv`.
            **kwargs: further arguments of :class:`DatasetChatEnv`; what is given here takes the place of the task's.
        """
        kwargs = dict(self.limits) | kwargs
        if "rewards" not in kwargs and (rewards := self.make_rewards()):
            kwargs["rewards"] = RewardTransform(rewards, weights=self.reward_weights)
        if "transforms" not in kwargs:
            kwargs["transforms"] = self.make_transforms()
        kwargs.setdefault("sampler", self.make_sampler(dataset))
        return DatasetChatEnv(dataset, tokenizer, prompts_per_batch=prompts_per_batch, **kwargs)


@dataclass(frozen=True)
class Task(TaskBase):
    """A dataset's format, how its prompts are put, what answers earn, and what counts in the end.

    Attributes:
        name: of the task, as in ``task=gsm8k``.
        synthetic_rows: ``f(split, size, seed) -> rows``: generated rows in the dataset's own format, of ``"train"`` or
            ``"test"``, which share no prompt; ``size`` None is all there are, or as many as make sense.
        row_map: turns a row of the dataset into one with a ``"prompt"`` (or messages) and the columns that the rewards
            read; None: it is one already.
        rewards: what is trained on, each a spec of :func:`~torchrl_rloo.rewards.load_reward`; none where the
            environment itself rewards.
        scorer: judge of held-out completions, whatever the rewards: a spec, too; None: the rewards, or without any the
            return that the environment itself gives.
        reward_weights: one for each reward; None: 1 each.
        dataset: arguments of :func:`~torchrl_rloo.data.load_prompts` for the published dataset (``source``, ``name``,
            ``split``); empty if there is none.
        eval_split: the split of the published dataset to evaluate on; None: some of the training prompts are held out.
        system_prompt: put before prompts without a system message.
        extract_answer: ``f(text) -> answer | None`` of a completion, for majority votes; None: there are none.
        transforms: makes what gives the environment its turns; none for a single turn.
        limits: of a conversation, arguments of :class:`~torchrl_rloo.envs.ChatEnv` (``max_turns``, ...).
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
        """Training and held-out prompts; those of a source of held-out prompts are left out of training.

        Args:
            source: None for the published dataset (the generated rows, if there is none); ``"embedded"`` for the
                generated rows; else what :func:`~torchrl_rloo.data.load_prompts` takes, in the published format.
            eval_source: held-out prompts, in the same format; None splits them off ``source``.
            eval_split: split of ``eval_source``; None takes the same as of ``source``.
            eval_size: number of held-out prompts; of more, see :meth:`load_held_out`.
            seed: of the split and of the generated rows.
            **kwargs: see :func:`~torchrl_rloo.data.load_prompts`.

        Raises:
            ValueError: if the arguments do not fit each other, or all training prompts are held out.
        """
        options, eval_options = dict(kwargs), dict(kwargs)
        if source is None and self.dataset:
            options = dict(self.dataset) | kwargs
            source = options.pop("source")
            if eval_source is None and self.eval_split is not None:
                eval_source, eval_split, eval_options = source, eval_split or self.eval_split, options
        if source in (None, EMBEDDED):
            return self._load_synthetic(eval_source, eval_split, eval_size, seed, options)
        if eval_source is None:
            if eval_split is not None:
                raise ValueError(f"eval_split={eval_split!r} is a split of eval_source, which is null: set eval_source")
            train, held_out = split_prompts(self._load(source, **options), eval_size, seed)
            if len(held_out) > len(train):
                _LOGGER.warning(
                    "eval_size=%d holds out %d prompts and leaves %d to train on: lower it, or give an eval_source",
                    eval_size,
                    len(held_out),
                    len(train),
                )
            return train, held_out
        eval_options = eval_options | ({"split": eval_split} if eval_split else {}) | {"limit": None}
        held_out = self.load_held_out(eval_source, eval_size=eval_size, **eval_options)
        return _without(self._load(source, **options), held_out), held_out

    def load_held_out(self, source: Any, *, eval_size: int = 256, **kwargs: Any) -> PromptDataset:
        """Held-out prompts alone, of a source of their own.

        Of more than ``eval_size`` a random choice is taken, the same in every run: a test split may be in order of
        subject or difficulty.

        Args:
            source: see :func:`~torchrl_rloo.data.load_prompts`, in the format of the published dataset.
            eval_size: how many at most.
            **kwargs: see :func:`~torchrl_rloo.data.load_prompts`.
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
            raise ValueError(f"source={EMBEDDED!r} has its own held-out prompts: leave eval_source and eval_split null")
        train, held_out = self.synthetic_rows("train", None, seed), self.synthetic_rows("test", eval_size, seed)
        return self._load(train, **options), self._load(held_out, **options | {"limit": None})

    def make_rewards(self) -> list[RewardFunction]:
        """The reward functions; none where the environment itself rewards."""
        return [load_reward(spec) for spec in self.rewards]

    def make_scorer(self, rewards: Sequence[RewardFunction] | None = None) -> Scorer:
        """Return the evaluation metric, else the rewards; None: the return that the environment itself gives."""
        if self.scorer is not None:
            return load_reward(self.scorer)
        judges = self.make_rewards() if rewards is None else rewards
        return {reward_name(function): function for function in judges} or None

    def make_transforms(self) -> list[Transform]:
        """What makes turns of the environment, new at every call."""
        return list(self.transforms())


def _without(train: PromptDataset, held_out: PromptDataset) -> PromptDataset:
    """The training prompts that are not held out."""
    prompts = {str(row["query"]) for row in held_out.rows}
    kept = [i for i, row in enumerate(train.rows) if str(row["query"]) not in prompts]
    if len(kept) == len(train):
        return train
    if not kept:
        raise ValueError(f"all {len(train)} training prompts are held out: set eval_split, or give other prompts")
    shared = len(train) - len(kept)
    _LOGGER.warning("%d of %d training prompts are held out, and so left out of training", shared, len(train))
    return train.select(kept)
