"""Selection of the k most informative rows of each group.

TorchRL's ``TopKRewardSelector`` groups by the prompt's text, keeps only rows above the median, drops groups silently
and leaves held rows out of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay.pending import PendingGroups
from torchrl_rloo.replay.transform import BufferTransform


def top_by_reward(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices ``[k]`` of the largest of ``[n]`` returns; ties keep their order."""
    return returns.argsort(descending=True, stable=True)[:k]


def top_by_variance(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices ``[k]`` of those of ``[n]`` returns with the largest variance: some best and some worst ones.

    This is max-variance down-sampling (arXiv 2504.13818). Among choices of equal variance it takes the most balanced.

    Example:
        >>> top_by_variance(torch.tensor([0.0, 0.5, 1.0, 0.5, 1.0]), 2).tolist()
        [0, 4]
    """
    order = returns.argsort(stable=True)
    k = min(k, len(order))
    splits = [torch.cat([order[: k - top], order[len(order) - top :]]) for top in range(k + 1)]
    spread = [round(float(returns[chosen].double().var(correction=0)), 12) for chosen in splits]
    return splits[max(range(k + 1), key=lambda top: (spread[top], -abs(2 * top - k)))]


CRITERIA: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "reward": top_by_reward,
    "variance": top_by_variance,
}


def select_top_k(
    rows: TensorDictBase, k: int, by: Literal["reward", "variance"] = "reward", *, returns: Returns = final_return
) -> TensorDictBase:
    """Select the ``k`` best or most varied rows of each group, in the order of the rows.

    Rows that abstain are dropped. ``"group_size"`` (``[]``) becomes the number of selected rows of the group.

    Args:
        rows: batch size ``[B]``, whole groups.
        k: number of rows to keep of a group; smaller groups are kept whole.
        by: ``"reward"`` for the best rows, ``"variance"`` for the most varied ones.
        returns: function of the rows that returns ``[B]`` values to compare, see :mod:`torchrl_rloo.data.outcomes`.

    Returns:
        Selected rows, batch size ``[B']``, possibly 0.

    Raises:
        ValueError: if ``returns`` gives several values per row.

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
    if not len(rows):
        return rows
    values, groups = returns(rows), rows[keys.GROUP_ID].reshape(-1)
    if values.ndim != 1:
        raise ValueError(f"returns gave {tuple(values.shape)}, but must give one value for each row: [{len(rows)}]")
    kept: dict[int, torch.Tensor] = {}  # row index to the number of selected rows of its group
    for group in groups.unique():
        members = ((groups == group) & ~values.isnan()).nonzero().flatten()
        chosen = members[CRITERIA[by](values[members], k)]
        kept.update((i, torch.tensor(len(chosen))) for i in chosen.tolist())
    # Write sizes to copies: the caller may still use the rows
    selected = [rows[i].copy().set(keys.GROUP_SIZE, kept[i]) for i in sorted(kept)]
    return stack_rows(selected) if selected else rows[:0]


class TopKSelector(BufferTransform):
    """Replay-buffer transform that keeps ``k`` rows of each group: sample many, train on the most informative.

    It reads ``"group_id"`` (``[]``) and what ``returns`` reads, by default ``("next", "reward")`` (``[1, 1]``). It
    writes ``"group_size"`` (``[]``).

    Written rows pass the transforms of a buffer from last to first, so the order of ``Compose`` matters. The selection
    depends on the rewards, so neither order estimates the gradient of the expected return. Where that matters, sample
    fewer rows instead.

    - ``Compose(TopKSelector(k), MCAdvantage(G))`` computes advantages first, over all ``G`` rows. Each row's baseline
      stays unbiased, but the group's sum lacks the dropped rows. With ``by="variance"`` these are the rows between the
      extremes, whose advantages are small. With ``by="reward"`` they have the negative advantages, so the remaining
      rows are mostly reinforced.
    - ``Compose(MCAdvantage(), TopKSelector(k, num_generations=G))`` computes advantages over the ``k`` rows, which sum
      to 0. The baseline is then the mean of the selected rows, not of the policy. With ``by="reward"`` it is too high,
      so a row better than most of its group may be discouraged. With ``by="variance"`` it lies halfway between the
      best and the worst, which amplifies rare successes and failures (arXiv 2504.13818).

    Args:
        k: number of rows of a group to keep, at least 1; at least 2 with ``num_generations``, to compare rows.
        num_generations: ``G``, members of a group; rows are held until their group is complete. None expects whole
            groups, as :class:`MCAdvantage` returns them.
        by: ``"reward"`` for the best rows, ``"variance"`` for the most varied ones.
        returns: function of the rows that returns the values to compare, see :mod:`torchrl_rloo.data.outcomes`.
        max_pending_groups: limit of incomplete groups; beyond it the oldest is dropped. None disables it.

    Attributes:
        counts: numbers of rows ``"top_k/kept"`` and ``"top_k/left_out"``; ``"top_k/expired_groups"``,
            ``"top_k/expired_rows"`` and ``"top_k/late_rows"`` of
            :class:`~torchrl_rloo.replay.pending.PendingGroups`.

    Raises:
        ValueError: if a number is out of range or has no effect, or ``by`` is unknown.

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
        min_k = 1 if num_generations is None else 2
        if k < min_k or (num_generations is not None and k > num_generations):
            raise ValueError(f"k={k} must be at least {min_k} and at most num_generations={num_generations}")
        if by not in CRITERIA:
            raise ValueError(f"by={by!r} must be one of {sorted(CRITERIA)}")
        if num_generations is None and max_pending_groups is not None:
            raise ValueError(f"max_pending_groups={max_pending_groups} has no effect without num_generations: set both")
        self.k, self.by, self.returns = k, by, returns
        self._groups = (
            None
            if num_generations is None
            else PendingGroups(num_generations, max_pending_groups=max_pending_groups, part="top_k")
        )
        self._row_counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Counters of rows and groups, see the class."""
        pending = {} if self._groups is None else self._groups.counts
        return self._row_counts + Counter({k: n for k, n in pending.items() if k not in ("top_k/groups", "top_k/rows")})

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return 0 if self._groups is None else self._groups.pending_rows

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Return the rows to write to the buffer, or None if there are none."""
        if tensordict is None:
            return None
        rows = [tensordict] if tensordict.ndim == 0 else list(tensordict.reshape(-1).unbind(0))
        if self._groups is not None:
            rows = [row for batch in self._groups.add(rows) for group in batch for row in group]
        if not rows:
            return None
        selected = select_top_k(stack_rows(rows), self.k, self.by, returns=self.returns)
        self._row_counts.update({"top_k/kept": len(selected), "top_k/left_out": len(rows) - len(selected)})
        return selected if len(selected) else None

    def get_extra_state(self) -> dict[str, Any]:
        """Return held rows and counters for ``state_dict``, as plain values and tensors."""
        return {"rows": dict(self._row_counts), "groups": None if self._groups is None else self._groups.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore held rows and counters."""
        self._row_counts.clear()
        self._row_counts.update(state["rows"])
        if self._groups is not None:
            self._groups.load_state_dict(state["groups"])
