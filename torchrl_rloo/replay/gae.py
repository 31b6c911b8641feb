"""GAE: finished rows in, rows with advantages of each token and targets for the critic out."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from tensordict import TensorDictBase
from torch import distributed
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ActionTokens, gather_actions, micro_batches, ragged, spread_actions, stack_rows
from torchrl_rloo.functional.advantages import whiten
from torchrl_rloo.functional.gae import gae
from torchrl_rloo.functional.kl import KL_ESTIMATORS
from torchrl_rloo.modules.value import ValueHead
from torchrl_rloo.replay.credit import check_token_rewards


class GAE(Transform):
    """A replay-buffer transform that writes ``"advantage"``, ``"state_value"`` and ``"value_target"`` on rows.

    All are ``[T, 1]``. A row's reward comes at its last action token, or at those that its token rewards name. A row
    whose reward is NaN abstains: its advantages are 0 and its targets are its values. Rows need no group, and leave as
    they come. Without a buffer, ``GAE(...).inv(rows)`` does the work.

    Args:
        value_head: estimates the values; its weights are not part of the transform's state.
        discount: of one action token to the next.
        lam: see :func:`~torchrl_rloo.functional.gae.gae`.
        kl_coeff: subtract this times the KL to the reference from the reward of each token (Ouyang et al. 2022, arXiv
            2203.02155); the rows then need reference log-probs. A number or an object with ``__float__``, read at each
            use. 0 where the environment has taken the KL off already.
        kl_estimator: a name in :data:`~torchrl_rloo.functional.kl.KL_ESTIMATORS`.
        whiten: shift and scale the advantages to mean 0 and deviation 1 over all action tokens that come together.
        process_group: whose ranks have parts of one batch to whiten; all of them must get equally many batches.
        micro_batch_size: rows that the value head sees at once; None for all.

    Raises:
        ValueError: for a number out of range or an unknown estimator.
        KeyError: for rows without rewards, or without reference log-probs where a KL is asked for.
    """

    def __init__(
        self,
        value_head: ValueHead,
        *,
        discount: float = 1.0,
        lam: float = 0.95,
        kl_coeff: SupportsFloat = 0.0,
        kl_estimator: str = "k1",
        whiten: bool = True,
        process_group: distributed.ProcessGroup | None = None,
        micro_batch_size: int | None = None,
    ):
        super().__init__()
        for name, value in (("discount", discount), ("lam", lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be from 0 to 1")
        if not 0 <= float(kl_coeff) < float("inf"):
            raise ValueError(f"kl_coeff={float(kl_coeff)} must be a number of at least 0")
        if kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator={kl_estimator!r} is unknown; known are {sorted(KL_ESTIMATORS)}")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be None or at least 1")
        self.__dict__["value_head"] = value_head  # not a submodule: its weights are not the buffer's state
        self.discount, self.lam, self.kl_coeff, self.kl_estimator = discount, lam, kl_coeff, KL_ESTIMATORS[kl_estimator]
        self.whiten, self.process_group, self.micro_batch_size = whiten, process_group, micro_batch_size

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leaves sampled rows as they are: the work is done when rows are written."""
        return tensordict

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The rows, with what the class says written on each."""
        if 0 in tensordict.batch_size:
            return tensordict
        rows = stack_rows([tensordict] if tensordict.ndim == 0 else tensordict.reshape(-1).unbind(0))
        for row in rows.unbind(0):
            check_token_rewards(row)
        for part in micro_batches(rows, self.micro_batch_size):
            self._estimate(part)
        if self.whiten:
            self._whiten(rows)
        return rows

    def _estimate(self, rows: TensorDictBase) -> None:
        values, actions = self.value_head.values(rows)
        rewards = gather_actions([_token_rewards(row) for row in rows.unbind(0)], actions)
        if float(self.kl_coeff):
            rewards = rewards - float(self.kl_coeff) * self._kl(rows, actions)
        abstains = torch.tensor([[_abstains(row)] for row in rows.unbind(0)], device=rewards.device)
        advantages, targets = gae(rewards, values, actions.mask, self.discount, self.lam)
        advantages, targets = torch.where(abstains, 0.0, advantages), torch.where(abstains, values, targets)
        written = {keys.ADVANTAGE: advantages, keys.STATE_VALUE: values, keys.VALUE_TARGET: targets}
        for key, entries in written.items():
            for row, full in zip(rows.unbind(0), spread_actions(entries, rows, actions), strict=True):
                row.set(key, full[:, None])

    def _kl(self, rows: TensorDictBase, actions: ActionTokens) -> torch.Tensor:
        policy, reference = (gather_actions(ragged(rows, k), actions) for k in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
        return self.kl_estimator(policy, reference)

    def _whiten(self, rows: TensorDictBase) -> None:
        """Over the action tokens of rows that do not abstain."""
        for_all = [row for row in rows.unbind(0) if not _abstains(row)]
        masks = [row[keys.ACTION_MASK] for row in for_all]
        flat = [row[keys.ADVANTAGE][mask, 0] for row, mask in zip(for_all, masks, strict=True)]
        whitened = whiten(torch.cat([torch.zeros(0), *flat]), process_group=self.process_group)
        whitened = whitened.split([len(f) for f in flat])
        for row, mask, advantages in zip(for_all, masks, whitened, strict=True):
            row.set(keys.ADVANTAGE, torch.zeros(len(mask), 1).to(advantages).masked_scatter(mask[:, None], advantages))


def _abstains(row: TensorDictBase) -> bool:
    """Whether a row has no reward: none for the whole, or none at one of its action tokens."""
    return bool(row[keys.REWARD].isnan().any() or _token_rewards(row)[row[keys.ACTION_MASK]].isnan().any())


def _token_rewards(row: TensorDictBase) -> torch.Tensor:
    """A row's reward at each of its tokens, ``[T]``: its token rewards, else its return at the last action token."""
    given = row.get(keys.TOKEN_REWARDS, None)
    if given is not None:
        return given
    mask = row[keys.ACTION_MASK]
    last = mask & (mask.cumsum(0) == mask.sum())
    return torch.where(last, row[keys.REWARD].reshape(()), 0.0)
