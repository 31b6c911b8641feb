"""KLRewardTransform: the reference's log-probs, and the reward less the KL to it."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform
from torchrl.modules.llm.policies import LogProbs

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import collection, gather_actions, ragged, spread_actions, stack_rows
from torchrl_rloo.functional import k1, kl_penalised_reward
from torchrl_rloo.modules.policies import TransformersWrapper


class KLRewardTransform(Transform):
    """Subtracts ``kl_to_ref_coeff`` times the k1 KL of the whole trajectory from its reward, when it ends.

    Put it after the :class:`RewardTransform`: the penalty comes after the reward's clip and before any baseline. It
    also writes ``("next", "ref_log_probs", "full")``. Replaces TorchRL's class, which multiplies the reward by the
    number of tokens.

    Args:
        ref: scores under the frozen reference; its sampling distribution should be the policy's.
        kl_to_ref_coeff: the coefficient; 0 only records the log-probs.
        mask_truncated_completions: leave the KL out on truncated trajectories, as the loss leaves out their tokens.
        micro_batch_size: rows scored at once; None for all that end together.
    """

    def __init__(
        self,
        ref: TransformersWrapper,
        kl_to_ref_coeff: float,
        *,
        mask_truncated_completions: bool = False,
        micro_batch_size: int | None = None,
    ):
        super().__init__()
        if ref.generate:
            raise ValueError("ref generates; pass ref.get_new_version(generate=False)")
        if not 0 <= kl_to_ref_coeff < float("inf"):
            raise ValueError(f"kl_to_ref_coeff={kl_to_ref_coeff} must be a number of at least 0")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be None or at least 1")
        self.__dict__["ref"] = ref  # not a submodule: the reference's weights are not the environment's state
        self.coeff, self.mask_truncated_completions = kl_to_ref_coeff, mask_truncated_completions
        self.micro_batch_size = micro_batch_size

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        finished = [row for row in next_tensordict.unbind(0) if row["done"].any()]
        self._clear(next_tensordict)
        for start in range(0, len(finished), self.micro_batch_size or max(len(finished), 1)):
            self._penalise(finished[start : start + (self.micro_batch_size or len(finished))])
        return next_tensordict

    @torch.no_grad()
    def _penalise(self, finished: list[TensorDictBase]) -> None:
        rows = stack_rows([_as_scored(row) for row in finished])
        scored = self.ref.score(rows)
        behaviour = gather_actions(ragged(rows, keys.LOG_PROBS), scored.actions)
        kl = k1(behaviour, scored.log_probs).cpu()
        if self.mask_truncated_completions:
            kl = kl * torch.stack([~row["truncated"] for row in finished])
        rewards = torch.stack([row["reward"].reshape(()) for row in finished])
        rewards = kl_penalised_reward(rewards, kl, self.coeff)
        log_probs = spread_actions(scored.log_probs, rows, scored.actions)
        for row, reward, ref in zip(finished, rewards, log_probs, strict=True):
            row.set("reward", reward.reshape(1, 1))
            self._set(row, ref)

    def _clear(self, rows: TensorDictBase) -> None:
        for row in rows.unbind(0):
            self._set(row, torch.zeros(len(row[keys.PROMPT_TOKENS])))

    @staticmethod
    def _set(row: TensorDictBase, log_probs: torch.Tensor) -> None:
        row.set("ref_log_probs", collection(LogProbs, full=log_probs))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self._clear(tensordict_reset)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the reference's log-probs."""
        shape = self.parent.batch_size
        observation_spec["ref_log_probs"] = Composite(
            full=Unbounded(shape=(*shape, -1)), shape=shape, data_cls=LogProbs
        )
        return observation_spec


def _as_scored(row: TensorDictBase) -> TensorDictBase:
    """What the environment holds of a finished trajectory, under the names of a row."""
    return TensorDict({k: row[j] for k, j in _SCORED.items()}, [])


_SCORED = {keys.TOKENS: keys.PROMPT_TOKENS, keys.ACTION_MASK: keys.ACTION_MASK, keys.LOG_PROBS: keys.LOG_PROBS}
