"""Generalized advantage estimation over tokens, with targets for the critic; transforms that need no tokens."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import distributed
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import gather_actions, micro_batches, ragged, spread_actions, stack_rows
from torchrl_rloo.functional.advantages import whiten
from torchrl_rloo.functional.returns import gae
from torchrl_rloo.modules.heads import ValueHead
from torchrl_rloo.objectives.kl import KL, token_kl
from torchrl_rloo.objectives.step import make_reducer
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.credit import check_token_rewards
from torchrl_rloo.replay.pending import BufferTransform


class TokenGAE(BufferTransform):
    """Replay-buffer transform that estimates generalized advantages per action token (arXiv 1506.02438).

    It reads the token ids, the action mask (both ``[T]``) and ``("next", "reward")`` (``[1, 1]``) of each row. The
    reward is earned at the last action token, unless the row has token rewards (``[T]``). It writes ``"advantage"``,
    ``"state_value"`` and ``"value_target"``, all ``[T, 1]``. A row whose reward is NaN abstains: its advantages are 0
    and its targets are its values. Rows need no group. Without a buffer, call ``TokenGAE(...).inv(rows)``.

    TorchRL's ``GAE`` runs over environment steps, this class over the tokens of a row. ``gamma`` is ``discount`` here,
    ``lmbda`` is ``lam``, ``value_network`` is ``value_head`` and ``average_gae`` is ``whiten``.

    Args:
        value_head: critic that estimates the values; its weights are not part of the transform's state.
        discount: discount from one action token to the next.
        lam: weight of longer returns, see :func:`~torchrl_rloo.functional.returns.gae`.
        kl: :class:`~torchrl_rloo.objectives.KL` with ``where="token"``. It subtracts the coefficient times the KL to
            the reference from each token's reward (Ouyang et al. 2022, arXiv 2203.02155), and requires reference
            log-probs in the rows. None disables it.
        whiten: True to shift and scale the advantages to mean 0 and standard deviation 1 over a batch's action tokens.
        process_group: ranks that hold parts of one batch to whiten; each needs equally many batches. None is this rank
            only.
        micro_batch_size: rows in one forward pass of the value head. None is all of them.

    Raises:
        ValueError: if a number is out of range, ``kl`` has another ``where``, or a token reward is not at an action.
        TypeError: if ``kl`` is not a ``KL``.
        KeyError: if rows lack rewards, or reference log-probs for the KL.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.embedded import build_model, build_tokenizer
        >>> critic = ValueHead(build_model(build_tokenizer(), seed=0))  # its first estimates are 0
        >>> row = TensorDict({
        ...     ("tokens", "full"): torch.tensor([5, 6, 7]),
        ...     ("masks", "all_assistant_mask"): torch.tensor([False, True, True]),
        ...     ("next", "reward"): torch.tensor([[1.0]]),
        ... })
        >>> rows = TokenGAE(critic, lam=0.5, whiten=False).inv(stack_rows([row]))
        >>> rows[0]["advantage"].flatten().tolist()
        [0.0, 0.5, 1.0]
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
                raise ValueError(f"{name}={value} must be in [0, 1]")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ValueError(f"micro_batch_size={micro_batch_size} must be None or at least 1")
        if kl is not None and getattr(kl, "discount", None) is not None:
            raise ValueError(
                f"kl.discount={kl.discount} has no effect in TokenGAE, which has a discount; set it to None"
            )
        self.__dict__["value_head"] = value_head  # not a submodule: its weights are not the buffer's state
        self.discount, self.lam, self.kl = discount, lam, token_kl(kl, "TokenGAE")
        self.whiten, self.process_group, self.micro_batch_size = whiten, process_group, micro_batch_size

    @torch.no_grad()
    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Write advantages, values and targets into each row; None, from a filter that dropped all rows, stays None."""
        if tensordict is None or 0 in tensordict.batch_size:
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
        # Values and rewards of action tokens
        values, actions = self.value_head.values(rows)
        rewards = gather_actions([_token_rewards(row) for row in rows.unbind(0)], actions)
        if self.kl is not None:
            policy, ref = (gather_actions(ragged(rows, k), actions) for k in (keys.LOG_PROBS, keys.REF_LOG_PROBS))
            rewards = rewards - float(self.kl.coeff) * self.kl.estimate(policy, ref)

        # An abstaining row must move neither the policy nor the critic
        abstains = torch.tensor([[_abstains(row)] for row in rows.unbind(0)], device=rewards.device)
        advantages, targets = gae(rewards, values, actions.mask, self.discount, self.lam)
        advantages, targets = torch.where(abstains, 0.0, advantages), torch.where(abstains, values, targets)

        outputs = {keys.ADVANTAGE: advantages, keys.STATE_VALUE: values, keys.VALUE_TARGET: targets}
        for key, entries in outputs.items():
            for row, full in zip(rows.unbind(0), spread_actions(entries, rows, actions), strict=True):
                row.set(key, full[:, None])

    def _whiten(self, rows: TensorDictBase) -> None:
        """Whiten over the action tokens of rows that do not abstain."""
        answered = [row for row in rows.unbind(0) if not _abstains(row)]
        masks = [row[keys.ACTION_MASK] for row in answered]
        flat = [row[keys.ADVANTAGE][mask, 0] for row, mask in zip(answered, masks, strict=True)]
        whitened = whiten(torch.cat([torch.zeros(0), *flat]), reduce=make_reducer(self.process_group))
        whitened = whitened.split([len(f) for f in flat])
        for row, mask, advantages in zip(answered, masks, whitened, strict=True):
            row.set(keys.ADVANTAGE, torch.zeros(len(mask), 1).to(advantages).masked_scatter(mask[:, None], advantages))


def _abstains(row: TensorDictBase) -> bool:
    """Return whether a row's reward, or the reward of one of its action tokens, is NaN."""
    return bool(row[keys.REWARD].isnan().any() or _token_rewards(row)[row[keys.ACTION_MASK]].isnan().any())


def _token_rewards(row: TensorDictBase) -> torch.Tensor:
    """Return the rewards of tokens ``[T]``: the token rewards, else the return at the last action token."""
    rewards = row.get(keys.TOKEN_REWARDS, None)
    if rewards is not None:
        return rewards
    mask = row[keys.ACTION_MASK]
    last = mask & (mask.cumsum(0) == mask.sum())
    return torch.where(last, row[keys.REWARD].reshape(()), 0.0)


def check_works_on_metadata(transform: Transform, groups_per_batch: int | None = None) -> None:
    """Raise if a transform of the buffer reads tokens, which :func:`~torchrl_rloo.data.metadata.metadata_of` drops.

    These work: every estimator of :class:`MCAdvantage` but ``"opo"``, also a
    :class:`~torchrl_rloo.replay.RunningBaseline`; the credits ``"trajectory"`` and ``"normalize_then_sum"``; all
    normalizations; ``ZeroSignalFilter`` and ``TopKSelector``. Shaping and rewards of turns work as far as they change
    the trajectory's reward, since they run in the environment, which has the tokens.


    Args:
        transform: transform of the replay buffer.
        groups_per_batch: number of groups of each step. None does not check the groups to normalize together.

    Raises:
        ValueError: for credit per turn or per token, a KL per token, a critic, or a normalization that would hold
            groups back for a later step.
    """
    if isinstance(transform, TokenGAE):
        raise ValueError("TokenGAE reads the tokens of rows and cannot work on metadata; use MCAdvantage")
    if not isinstance(transform, MCAdvantage):
        return
    if transform.credit.per_token:
        raise ValueError(
            f"credit={transform.credit} reads the tokens of rows and cannot work on metadata; use credit='trajectory' "
            "or 'normalize_then_sum'"
        )
    if transform.kl is not None:
        raise ValueError(
            f"kl={transform.kl} gives each token an advantage and cannot work on metadata; use where='reward' or 'loss'"
        )
    if transform.reads_tokens:
        raise ValueError("estimator='opo' reads the lengths of rows and cannot work on metadata; use another")
    if transform.normalize is None or groups_per_batch is None:
        return
    if groups_per_batch % transform.normalize.groups:
        raise ValueError(
            f"normalize.groups={transform.normalize.groups} must divide the {groups_per_batch} groups of a step, since "
            "a rank keeps its rows for one step only"
        )
