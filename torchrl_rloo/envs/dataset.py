"""DatasetChatEnv: a ChatEnv whose prompts come from a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import Compose, Transform, TransformedEnv

from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.sampling import PromptSampler
from torchrl_rloo.data.segments import forget_samples
from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.signature import SignedEnv, refuse_unknown
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.envs.transforms.kl import KLRewardTransform
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.rewards.protocol import check_columns
from torchrl_rloo.rewards.registry import RewardSpec


class ForwardCompose(Compose):
    """A Compose that hands rows to the environment in the order of its transforms, and the policy's as they are.

    TorchRL's asks the last transform first what a reset begins with, so that a :class:`DataLoadingPrimer` in first
    place draws rows which the others never see. And it copies the policy's rows, which costs 0.1 ms a row, almost as
    much as the environment's own step; here they are copied only if a transform changes actions.
    """

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        for transform in self.transforms:
            tensordict = transform._reset_env_preprocess(tensordict)
        return tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Applies the transforms' inverses, if there are any."""
        if all(type(t).inv is Transform.inv and type(t)._inv_call is Transform._inv_call for t in self.transforms):
            if not any(t.in_keys_inv for t in self.transforms):
                return tensordict
        return super().inv(tensordict)


class DatasetChatEnv(SignedEnv, TransformedEnv):
    """A :class:`ChatEnv` with a :class:`DataLoadingPrimer`, further transforms and rewards, in that order.

    A single-turn task is a dataset and a reward function; a task of several turns adds transforms that give feedback.

    TorchRL's arguments: ``dataset`` is a loaded :class:`PromptDataset` instead of a hub name, ``repeats`` is
    ``num_generations``, ``num_envs`` is ``prompts_per_batch``, ``system_prompt`` belongs to ``load_prompts``.

    Args:
        dataset: the prompts.
        tokenizer: of the policy.
        prompts_per_batch: draws per reset.
        num_generations: rows per draw; the batch size is ``prompts_per_batch * num_generations``.
        rewards: reward functions, or names or settings of them (:func:`~torchrl_rloo.rewards.load_reward`); or a ready
            :class:`RewardTransform`; None for no reward.
        transforms: put between the primer and the rewards, in order: tools, feedback, limits.
        after_rewards: put after the rewards, in order: shaping of scores, then a :class:`KLRewardTransform`.
        shuffle: see :class:`DataLoadingPrimer`.
        seed: see :class:`DataLoadingPrimer`.
        epochs: see :class:`DataLoadingPrimer`.
        sampler: see :class:`DataLoadingPrimer`.
        **chat: further arguments of :class:`ChatEnv`: ``input_mode``, limits, ``template_kwargs``, ...

    Raises:
        TypeError: for an unknown argument, or a transform that is a class or no transform.
        ValueError: for a number below 1, a reward function that asks for a column that the dataset does not have, or a
            :class:`KLRewardTransform` among ``transforms``.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import addition_prompts, build_tokenizer
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> dataset = load_prompts(addition_prompts("train", size=8))
        >>> env = DatasetChatEnv(
        ...     dataset, build_tokenizer(), prompts_per_batch=2, num_generations=4, rewards=boxed_accuracy
        ... )
        >>> env.reset()["group_id"].tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """

    passes_to, sets = ChatEnv, frozenset({"batch_size"})

    def __init__(
        self,
        dataset: PromptDataset,
        tokenizer,
        *,
        prompts_per_batch: int,
        num_generations: int = 1,
        rewards: RewardSpec | Sequence[RewardSpec] | RewardTransform | None = None,
        transforms: Sequence[Transform] = (),
        after_rewards: Sequence[Transform] = (),
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        sampler: PromptSampler | None = None,
        **chat: Any,
    ):
        refuse_unknown(type(self), chat, _REMEDIES)
        if not isinstance(dataset, PromptDataset):
            raise TypeError(f"dataset is a {type(dataset).__name__}: pass load_prompts(...), which checks its rows")
        _check_transforms(transforms, after_rewards)
        for name, value in (("prompts_per_batch", prompts_per_batch), ("num_generations", num_generations)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        dataset = dataset.for_tokenizer(tokenizer)
        if sampler is None and prompts_per_batch > len(dataset):
            notify_once(f"prompts_per_batch={prompts_per_batch} of {len(dataset)} prompts: batches repeat prompts")
        base = ChatEnv(tokenizer, batch_size=prompts_per_batch * num_generations, **chat)
        draws = {"shuffle": shuffle, "seed": seed, "epochs": epochs, "sampler": sampler}
        base.dataset = dataset
        primer = DataLoadingPrimer(dataset, num_generations=num_generations, **draws)
        if rewards is not None and not isinstance(rewards, RewardTransform):
            rewards = RewardTransform(rewards)
        if rewards is not None and not transforms:  # which may bring columns along
            check_columns(rewards.functions, dataset.columns)
        scored = () if rewards is None else (rewards,)
        super().__init__(base, ForwardCompose(primer, *transforms, *scored, *after_rewards))
        self.primer, self.reward_transform = primer, rewards

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        if tensordict is not None:  # a reset goes by what the environment writes, but these the policy wrote
            restart = tensordict.get("_reset", None)
            restart = [True] * len(tensordict) if restart is None else restart.reshape(len(tensordict), -1).any(1)
            for row, fresh in zip(tensordict.unbind(0), restart, strict=True):
                if fresh:
                    forget_samples(row)
        return super()._reset_proc_data(tensordict, tensordict_reset)


_OF_REWARDS = "pass rewards=RewardTransform(functions, {}=...)"
_REMEDIES = {name: _OF_REWARDS.format(name) for name in ("weights", "clip_range", "executor", "quarantine")}
_REMEDIES |= {
    "reward_weights": _OF_REWARDS.format("weights"),
    "batch_size": "prompts_per_batch x num_generations is it",
}
_REMEDIES |= {"chat": "pass it to load_prompts", "system_prompt": "pass it to load_prompts"}


_TOOLS = "use ToolTransform(tools) of torchrl_rloo.envs.transforms"
_OF_TORCHRL = {
    "AddThinkingPrompt": "use AddThinkingPrompt of torchrl_rloo.envs.transforms",
    "BrowserTransform": _TOOLS,
    "ExecuteToolsInOrder": _TOOLS,
    "IncrementalTokenizer": "leave it out",
    "MCPToolTransform": _TOOLS,
    "PythonInterpreter": _TOOLS,
    "SimpleToolTransform": _TOOLS,
    "TemplateTransform": "set template_kwargs of DatasetChatEnv",
    "Tokenizer": "leave it out",
}


def _check_transforms(transforms: Sequence[Transform], after_rewards: Sequence[Transform]) -> None:
    for argument, given in (("transforms", transforms), ("after_rewards", after_rewards)):
        for i, transform in enumerate(given):
            if isinstance(transform, type):
                raise TypeError(
                    f"{argument}[{i}] is the class {transform.__name__}: make one, {transform.__name__}(...)"
                )
            if not isinstance(transform, Transform):
                raise TypeError(f"{argument}[{i}]={transform!r:.100} must be a torchrl.envs.Transform")
            if (name := type(transform).__name__) in _OF_TORCHRL and type(transform).__module__.startswith("torchrl."):
                raise TypeError(f"TorchRL's {name} edits conversations as text, here they are ids: {_OF_TORCHRL[name]}")
    if any(isinstance(transform, KLRewardTransform) for transform in transforms):
        raise ValueError("KLRewardTransform in transforms would come before the rewards: put it in after_rewards")
