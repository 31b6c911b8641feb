"""KLRewardTransform: the reference's log-probs, and the reward less the KL to it."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform
from torchrl.modules.llm.policies import LogProbs

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import collection, gather_actions, micro_batches, ragged, spread_actions, stack_rows
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.functional.kl import KL_ESTIMATORS, kl_penalized_reward
from torchrl_rloo.modules.recording import Scorer


class KLRewardTransform(Transform):
    """Subtracts ``kl_to_ref_coeff`` times the KL of the whole trajectory from its reward, when it ends.

    Put it after the :class:`RewardTransform`: the penalty comes after the reward's clip and before any baseline. It
    also writes ``("next", "ref_log_probs", "full")``. Replaces TorchRL's class, which multiplies the reward by the
    number of tokens; there ``ref_model`` is ``ref`` and ``coef`` is ``kl_to_ref_coeff``.

    Args:
        ref: scores under the reference; its sampling distribution should be the policy's. A policy with
            ``generate=False``, or one of :mod:`torchrl_rloo.modules.reference`.
        kl_to_ref_coeff: the coefficient, a number or an object with ``__float__`` that is read at each use; 0 only
            records the log-probs.
        estimator: of the KL at each token, a name in :data:`~torchrl_rloo.functional.kl.KL_ESTIMATORS`.
        mask_truncated_completions: leave the KL out on truncated trajectories, as the loss leaves out their tokens.
        micro_batch_size: rows scored at once; None for all that end together.
        max_tokens: tokens scored at once, as the packing of ``ref`` counts them; None for any number.
    """

    def __init__(
        self,
        ref: Scorer,
        kl_to_ref_coeff: SupportsFloat,
        *,
        estimator: str = "k1",
        mask_truncated_completions: bool = False,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ):
        super().__init__()
        if not callable(getattr(ref, "score", None)):
            raise ValueError(f"ref must have a score(rows) method, {type(ref).__name__} has none")
        if getattr(ref, "generate", False):
            raise ValueError("ref generates; pass ref.get_new_version(generate=False)")
        if not hasattr(kl_to_ref_coeff, "__float__"):
            raise TypeError(f"kl_to_ref_coeff={kl_to_ref_coeff!r} must be a number, or an object with __float__")
        if not 0 <= float(kl_to_ref_coeff) < float("inf"):
            raise ValueError(f"kl_to_ref_coeff={float(kl_to_ref_coeff)} must be a number of at least 0")
        if estimator not in KL_ESTIMATORS:
            raise ValueError(f"estimator={estimator!r} is unknown; known are {sorted(KL_ESTIMATORS)}")
        for name, limit in (("micro_batch_size", micro_batch_size), ("max_tokens", max_tokens)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} must be None or at least 1")
        self.__dict__["ref"] = ref  # not a submodule: the reference's weights are not the environment's state
        self.coeff, self.mask_truncated_completions = kl_to_ref_coeff, mask_truncated_completions
        self.estimator = KL_ESTIMATORS[estimator]
        self.limits = {"size": micro_batch_size, "max_tokens": max_tokens, "packing": getattr(ref, "packing", "none")}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        finished = [row for row in next_tensordict.unbind(0) if row["done"].any()]
        for row in finished:
            refuse_segments(row, type(self).__name__)
        self._clear(next_tensordict)
        if finished:
            rows = stack_rows([_as_scored(row).set(_INDEX, torch.tensor(i)) for i, row in enumerate(finished)])
            for part in micro_batches(rows, **self.limits):
                self._penalise([finished[int(row[_INDEX])] for row in part.unbind(0)], part)
        return next_tensordict

    @torch.no_grad()
    def _penalise(self, finished: list[TensorDictBase], rows: TensorDictBase) -> None:
        scored = self.ref.score(rows)
        behaviour = gather_actions(ragged(rows, keys.LOG_PROBS), scored.actions)
        kl = self.estimator(behaviour, scored.log_probs).cpu()
        if self.mask_truncated_completions:
            kl = kl * torch.stack([~row["truncated"] for row in finished])
        rewards = torch.stack([row["reward"].reshape(()) for row in finished])
        rewards = kl_penalized_reward(rewards, kl, float(self.coeff))
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
    entries = {k: row[j] for k, j in _SCORED.items()}
    if row.get(keys.SUPPORT_IDS, None) is not None:  # the reference is then scored over the same tokens as the policy
        entries |= {k: row[k] for k in (keys.SUPPORT_IDS, keys.SUPPORT_SIZES)}
    return TensorDict(entries, [])


_INDEX = "index"
_SCORED = {keys.TOKENS: keys.PROMPT_TOKENS, keys.ACTION_MASK: keys.ACTION_MASK, keys.LOG_PROBS: keys.LOG_PROBS}
