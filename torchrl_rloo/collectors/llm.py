"""Synchronous collector of finished trajectories in whole groups, each with the policy version that sampled it.

It replaces TorchRL's class of the same name, which writes the version of the previous update, does not know groups and
cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.finishing import finish_row, next_turn
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import concatenate, ragged, stack_rows, tensor_rows, to_lazy_stack
from torchrl_rloo.envs.stepping import release_rows, step_rows
from torchrl_rloo.envs.transforms.data import DatasetExhaustedError
from torchrl_rloo.weight_update.base import WeightUpdater


class CollectionProgress(NamedTuple):
    """Progress of a batch.

    Attributes:
        finished: number of finished trajectories.
        total: number of trajectories of the batch.
        turns: number of dialog turns sampled for the batch.
    """

    finished: int
    total: int
    turns: int


class LLMCollector(BaseCollector):
    """Collector that runs a policy in an environment and returns finished trajectories in whole groups.

    All conversations of a reset advance together, turn by turn, and ended ones are not stepped again. Iterating yields
    batches of rows ``[B]``. The environment writes ``"group_id"`` and the rewards. The policy writes token ids, masks
    and log-probs ``[T]`` of each row. The collector adds the trajectory's return ``("next", "reward")`` ``[1, 1]`` and
    ``"policy_version"`` ``[]``. :mod:`torchrl_rloo.data.keys` lists all entries.

    Compared to TorchRL, ``dialog_turns_per_batch`` is a minimum, since groups stay whole. Completed trajectories are
    always yielded (``yield_completed_trajectories``) and versions always tracked (``track_policy_version``).

    Args:
        env: environment whose reset draws whole groups, with a ``"group_id"`` (:class:`DatasetChatEnv`).
        policy: callable that takes and returns rows, e.g. :class:`TransformersWrapper`.
        dialog_turns_per_batch: minimum number of policy turns in a batch; None delivers the rows of each reset.
        total_dialog_turns: number of turns after which iteration stops; -1 continues until the dataset's epochs end.
        weight_updater: sender of new weights to the policy in :meth:`update_policy_weights_`. None disables updates.
        sync_every: number of batches between weight updates; None leaves updates to the caller.
        replay_buffer: buffer that also receives each batch, without its text.
        postproc: function applied to each batch before delivery.
        progress: function called with a :class:`CollectionProgress` after every turn of the batch.

    Attributes:
        policy_version: number of weight updates that reached the policy.
        batches: number of delivered batches.
        dialog_turns: number of turns in delivered rows.
        num_tokens: number of tokens in delivered rows.

    Raises:
        ValueError: if a number is out of range, or if ``sync_every`` is set without a ``weight_updater``.
        TypeError: if ``weight_updater`` is not a :class:`WeightUpdater`.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
        >>> from torchrl_rloo.envs import DatasetChatEnv
        >>> from torchrl_rloo.modules import TransformersWrapper
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=8))
        >>> env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=boxed_accuracy)
        >>> policy = TransformersWrapper(
        ...     build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
        ... )
        >>> rows = next(iter(LLMCollector(env, policy)))
        >>> rows.batch_size, rows["next", "reward"].shape
        (torch.Size([4]), torch.Size([4, 1, 1]))
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        weight_updater: WeightUpdater | None = None,
        sync_every: int | None = None,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        progress: Callable[[CollectionProgress], None] | None = None,
    ):
        super().__init__()
        if dialog_turns_per_batch is not None and dialog_turns_per_batch < 1:
            raise ValueError(f"dialog_turns_per_batch={dialog_turns_per_batch} must be None or at least 1")
        if total_dialog_turns != -1 and total_dialog_turns < 1:
            raise ValueError(f"total_dialog_turns={total_dialog_turns} must be -1 (no limit) or at least 1")
        if sync_every is not None and (sync_every < 1 or weight_updater is None):
            raise ValueError(f"sync_every={sync_every} must be None or at least 1, and requires a weight_updater")
        if weight_updater is not None and not isinstance(weight_updater, WeightUpdater):
            raise TypeError(
                f"weight_updater={type(weight_updater).__name__} must be a torchrl_rloo.weight_update.WeightUpdater, "
                "whose pushes carry a version; use WeightPublisher or InProcessWeightUpdater"
            )
        self.env, self.policy, self.replay_buffer = env, policy, replay_buffer
        self.dialog_turns_per_batch, self.total_dialog_turns = dialog_turns_per_batch, total_dialog_turns
        self.postproc, self.progress = postproc, progress
        self._weight_updater, self.sync_every = weight_updater, sync_every
        # Progress, which a checkpoint restores
        self.policy_version = weight_updater.current_version if weight_updater is not None else 0
        self.batches = 0
        self.dialog_turns = 0
        self.num_tokens = 0
        self.closed = False
        if hasattr(policy, "register_collector"):
            policy.register_collector(self)

    @property
    def weight_updater(self) -> WeightUpdater | None:
        """Sender of new weights to the policy."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: WeightUpdater | None) -> None:
        self._weight_updater = value

    def update_policy_weights_(self) -> None:
        """Send the training model's weights to the policy, and increase the version once they have arrived.

        Raises:
            RuntimeError: if the collector has no ``weight_updater``.
            WeightSyncError: if the weights did not arrive.
        """
        if self._weight_updater is None:
            raise RuntimeError("weight_updater=None; pass LLMCollector(weight_updater=...) to update weights")
        try:
            self._weight_updater.push_weights()
        finally:  # some of several engines may have the weights although the push failed
            self.policy_version = self._weight_updater.current_version

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches of rows until ``total_dialog_turns`` is reached or the dataset's epochs end."""
        while not self.closed and (self.total_dialog_turns == -1 or self.dialog_turns < self.total_dialog_turns):
            try:
                rows = self.collect()
            except DatasetExhaustedError:
                return
            yield rows

    def collect(self) -> TensorDictBase:
        """Return one batch ``[B]`` of finished trajectories, after a weight update if one is due.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
        """
        if self.sync_every is not None and self.batches and self.batches % self.sync_every == 0:
            self.update_policy_weights_()
        # Sample until there are enough turns; deliver a smaller batch at the end of the dataset
        batches, turns = [], 0
        while not batches or turns < (self.dialog_turns_per_batch or 0):
            try:
                batch = self._rollout(sum(map(len, batches)), turns)
            except DatasetExhaustedError:
                if not batches:
                    raise
                break
            batches.append(batch)
            turns += int(batch[keys.NUM_TURNS].sum())
        # Count before postproc, which may drop rows
        self.batches += 1
        self.dialog_turns += turns
        rows = batches[0] if len(batches) == 1 else concatenate(batches)
        self.num_tokens += sum(map(len, ragged(rows, keys.TOKENS)))
        if self.postproc is not None:
            rows = self.postproc(rows)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(tensor_rows(rows))
        return rows

    def _rollout(self, rows_before: int, turns_before: int) -> TensorDictBase:
        """Run all conversations of one reset of the environment to their end."""
        active = to_lazy_stack(self.env.reset())
        if keys.GROUP_ID not in active.keys():
            raise KeyError(
                f"the environment's rows have no {keys.GROUP_ID!r}, so their groups are unknown; use DatasetChatEnv "
                "or add a DataLoadingPrimer"
            )
        total, turns, version = len(active), turns_before, self.policy_version
        indices, finished = list(range(total)), [None] * total
        returns = torch.zeros(total, 1, 1)
        while indices:
            # Take one turn of every conversation that has not ended
            stepped = step_rows(self.env, self.policy(active))
            turns += len(indices)
            continuing = []
            for index, row in zip(indices, stepped.unbind(0), strict=True):
                returns[index] += row[keys.REWARD]
                if row[keys.DONE].any():
                    finished[index] = finish_row(row, returns[index].clone(), version)
                else:
                    continuing.append((index, next_turn(row)))
            # Leave ended conversations out of the next turn
            indices = [index for index, _ in continuing]
            if continuing:
                active = stack_rows([row for _, row in continuing])
            if self.progress is not None:
                self.progress(CollectionProgress(rows_before + total - len(indices), rows_before + total, turns))
        release_rows(self.env, finished)
        return stack_rows(finished)

    def state_dict(self) -> dict[str, Any]:
        """Return the version, the counters, the environment's position in the data and the policy's random stream."""
        sampler = self.policy.sampler_state() if hasattr(self.policy, "sampler_state") else {}
        return {
            "policy_version": self.policy_version,
            "batches": self.batches,
            "dialog_turns": self.dialog_turns,
            "num_tokens": self.num_tokens,
            "env": self.env.state_dict(),
            "sampler": sampler,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, which does not contain the policy's weights."""
        for name in ("policy_version", "batches", "dialog_turns", "num_tokens"):
            setattr(self, name, state_dict[name])
        self.env.load_state_dict(state_dict["env"])
        if self._weight_updater is not None:
            self._weight_updater.resume_from(self.policy_version)
        if state_dict["sampler"]:
            self.policy.load_sampler_state(state_dict["sampler"])

    def __len__(self) -> int:
        """Raise a ``TypeError``, since trajectories differ in their number of turns."""
        raise TypeError("the number of batches of an LLMCollector is unknown in advance")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and return the next seed. Prompts and samples have separate seeds."""
        return self.env.set_seed(seed, static_seed=static_seed)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the iteration and close the environment.

        Args:
            timeout: ignored; it is part of TorchRL's interface.
            close_env: whether to close the environment.
            raise_on_error: whether to raise an error if the environment is already closed.
        """
        if not self.closed:
            self.closed = True
            if close_env:
                self.env.close(raise_if_closed=raise_on_error)
