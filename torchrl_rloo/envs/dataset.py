"""DatasetChatEnv: a ChatEnv whose prompts come from a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import Compose, Transform, TransformedEnv

from torchrl_rloo.data import keys
from torchrl_rloo.data.notices import notify_once
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.rows import rows_to_reset
from torchrl_rloo.data.sampling import PromptSampler
from torchrl_rloo.data.segments import drop_samples
from torchrl_rloo.data.stop_reasons import name_end
from torchrl_rloo.data.templates import encode, encode_conversation, encode_prompt, is_conversation
from torchrl_rloo.envs.abstaining import mark_abstaining
from torchrl_rloo.envs.chat import ChatEnv
from torchrl_rloo.envs.signed import SignedEnv
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.envs.transforms.kl import KLRewardTransform
from torchrl_rloo.envs.transforms.reward import RewardTransform
from torchrl_rloo.envs.transforms.tools import as_transform
from torchrl_rloo.rewards.protocol import check_columns
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.runtime.lookup import did_you_mean
from torchrl_rloo.runtime.torchrl_arguments import refuse_text_transform, with_torchrl_arguments


class ForwardCompose(Compose):
    """Compose that prepares a reset in the order of its transforms and does not copy the policy's rows.

    TorchRL's Compose prepares a reset from the last transform to the first. The later transforms would then never see
    the rows that a :class:`DataLoadingPrimer` in first place draws. It also copies the policy's rows, which costs
    0.1 ms per row, almost as much as the environment's step. This class copies them only if a transform changes
    actions.
    """

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        for transform in self.transforms:
            tensordict = transform._reset_env_preprocess(tensordict)
        return tensordict

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the inverse of each transform that has one."""
        if all(type(t)._inv_call is Transform._inv_call for t in self.transforms):
            if not any(t.in_keys_inv for t in self.transforms):
                return tensordict
        return super().inv(tensordict)


class DatasetChatEnv(SignedEnv, TransformedEnv):
    """:class:`ChatEnv` with a :class:`DataLoadingPrimer`, further transforms and rewards, in that order.

    A single-turn task is a dataset and a reward function. A multi-turn task adds transforms that give feedback. Rows
    have the entries of :class:`ChatEnv`, the dataset's columns, and what each transform writes.

    TorchRL's arguments map as follows: ``dataset`` is a loaded :class:`PromptDataset` instead of a hub name,
    ``repeats`` is ``num_generations``, ``num_envs`` is ``prompts_per_batch``.

    Args:
        dataset: the prompts.
        tokenizer: the policy's tokenizer.
        prompts_per_batch: draws per reset.
        num_generations: rows per draw; the batch size is ``prompts_per_batch * num_generations``.
        rewards: reward functions, their names or settings (:func:`~torchrl_rloo.rewards.load_reward`), or a
            :class:`RewardTransform`. None leaves them to other transforms, or to what follows the collector.
        transforms: transforms between the primer and the rewards, in order, such as feedback and limits, and tools.
        after_rewards: transforms after the rewards, in order: score shaping, then a :class:`KLRewardTransform`.
        shuffle, seed, epochs, sampler: see :class:`DataLoadingPrimer`.
        greedy_member: whether one member of each group is greedy, as the baseline of ReMax.
        demonstrations: column with a completion, or a list of them, that members of the group take as their turn. They
            are encoded by the chat template and scored like the others. Their behavior log-probs are 0, as if the
            demonstrator chose each token with probability 1. They require a single turn. None samples all members.
        make_primer: function that makes the primer from the dataset and the arguments above, such as a partial
            :class:`~torchrl_rloo.ray.RayDataLoadingPrimer`.
        **chat: further arguments of :class:`ChatEnv`, such as ``input_mode``, ``system_prompt``, limits and
            ``template_kwargs``.

    Attributes:
        primer: the :class:`DataLoadingPrimer`.
        reward_transform: the :class:`RewardTransform`, or None.

    Raises:
        TypeError: for an unknown argument, or a dataset that is not loaded. Also for a transform that is a class, not a
            transform, or one of TorchRL's that edit conversations as text.
        ValueError: if a number is below 1, or a :class:`KLRewardTransform` is in ``transforms``. Without
            ``transforms``, also if a reward function requires a column that the dataset does not have.

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

    forwards_to = ChatEnv

    @with_torchrl_arguments
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
        shuffle: bool | None = None,
        seed: int = 0,
        epochs: int | None = None,
        sampler: PromptSampler | None = None,
        greedy_member: bool = False,
        demonstrations: str | None = None,
        make_primer: Callable[..., DataLoadingPrimer] = DataLoadingPrimer,
        **chat: Any,
    ):
        known = inspect.signature(type(self)).parameters
        for name in chat:
            if name not in known:
                hint = f": {_REMEDIES[name]}" if name in _REMEDIES else did_you_mean(name, known)
                raise TypeError(f"{type(self).__name__} got an unknown argument {name!r}{hint}")
        if not isinstance(dataset, PromptDataset):
            raise TypeError(f"dataset is a {type(dataset).__name__}; pass load_prompts(...), which checks its rows")
        transforms = [as_transform(transform) for transform in transforms]
        _check_transforms(transforms, after_rewards)
        for name, value in (("prompts_per_batch", prompts_per_batch), ("num_generations", num_generations)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        dataset = dataset.for_tokenizer(tokenizer)
        if sampler is None and prompts_per_batch > len(dataset):
            notify_once(
                f"prompts_per_batch={prompts_per_batch} exceeds the {len(dataset)} prompts: batches repeat prompts"
            )
        # Conversations and the draws of their prompts
        base = ChatEnv(tokenizer, batch_size=prompts_per_batch * num_generations, **chat)
        draws = {"shuffle": shuffle, "seed": seed, "epochs": epochs, "sampler": sampler}
        base.dataset = dataset
        if greedy_member:
            draws["greedy"] = True
        if demonstrations is not None:
            if demonstrations not in dataset.columns or transforms:
                raise ValueError(
                    f"demonstrations={demonstrations!r} must be one of the columns {sorted(dataset.columns)}, and "
                    "cannot be combined with transforms, which may add turns"
                )
            options = {"column": demonstrations, "template_kwargs": chat.get("template_kwargs") or {}}
            draws["demonstrations"] = partial(_encode_demonstrations, tokenizer, **options)
        primer = make_primer(dataset, num_generations=num_generations, **draws)
        # Rewards; columns can be checked only without transforms, since these may add columns
        if rewards is not None and not isinstance(rewards, RewardTransform):
            rewards = RewardTransform(rewards)
        if rewards is not None and not transforms:
            check_columns(rewards.functions, dataset.columns)
        scored = () if rewards is None else (rewards,)
        super().__init__(base, ForwardCompose(primer, *transforms, *scored, *after_rewards))
        self.primer, self.reward_transform = primer, rewards

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        stepped = super()._step(tensordict)
        for row in stepped.unbind(0):
            name_end(row)
        mark_abstaining(self.base_env, stepped.unbind(0))
        return stepped

    def _reset_proc_data(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        # A reset overwrites what the environment writes; drop what the policy wrote as well
        if tensordict is not None:
            for row, fresh in zip(tensordict.unbind(0), rows_to_reset(tensordict), strict=True):
                if fresh:
                    drop_samples(row)
        return super()._reset_proc_data(tensordict, tensordict_reset)


def _encode_demonstrations(
    tokenizer, prompt: Mapping[str, Any], *, column: str, template_kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Return the ids that the policy would have sampled, had it given each completion of a prompt."""
    query, texts = prompt[keys.QUERY], prompt[column]
    turns = []
    for text in [texts] if isinstance(texts, str) else texts or ():
        if is_conversation(query):
            answer = {"role": "assistant", "content": text}
            ids, mask = encode_conversation(tokenizer, [*query, answer], **template_kwargs)
            before = encode_prompt(tokenizer, query, **template_kwargs)
            end = len(mask) - mask[::-1].index(True)
            if ids[: len(before)] != before or end <= len(before):
                raise ValueError(
                    f"{column}={text!r:.60}: the chat template changes the prompt once an answer follows; correct it"
                )
            turns.append(torch.tensor(ids[len(before) : end]))
        else:
            turns.append(torch.tensor([*encode(tokenizer, text), tokenizer.eos_token_id]))
    return turns


_REMEDIES = {
    **dict.fromkeys(("weights", "clip_range", "executor", "quarantine"), "pass it to rewards=RewardTransform(...)"),
    "reward_weights": "pass rewards=RewardTransform(functions, weights=...)",
    "batch_size": "it is prompts_per_batch x num_generations",
    "chat": "pass it to load_prompts",
}


def _check_transforms(transforms: Sequence[Transform], after_rewards: Sequence[Transform]) -> None:
    for argument, given in (("transforms", transforms), ("after_rewards", after_rewards)):
        for i, transform in enumerate(given):
            if isinstance(transform, type):
                name = transform.__name__
                raise TypeError(f"{argument}[{i}] is the class {name}; pass an instance, {name}(...)")
            if not isinstance(transform, Transform):
                raise TypeError(f"{argument}[{i}]={transform!r:.100} must be a torchrl.envs.Transform")
            refuse_text_transform(transform)
    if any(isinstance(transform, RewardTransform) for transform in (*transforms, *after_rewards)):
        raise ValueError("a RewardTransform in transforms or after_rewards would score rows twice; pass it as rewards=")
    if any(isinstance(transform, KLRewardTransform) for transform in transforms):
        raise ValueError("KLRewardTransform in transforms would act before the rewards; put it in after_rewards")
