"""KLRewardTransform: log-probs under a frozen reference, and a KL penalty in the reward."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.modules.llm.policies import LogProbs

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import (
    gather_actions,
    make_tensorclass,
    micro_batches,
    ragged,
    spread_actions,
    stack_rows,
    unbind_rows,
)
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.envs.abstaining import is_abstaining
from torchrl_rloo.envs.turn_transform import EnvTransform
from torchrl_rloo.functional.kl import KL_ESTIMATORS, KLEstimator, kl_penalized_reward
from torchrl_rloo.modules.reference import Scorer, record_log_probs
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments


class KLRewardTransform(EnvTransform):
    """Transform that subtracts ``kl_to_ref_coeff`` times the KL of the whole trajectory from its reward when it ends.

    Put it after the :class:`RewardTransform`: the penalty comes after the reward's clip and before any baseline. It
    reads ids, action mask and log-probs ``[T]``, and changes ``("next", "reward")`` ``[1, 1]`` of rows that are done.
    It writes ``("next", "ref_log_probs", "full")`` float32 ``[T]``. The reference does not score a trajectory that
    failed (:func:`~torchrl_rloo.envs.abstaining.is_abstaining`): its own log-probs replace the reference's, so its KL
    is 0.

    Replaces TorchRL's class, which multiplies the reward by the number of tokens. Its ``ref_model`` is ``ref`` here,
    and its ``coef`` is ``kl_to_ref_coeff``.

    Args:
        ref: reference policy with ``generate=False``, or one of :mod:`torchrl_rloo.modules.reference`. Its sampling
            distribution should be the policy's.
        kl_to_ref_coeff: KL coefficient of at least 0: a number, or an object with ``__float__`` that is read at each
            use. 0 only records the log-probs.
        estimator: per-token KL estimator, a name in :data:`~torchrl_rloo.functional.kl.KL_ESTIMATORS`.
        mask_truncated_completions: whether to omit the KL of truncated trajectories, as the loss omits their tokens.
        micro_batch_size: maximum rows per forward pass of ``ref``; None scores all that end together.
        max_tokens: maximum tokens per forward pass, as the packing of ``ref`` counts them; None disables it.

    Raises:
        ValueError: if ``ref`` cannot score or would generate, the coefficient or a limit is out of range, or the
            estimator is unknown. At a step, if the chat template rewrote a row's past (``on_rewrite="split"``).
        TypeError: if ``kl_to_ref_coeff`` is not a number.

    Example::

        ref = TransformersWrapper(reference_model, tokenizer=tokenizer, generate=False)
        env = DatasetChatEnv(..., rewards=accuracy, after_rewards=[KLRewardTransform(ref, 0.05)])
    """

    @with_torchrl_arguments
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
            raise ValueError(f"ref must have a score(rows) method; {type(ref).__name__} has none")
        if getattr(ref, "generate", False):
            raise ValueError("ref must have generate=False; pass ref.get_new_version(generate=False)")
        if not hasattr(kl_to_ref_coeff, "__float__"):
            raise TypeError(f"kl_to_ref_coeff={kl_to_ref_coeff!r} must be a number, or an object with __float__")
        if not 0 <= float(kl_to_ref_coeff) < float("inf"):
            raise ValueError(f"kl_to_ref_coeff={float(kl_to_ref_coeff)} must be finite and at least 0")
        if estimator not in KL_ESTIMATORS:
            raise ValueError(f"estimator={estimator!r} is unknown; valid: {sorted(KL_ESTIMATORS)}")
        for name, limit in (("micro_batch_size", micro_batch_size), ("max_tokens", max_tokens)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit} must be at least 1, or None for no limit")
        self.__dict__["ref"] = ref  # not a submodule: the reference's weights do not belong in the state_dict
        self.coeff, self.mask_truncated_completions = kl_to_ref_coeff, mask_truncated_completions
        self.estimator = KL_ESTIMATORS[estimator]
        self.limits = {"size": micro_batch_size, "max_tokens": max_tokens, "packing": getattr(ref, "packing", "none")}

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        ended = [row for row in next_tensordict.unbind(0) if row["done"].any()]
        for row in ended:
            refuse_segments(row, type(self).__name__)
        self._clear(next_tensordict)
        env, finished = self.parent, []
        for row in ended:
            if is_abstaining(env, row):
                self._set(row, row[keys.LOG_PROBS].clone())
            else:
                finished.append(row)
        if finished:
            rows = stack_rows([_as_row(row).set(_INDEX, torch.tensor(i)) for i, row in enumerate(finished)])
            for part in micro_batches(rows, **self.limits):
                self._penalize([finished[int(row[_INDEX])] for row in part.unbind(0)], part)
        return next_tensordict

    @torch.no_grad()
    def _penalize(self, finished: list[TensorDictBase], rows: TensorDictBase) -> None:
        # Subtract the KL of each trajectory to the reference
        scored = self.ref.score(rows)
        sampled = gather_actions(ragged(rows, keys.LOG_PROBS), scored.actions)
        rewards = torch.stack([row["reward"].reshape(()) for row in finished])
        omitted = torch.stack([row["truncated"] for row in finished]) if self.mask_truncated_completions else None
        rewards = _subtract_kl(rewards, sampled, scored.log_probs, self.coeff, self.estimator, omitted)
        # Write rewards and reference log-probs back to each row
        log_probs = spread_actions(scored.log_probs, rows, scored.actions)
        for row, reward, ref in zip(finished, rewards, log_probs, strict=True):
            row.set("reward", reward.reshape(1, 1))
            self._set(row, ref)

    def _clear(self, rows: TensorDictBase) -> None:
        for row in rows.unbind(0):
            self._set(row, torch.zeros(len(row[keys.PROMPT_TOKENS])))

    @staticmethod
    def _set(row: TensorDictBase, log_probs: torch.Tensor) -> None:
        row.set("ref_log_probs", make_tensorclass(LogProbs, full=log_probs))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        self._clear(tensordict_reset)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the reference's log-probs."""
        shape = self.parent.batch_size
        observation_spec["ref_log_probs"] = Composite(
            full=Unbounded(shape=(*shape, -1)), shape=shape, data_cls=LogProbs
        )
        return observation_spec


@torch.no_grad()
def add_reference_kl(
    rows: TensorDictBase,
    ref: Scorer,
    kl_to_ref_coeff: SupportsFloat,
    *,
    estimator: str = "k1",
    mask_truncated_completions: bool = False,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
    ranks: Ranks | None = None,
    split: bool = True,
) -> TensorDictBase:
    """Score collected rows under a reference and subtract the KL from their rewards, like :class:`KLRewardTransform`.

    Several ranks call it together on the collected rows: each may hold only a part of the reference.

    Args:
        rows: rows of batch size ``[B]``, written in place: ``("next", "reward")`` and
            ``("next", "ref_log_probs", "full")``. A row whose reward is NaN gets its own log-probs.
        ref, kl_to_ref_coeff, estimator, mask_truncated_completions: see :class:`KLRewardTransform`.
        micro_batch_size, max_tokens: see :class:`KLRewardTransform`.
        ranks: ranks that score together. None scores alone.
        split: True if each rank passes the same rows, False if each passes its own.

    Returns:
        The rows.
    """
    limits = {"micro_batch_size": micro_batch_size, "max_tokens": max_tokens, "ranks": ranks, "split": split}
    record_log_probs(ref, rows, log_probs=keys.REF_LOG_PROBS, **limits)
    for row in unbind_rows(rows):
        if row[keys.REWARD].isnan().any():
            row.set(keys.REF_LOG_PROBS, row[keys.LOG_PROBS].clone())
            continue
        mask = row[keys.ACTION_MASK]
        sampled, ref_log_probs = (row[key][mask][None] for key in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
        omitted = row[keys.TRUNCATED][None] if mask_truncated_completions else None
        reward = row[keys.REWARD]
        penalized = _subtract_kl(
            reward.reshape(1), sampled, ref_log_probs, kl_to_ref_coeff, KL_ESTIMATORS[estimator], omitted
        )
        row.set(keys.REWARD, penalized.reshape(reward.shape))
    return rows


def _subtract_kl(
    rewards: torch.Tensor,
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    coeff: SupportsFloat,
    estimator: KLEstimator,
    omitted: torch.Tensor | None,
) -> torch.Tensor:
    """Subtract the KL of trajectories to the reference from their rewards."""
    kl = estimator(log_probs, ref_log_probs).cpu()
    if omitted is not None:
        kl = kl * ~omitted
    return kl_penalized_reward(rewards, kl, float(coeff))


def _as_row(row: TensorDictBase) -> TensorDictBase:
    """Rename a finished trajectory's entries in the environment to those of a row."""
    entries = {k: row[j] for k, j in _ROW_KEYS.items()}
    # With a truncated support, the reference is normalized over the same tokens as the policy
    if row.get(keys.SUPPORT_IDS, None) is not None:
        entries |= {k: row[k] for k in (keys.SUPPORT_IDS, keys.SUPPORT_SIZES)}
    return TensorDict(entries, [])


_INDEX = "index"
_ROW_KEYS = {keys.TOKENS: keys.PROMPT_TOKENS, keys.ACTION_MASK: keys.ACTION_MASK, keys.LOG_PROBS: keys.LOG_PROBS}
