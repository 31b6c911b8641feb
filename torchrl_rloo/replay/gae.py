"""TokenGAE: finished rows in, rows with advantages of each token and targets for the critic out."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import distributed
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import gather_actions, micro_batches, ragged, spread_actions, stack_rows
from torchrl_rloo.functional.advantages import whiten
from torchrl_rloo.functional.gae import gae
from torchrl_rloo.modules.value import ValueHead
from torchrl_rloo.objectives.kl import KL
from torchrl_rloo.objectives.ranks import reducer
from torchrl_rloo.replay.credit import check_token_rewards


class TokenGAE(Transform):
    """Generalized advantage estimation per action token, as a replay-buffer transform (Schulman et al. 2015).

    Writes ``"advantage"``, ``"state_value"`` and ``"value_target"``, all ``[T, 1]``. A row's reward comes at its last
    action token, or at those that its token rewards name. A row whose reward is NaN abstains: its advantages are 0 and
    its targets are its values. Rows need no group. Without a buffer, call ``TokenGAE(...).inv(rows)``.

    TorchRL's ``GAE`` runs over environment steps, this over the tokens of a row: ``gamma`` is ``discount``, ``lmbda``
    is ``lam``, ``value_network`` is ``value_head``, ``average_gae`` is ``whiten``.

    Args:
        value_head: estimates the values; its weights are not part of the transform's state.
        discount: of one action token to the next.
        lam: see :func:`~torchrl_rloo.functional.gae.gae`.
        kl: a :class:`~torchrl_rloo.objectives.KL` with ``where="token"``: subtracts the coefficient times the KL to the
            reference from the reward of each token (Ouyang et al. 2022, arXiv 2203.02155); the rows then need reference
            log-probs. None for no KL.
        whiten: shift and scale the advantages to mean 0 and deviation 1 over the action tokens of one batch.
        process_group: ranks that hold parts of one batch to whiten; each needs equally many batches.
        micro_batch_size: rows in one forward pass of the value head; None for all.

    Raises:
        ValueError: for a number out of range, or a KL of another place.
        KeyError: for rows without rewards, or without reference log-probs where a KL is asked for.
    """

    def __init__(
        self,
        value_head: ValueHead,
        *,
        discount: float = 1.0,
        lam: float = 0.95,
        kl: KL | None = None,
        whiten: bool = True,
        process_group: distributed.ProcessGroup | None = None,
        micro_batch_size: int | None = None,
    ):
        super().__init__()
        for name, value in (("discount", discount), ("lam", lam)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name}={value} must be from 0 to 1")
        if kl is not None and kl.where != "token":
            raise ValueError(f"kl={kl}: TokenGAE takes a KL with where='token'; set that, or leave kl out")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be None or at least 1")
        self.__dict__["value_head"] = value_head  # not a submodule: its weights are not the buffer's state
        self.discount, self.lam, self.kl = discount, lam, kl if kl is not None and kl.is_on else None
        self.whiten, self.process_group, self.micro_batch_size = whiten, process_group, micro_batch_size

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return sampled rows as they are: estimates are made when rows are written."""
        return tensordict

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages, values and targets on each row."""
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
        if self.kl is not None:
            policy, ref = (gather_actions(ragged(rows, k), actions) for k in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
            rewards = rewards - float(self.kl.coeff) * self.kl.estimate(policy, ref)
        abstains = torch.tensor([[_abstains(row)] for row in rows.unbind(0)], device=rewards.device)
        advantages, targets = gae(rewards, values, actions.mask, self.discount, self.lam)
        advantages, targets = torch.where(abstains, 0.0, advantages), torch.where(abstains, values, targets)
        written = {keys.ADVANTAGE: advantages, keys.STATE_VALUE: values, keys.VALUE_TARGET: targets}
        for key, entries in written.items():
            for row, full in zip(rows.unbind(0), spread_actions(entries, rows, actions), strict=True):
                row.set(key, full[:, None])

    def _whiten(self, rows: TensorDictBase) -> None:
        """Whiten over the action tokens of rows that do not abstain."""
        for_all = [row for row in rows.unbind(0) if not _abstains(row)]
        masks = [row[keys.ACTION_MASK] for row in for_all]
        flat = [row[keys.ADVANTAGE][mask, 0] for row, mask in zip(for_all, masks, strict=True)]
        whitened = whiten(torch.cat([torch.zeros(0), *flat]), reduce=reducer(self.process_group))
        whitened = whitened.split([len(f) for f in flat])
        for row, mask, advantages in zip(for_all, masks, whitened, strict=True):
            row.set(keys.ADVANTAGE, torch.zeros(len(mask), 1).to(advantages).masked_scatter(mask[:, None], advantages))


def _abstains(row: TensorDictBase) -> bool:
    """Return whether a row lacks its reward, or that of one of its action tokens."""
    return bool(row[keys.REWARD].isnan().any() or _token_rewards(row)[row[keys.ACTION_MASK]].isnan().any())


def _token_rewards(row: TensorDictBase) -> torch.Tensor:
    """Return the reward at each token, ``[T]``: the token rewards, else the return at the last action token."""
    given = row.get(keys.TOKEN_REWARDS, None)
    if given is not None:
        return given
    mask = row[keys.ACTION_MASK]
    last = mask & (mask.cumsum(0) == mask.sum())
    return torch.where(last, row[keys.REWARD].reshape(()), 0.0)
