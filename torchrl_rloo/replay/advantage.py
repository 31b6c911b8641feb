"""Monte-Carlo advantages of complete groups, written as rows enter a replay buffer.

TorchRL's ``MCAdvantage`` has no leave-one-out, groups by the prompt's text, keeps incomplete groups without limit and
leaves them out of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import distributed

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import (
    ActionTokens,
    action_tokens,
    entry_of,
    gather_actions,
    place_actions,
    set_entries,
    spread_actions,
    stack_rows,
)
from torchrl_rloo.data.segments import refuse_segments
from torchrl_rloo.functional.advantages import (
    ESTIMATORS,
    NORMALIZATIONS,
    Estimator,
    RewardStd,
    SignalShare,
    Whiten,
    estimator_option,
)
from torchrl_rloo.functional.returns import rewards_to_go
from torchrl_rloo.objectives.kl import KL, token_kl
from torchrl_rloo.objectives.step import make_reducer
from torchrl_rloo.replay.credit import CREDITS, Credit, Groups, estimator_name, third_argument
from torchrl_rloo.replay.pending import BufferTransform, Group, PendingGroups
from torchrl_rloo.runtime.lookup import resolve
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

_REMEDIES: dict[NestedKey, str] = {
    keys.GROUP_ID: "a DataLoadingPrimer writes it",
    keys.PROMPT_ID: "a DataLoadingPrimer writes it; this estimator keeps a baseline for each prompt",
    keys.ROLE_ID: "agent_env(roles=) writes it; this estimator keeps a baseline for each role",
    keys.ORIGIN: "DatasetChatEnv(greedy_member=True) writes it; this estimator compares with that member",
    keys.REWARD: "a RewardTransform writes it",
    keys.REWARDS: "a RewardTransform writes it; credit='normalize_then_sum' reads each function's rewards",
    keys.TOKEN_REWARDS: "a TurnRewardTransform writes it, also from rewards of tokens; or use credit='trajectory'",
    keys.TOKENS: "keep the tokens in the rows that are written to the buffer",
    keys.ACTION_MASK: "keep the masks in the rows that are written to the buffer",
    keys.LOG_PROBS: "keep the sampler's log-probs in the rows; a KL per token needs them",
    keys.SHARP_LOG_PROBS: "record_log_probs(scorer at half the temperature, log_probs=...) writes it",
    keys.REF_LOG_PROBS: "a KLRewardTransform with coefficient 0 writes it; a KL per token needs it",
}


class MCAdvantage(BufferTransform):
    """Replay-buffer transform that holds rows back until their group is complete, then writes their advantages.

    It reads ``"group_id"`` (``[]``) and ``("next", "reward")`` (``[1, 1]``) of each row, and what ``credit`` and ``kl``
    need. It writes ``"advantage"``: ``[1, 1]`` for one advantage per row without ``kl``, otherwise ``[T, 1]`` with 0
    except on action tokens. The defaults suit most loops.

    Members of a group may arrive in any order and in any number of batches. A group is complete with as many rows as
    its ``"group_size"``: leave rows out with :func:`~torchrl_rloo.replay.drop_rows`, which corrects it. Rows leave in
    the order in which their groups became complete. A row whose reward is NaN abstains: it completes its group, stays
    out of every statistic and gets advantage 0.

    The class replaces TorchRL's: ``grpo_size`` is ``num_generations``, and its estimator is ``"grpo"``. ``"group_id"``
    tells groups apart instead of ``prompt_key``. The other keys are fixed, see :mod:`torchrl_rloo.data.keys`.

    Args:
        num_generations: ``G``, members of a group. None reads each row's ``"group_size"``, which a
            :class:`~torchrl_rloo.envs.DatasetChatEnv` writes.
        estimator: name in :data:`~torchrl_rloo.functional.advantages.ESTIMATORS`, a
            :class:`~torchrl_rloo.replay.credit.RunningBaseline`, or a function ``(rewards [N], groups [N]) ->
            advantages [N]``, optionally with attributes of an
            :class:`~torchrl_rloo.functional.advantages.EstimatorSpec`. If it has a ``state_dict()``, the checkpoint
            contains it. None is ``"rloo"``, or ``"grpo"`` for ``credit="normalize_then_sum"`` (together: GDPO).
        credit: choice from :data:`~torchrl_rloo.replay.credit.CREDITS`: ``"trajectory"``, one advantage per row;
            ``NormalizeThenSum(weights)``, one advantage per row from separate advantages of the reward functions;
            ``"turn"`` or ``TurnCredit(discount)``; ``"token"`` or ``TokenCredit(discount)``; ``"optimal_token"``.
        kl: :class:`~torchrl_rloo.objectives.KL` with ``where="token"``. It rewards each action token with
            ``-coeff * kl`` to the reference, and adds the return of these rewards to the advantage, after the baseline.
            The policy's log-probs are the proximal ones if a row has them. None disables it.
        normalize: choice from :data:`~torchrl_rloo.functional.advantages.NORMALIZATIONS` for the last step:
            ``Whiten(groups)``, ``RewardStd(groups)`` or ``SignalShare(groups)``. It normalizes over rows, or over all
            action tokens if each has its own advantage. Complete groups wait until there are ``groups`` of them. None
            disables it.
        process_group: ranks that hold parts of one batch to normalize, whole groups each; each needs equally many
            batches. None is this rank only.
        max_pending_groups: limit of incomplete groups; beyond it the oldest is dropped. None disables it.

    Attributes:
        counts: ``"advantage/groups"`` and ``"advantage/rows"`` that left; ``"advantage/expired_groups"`` and
            ``"advantage/expired_rows"``, dropped while incomplete; ``"advantage/late_rows"``, dropped because their
            group had left. The first drop of each kind is logged as a warning.

    Raises:
        ValueError: for a setting that is unknown, out of range or without effect; for rows that disagree with each
            other or with ``num_generations`` on the size of their group.
        KeyError: if a row lacks an entry. No row of the batch is taken in after either error.
        TypeError: if ``kl`` is not a ``KL``.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(num_generations=2))
        >>> def row(reward):
        ...     return TensorDict({"group_id": torch.tensor(7), ("next", "reward"): torch.tensor([[reward]])})
        >>> _ = buffer.extend(stack_rows([row(1.0)]))
        >>> len(buffer)
        0
        >>> _ = buffer.extend(stack_rows([row(0.0)]))
        >>> buffer[:]["advantage"].flatten().tolist()
        [1.0, -1.0]
    """

    @with_torchrl_arguments
    def __init__(
        self,
        num_generations: int | None = None,
        *,
        estimator: str | Estimator | None = None,
        credit: str | Mapping[str, Any] | Credit = "trajectory",
        kl: KL | None = None,
        normalize: Mapping[str, Any] | Whiten | RewardStd | SignalShare | None = None,
        process_group: distributed.ProcessGroup | None = None,
        max_pending_groups: int | None = None,
    ):
        super().__init__()
        # Resolve the parts that names may stand for
        self.credit: Credit = resolve("credit", credit, CREDITS)
        self.estimator = resolve(
            "estimator", self.credit.default_estimator if estimator is None else estimator, ESTIMATORS
        )
        self.credit.check_estimator(self.estimator)
        self.normalize = None if normalize is None else resolve("normalize", normalize, NORMALIZATIONS)
        # Refuse arguments that do not fit together or have no effect
        if num_generations == 1 and estimator_option(self.estimator, "needs_group"):
            raise ValueError(
                f"num_generations=1: estimator={estimator_name(self.estimator)} compares the rows of a group and "
                "requires at least 2; with 1, set estimator='reinforce' or a RunningBaseline"
            )
        if num_generations is not None and (k := getattr(self.estimator, "k", 1)) > num_generations:
            raise ValueError(f"estimator=pass_at_k: k={k} must be at most num_generations={num_generations}")
        self.kl = token_kl(kl, "MCAdvantage")
        if process_group is not None and self.normalize is None:
            raise ValueError("process_group has no effect without normalize: leave process_group out, or set normalize")
        # Hold groups until they are complete, and until there are enough to normalize
        self._reduce = make_reducer(process_group)
        groups_per_batch = None if self.normalize is None else self.normalize.groups
        self._groups = PendingGroups(
            num_generations, groups_per_batch=groups_per_batch, max_pending_groups=max_pending_groups
        )

    @property
    def counts(self) -> Counter[str]:
        """Counters of rows and groups, see the class."""
        return self._groups.counts

    @property
    def depends_on_other_groups(self) -> bool:
        """True if advantages depend on other groups of the step, which must then all be written together."""
        return self.normalize is not None or not estimator_option(self.estimator, "needs_group")

    @property
    def reads_tokens(self) -> bool:
        """True if advantages need entries per token, which the metadata of rows lack."""
        return self.credit.per_token or self.kl is not None or estimator_option(self.estimator, "wants_lengths")

    @property
    def pending_ids(self) -> set[int]:
        """Ids of the groups that wait for some of their rows."""
        return self._groups.pending_ids

    @property
    def held_rows(self) -> list[TensorDictBase]:
        """Rows that are held back."""
        return self._groups.held_rows

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return self._groups.pending_rows

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for the rest of the batch to normalize."""
        return self._groups.waiting_groups

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take rows in and return those whose groups are complete, with advantages, or None."""
        if tensordict is None:  # the transform that ran before holds its rows back
            return None
        rows = [tensordict] if tensordict.ndim == 0 else tensordict.reshape(-1).unbind(0)
        self._check(rows)
        ready = [row for batch in self._groups.add(rows) for row in self._write(batch)]
        return stack_rows(ready) if ready else None

    def _check(self, rows: Sequence[TensorDictBase]) -> None:
        """Raise a KeyError if a row lacks an entry, or a ValueError if the credit refuses the row."""
        needed = [keys.GROUP_ID, *self.credit.reads]
        if (third := third_argument(self.estimator)) is not None:
            needed.append(third[0])
        if self.kl is not None:
            needed += [keys.TOKENS, keys.ACTION_MASK, keys.REF_LOG_PROBS]
        for row in rows:
            reads_sampler = self.kl is not None and entry_of(row, keys.PROXIMAL_LOG_PROBS) is None
            for key in [*needed, keys.LOG_PROBS] if reads_sampler else needed:
                if entry_of(row, key) is None:
                    raise KeyError(f"a row has no {key!r}: {_REMEDIES[key]}")
            if self.kl is not None or self.credit.per_token:
                refuse_segments(row, f"MCAdvantage(credit={self.credit}, kl={self.kl})")
            self.credit.check_row(row)

    def _write(self, complete: Sequence[Group]) -> list[TensorDictBase]:
        """Write advantages into the rows of complete groups that leave together, and return the rows."""
        rows = [row for group in complete for row in group]
        index = torch.repeat_interleave(torch.tensor([len(group) for group in complete]))
        batch = stack_rows(rows) if self.credit.per_token or self.kl is not None else None
        actions = None if batch is None else action_tokens(batch)

        # Baseline: compare the rows of each group, with the rewards of tokens that were too stale to train on
        stale = self.credit.per_token and any(keys.SAMPLED_MASK in row.keys() for row in rows)
        sampled = action_tokens(batch, sampled=True) if stale else actions
        estimates = self.credit(Groups(rows, index, sampled, self.estimator))
        advantages, mask = estimates.advantages, estimates.has_signal
        trained = [True] * len(rows)
        if estimator_option(self.estimator, "wants_greedy"):  # greedy rows are a baseline only
            trained = [int(row[keys.ORIGIN]) != keys.GREEDY for row in rows]
            mask = mask & torch.tensor(trained)[:, None]
        if stale:
            kept = actions.action_mask[sampled.action_mask]
            advantages, mask = (place_actions(each[sampled.mask][kept], actions) for each in (advantages, mask))

        # Add the KL after the baseline, so that rows are compared by their rewards only
        if self.kl is not None:
            mask = estimates.answered[:, None] & actions.mask
            advantages = torch.where(mask, advantages + self._kl_to_go(rows, actions), 0.0)

        # Normalize over the whole batch
        if self.normalize is not None:
            returns, magnitude = estimates.returns, 0.0
            if returns.numel() and not estimator_option(self.estimator, "rescales"):
                magnitude = float(returns.abs().nan_to_num(0.0).max())
            advantages = self.normalize(advantages, mask, returns, magnitude, self._reduce, index)

        # Write [1, 1] per row, or [T, 1] where action tokens have separate advantages
        per_row = advantages if batch is None else spread_actions(advantages, batch, actions)
        for row, advantage in zip(rows, per_row, strict=True):
            set_entries(row, {keys.ADVANTAGE: advantage.float().reshape(-1, 1)})
        return list(compress(rows, trained))

    def _kl_to_go(self, rows: Sequence[TensorDictBase], actions: ActionTokens) -> torch.Tensor:
        """Return the ``[N, A]`` returns of the KL rewards ``-coeff * kl``, from each action token on."""
        proximal = [row.get(keys.PROXIMAL_LOG_PROBS, None) for row in rows]
        policy = [row[keys.LOG_PROBS] if p is None else p for row, p in zip(rows, proximal, strict=True)]
        ref = [row[keys.REF_LOG_PROBS] for row in rows]
        kl = self.kl.estimate(gather_actions(policy, actions), gather_actions(ref, actions))
        discount = self.credit.token_discount if self.kl.discount is None else self.kl.discount
        return rewards_to_go(-float(self.kl.coeff) * kl.double(), actions.mask, discount)

    def get_extra_state(self) -> dict[str, Any]:
        """Return held rows, counters and the estimator's state for ``state_dict``, as plain values and tensors."""
        state = self._groups.state_dict()
        if hasattr(self.estimator, "state_dict"):
            state["estimator"] = self.estimator.state_dict()
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore held rows, counters and the estimator's state."""
        self._groups.load_state_dict(state)
        if hasattr(self.estimator, "load_state_dict"):
            self.estimator.load_state_dict(state["estimator"])
