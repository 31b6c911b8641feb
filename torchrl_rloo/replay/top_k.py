"""TopKSelector: trains on the k rows of each group that say most.

Replaces TorchRL's ``TopKRewardSelector``: that one groups by the prompt's text, keeps rows above the median only, drops
groups without a word, and leaves what it holds back out of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay.pending import PendingGroups


def best(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the ``k`` largest of ``[n]`` returns; among equals the first."""
    return returns.argsort(descending=True, stable=True)[:k]


def most_varied(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Places of the ``k`` of ``[n]`` returns with the largest variance: some of the best and some of the worst.

    No other choice varies more (max-variance down-sampling, arXiv 2504.13818). Of equal ones it is the most balanced.

    Example:
        >>> most_varied(torch.tensor([0.0, 0.5, 1.0, 0.5, 1.0]), 2).tolist()
        [0, 4]
    """
    order = returns.argsort(stable=True)
    k = min(k, len(order))
    splits = [torch.cat([order[: k - top], order[len(order) - top :]]) for top in range(k + 1)]
    spread = [round(float(returns[chosen].double().var(correction=0)), 12) for chosen in splits]
    return splits[max(range(k + 1), key=lambda top: (spread[top], -abs(2 * top - k)))]


CRITERIA: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {"reward": best, "variance": most_varied}


def select_top_k(
    rows: TensorDictBase, k: int, by: Literal["reward", "variance"] = "reward", *, returns: Returns = final_return
) -> TensorDictBase:
    """The ``k`` rows of each group that a criterion prefers, in the order of the rows.

    Rows that abstain are left out. The rows' ``"group_size"`` becomes what is left of their group.

    Args:
        rows: batch size ``[B]``, whole groups.
        k: how many rows of a group to keep; of a group with fewer all are kept.
        by: ``"reward"`` for the best, ``"variance"`` for those that differ most.
        returns: what is compared, one value for each row, see :mod:`torchrl_rloo.data.outcomes`.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = stack_rows([
        ...     TensorDict({"group_id": torch.tensor(0), ("next", "reward"): torch.tensor([[r]])})
        ...     for r in (0.1, 0.9, 0.5, 0.6)
        ... ])
        >>> select_top_k(rows, 2)["next", "reward"].flatten().tolist()
        [0.8999999761581421, 0.6000000238418579]
        >>> select_top_k(rows, 2, "variance")["group_size"].tolist()
        [2, 2]
    """
    values, groups = returns(rows), rows[keys.GROUP_ID].reshape(-1)
    if values.ndim != 1:
        raise ValueError(f"returns gave {tuple(values.shape)}, but rows are ordered by one value each: [{len(rows)}]")
    kept: dict[int, torch.Tensor] = {}  # the size of what is left, by row
    for group in groups.unique():
        members = ((groups == group) & ~values.isnan()).nonzero().flatten()
        chosen = members[CRITERIA[by](values[members], k)]
        kept.update((i, torch.tensor(len(chosen))) for i in chosen.tolist())
    # sizes are written to copies: the rows may be the caller's still
    left = [rows[i].copy().set(keys.GROUP_SIZE, kept[i]) for i in sorted(kept)]
    return stack_rows(left) if left else rows[:0]


class TopKSelector(Transform):
    """A replay-buffer transform that keeps ``k`` rows of each group: sample many, train on those that say most.

    What is written to a buffer passes its transforms from last to first. So there are two orders, and what they
    estimate differs. Which rows are kept depends on what they earned, so neither gradient is that of the expected
    return; lower ``num_generations`` where that matters more than what a row teaches.

    - ``Compose(TopKSelector(k), MCAdvantage(G))``: advantages come first, over all ``G`` rows. Each row's baseline is
      as unbiased as ever; the sum over a group lacks the terms of the rows that went: with ``by="variance"`` those
      between the extremes, which are small; with ``by="reward"`` the negative ones, so that the rest mostly reinforces.
    - ``Compose(MCAdvantage(), TopKSelector(k, num_generations=G))``: advantages are over the ``k`` rows, and sum to 0.
      The baseline is then the mean of rows that were chosen, not of what the policy earns: with ``by="reward"`` too
      high, so that a row better than most of its group may be discouraged; with ``by="variance"`` halfway between the
      best and the worst, which widens rare successes and failures alike (arXiv 2504.13818).

    Args:
        k: rows of a group to keep, at least 1, or 2 if ``num_generations`` is given, for a row to be compared with.
        num_generations: ``G``, members of a group: holds rows back until theirs is complete. None: rows come in whole
            groups, as they do from :class:`MCAdvantage`.
        by: ``"reward"`` for the best, ``"variance"`` for those that differ most.
        returns: what is compared, see :mod:`torchrl_rloo.data.outcomes`.
        max_pending_groups: how many incomplete groups to hold; the oldest is dropped when there are more.

    Attributes:
        counts: ``"top_k/kept"``, ``"top_k/left_out"`` rows; ``"top_k/expired_groups"``, ``"top_k/expired_rows"``,
            ``"top_k/late_rows"`` as :class:`~torchrl_rloo.replay.pending.PendingGroups` has them.

    Raises:
        ValueError: for a number out of range, or an unknown criterion.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> from torchrl.envs import Compose
        >>> from torchrl_rloo.replay import MCAdvantage
        >>> rows = stack_rows([
        ...     TensorDict({"group_id": torch.tensor(0), ("next", "reward"): torch.tensor([[r]])})
        ...     for r in (0.0, 0.25, 0.5, 1.0)
        ... ])
        >>> after = ReplayBuffer(storage=LazyStackStorage(8), transform=Compose(TopKSelector(2), MCAdvantage(4)))
        >>> _ = after.extend(rows)
        >>> [round(a, 3) for a in after[:]["advantage"].flatten().tolist()]
        [0.083, 0.75]
        >>> before = Compose(MCAdvantage(), TopKSelector(2, num_generations=4, by="variance"))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=before)
        >>> _ = buffer.extend(rows)
        >>> buffer[:]["advantage"].flatten().tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        k: int,
        num_generations: int | None = None,
        *,
        by: Literal["reward", "variance"] = "reward",
        returns: Returns = final_return,
        max_pending_groups: int | None = None,
    ):
        super().__init__()
        least = 1 if num_generations is None else 2
        if k < least or (num_generations is not None and k > num_generations):
            raise ValueError(f"k={k} must be at least {least} and at most num_generations={num_generations}")
        if by not in CRITERIA:
            raise ValueError(f"by={by!r} must be one of {sorted(CRITERIA)}")
        if num_generations is None and max_pending_groups is not None:
            raise ValueError(f"max_pending_groups={max_pending_groups} has no effect without num_generations: set both")
        self.k, self.by, self.returns = k, by, returns
        self._groups = (
            None if num_generations is None else PendingGroups(num_generations, max_pending_groups=max_pending_groups)
        )
        self._rows: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """What has come and gone, see above."""
        pending = {} if self._groups is None else self._groups.counts
        return self._rows + Counter({f"top_k/{k}": n for k, n in pending.items() if k not in ("groups", "rows")})

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return 0 if self._groups is None else self._groups.pending_rows

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leaves rows that are sampled from a buffer as they are: the work is done when rows are written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """On the way into a buffer; None where nothing is written."""
        if tensordict is None:
            return None
        rows = [tensordict] if tensordict.ndim == 0 else list(tensordict.reshape(-1).unbind(0))
        if self._groups is not None:
            rows = [row for batch in self._groups.add(rows) for group in batch for row in group]
        if not rows:
            return None
        left = select_top_k(stack_rows(rows), self.k, self.by, returns=self.returns)
        self._rows.update({"top_k/kept": len(left), "top_k/left_out": len(rows) - len(left)})
        return left if len(left) else None

    def get_extra_state(self) -> dict[str, Any]:
        """Rows held back and counters, for ``state_dict``: plain values and tensors."""
        return {"rows": dict(self._rows), "groups": None if self._groups is None else self._groups.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores rows held back and counters."""
        self._rows.clear()
        self._rows.update(state["rows"])
        if self._groups is not None:
            self._groups.load_state_dict(state["groups"])
