"""Filters that drop rows with zero advantage, groups without a signal, or all but the k most informative rows.

TorchRL's ``TopKRewardSelector`` groups by the prompt's text, keeps only rows above the median, drops groups silently
and leaves held rows out of the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return
from torchrl_rloo.data.rows import ragged, stack_rows, unbind_rows
from torchrl_rloo.functional.statistics import group_ranges, has_signal
from torchrl_rloo.replay.pending import BufferTransform, PendingGroups


def drop_zero_advantage(rows: TensorDictBase, key: NestedKey = keys.ADVANTAGE) -> TensorDictBase:
    """Drop the rows whose advantages are all exactly 0, which add nothing to the policy gradient.

    With ``loss.normalizers`` computed from all rows, the gradient stays the same and costs less. Keep all rows if the
    loss has a KL or entropy term (``loss.needs_zero_advantage``), to which these rows contribute.

    Args:
        rows: batch size ``[B]``.
        key: key of the advantages.

    Returns:
        Remaining rows, batch size ``[B']``, possibly 0.
    """
    kept = [i for i, advantage in enumerate(ragged(rows, key)) if bool((advantage != 0).any())]
    if len(kept) == len(rows):
        return rows
    return stack_rows([rows[i] for i in kept]) if kept else rows[:0]


def drop_rows(rows: TensorDictBase, rule: Callable[[TensorDictBase], bool]) -> TensorDictBase:
    """Drop the rows for which a rule is true, and correct the size of their groups.

    :class:`MCAdvantage` compares the rows that remain. Without this correction it waits for the dropped ones, and the
    rest of their group never trains. If fewer than two rows of a group remain, nothing is left to compare: they are
    dropped as well.

    Args:
        rows: batch size ``[B]``, whole groups, or all that is left of them; not changed.
        rule: function from a row to whether it is dropped.

    Returns:
        Remaining rows, batch size ``[B']``, possibly 0. ``"group_size"`` (``[]``) is the number of rows of the group
        among them.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = stack_rows([
        ...     TensorDict({"group_id": torch.tensor(g), ("next", "truncated"): torch.tensor([t])})
        ...     for g, t in ((0, True), (0, False), (0, False), (1, True), (1, False))
        ... ])
        >>> drop_rows(rows, lambda row: bool(row["next", "truncated"]))["group_size"].tolist()
        [2, 2]
    """
    kept = [row for row in unbind_rows(rows) if not rule(row)]
    sizes = Counter(int(row[keys.GROUP_ID]) for row in kept)
    # Write sizes to copies: the caller may still use the rows
    corrected = [(row, sizes[int(row[keys.GROUP_ID])]) for row in kept]
    corrected = [row.copy().set(keys.GROUP_SIZE, torch.tensor(size)) for row, size in corrected if size > 1]
    return stack_rows(corrected) if corrected else rows[:0]


class ZeroSignalFilter(BufferTransform):
    """Replay-buffer transform that drops groups with equal returns, from which a group baseline learns nothing.

    This is the dynamic sampling of DAPO (arXiv 2503.14476, section 3.2). A
    :class:`~torchrl_rloo.collectors.refill.RefillingCollector` samples other groups in their place.

    It reads ``"group_id"`` (``[]``) and what ``returns`` reads, by default ``("next", "reward")`` (``[1, 1]``). It
    takes whole groups and returns whole groups, in the order of their rows. There are two ways to use it:

    - Call :meth:`keep_informative` on a batch, for example as the collector's ``postproc``.
    - Put it *before* :class:`MCAdvantage` in a replay buffer, ``Compose(ZeroSignalFilter(), MCAdvantage(8))``. Written
      rows pass transforms from last to first, so they reach the filter as complete groups. Whitened advantages then
      include the dropped groups.

    It compares returns of whole trajectories. With turn rewards a group of equal returns may still have a signal.

    Args:
        tolerance: largest difference between returns that counts as equal.
        returns: function of the rows that returns what to compare, see :mod:`torchrl_rloo.data.outcomes`. With several
            returns per row, a group is dropped if none of them differs. With a KL in the reward use
            ``WeightedScores``, or every group passes.
        wrong: highest return of an equal group that counts as all wrong.
        right: lowest return of an equal group that counts as all right.
        mean_range: bounds of a group's mean return, both excluded; groups outside are also dropped. None disables it.

    Attributes:
        counts: numbers of groups: ``"zero_signal/kept"``, and dropped ones by kind. These are
            ``"zero_signal/all_wrong"``, ``"/all_right"``, ``"/flat"`` (neither, or several returns per row),
            ``"/unanswered"`` (fewer than two rows did not abstain) and ``"/out_of_range"`` (of ``mean_range``).

    Raises:
        ValueError: if ``tolerance`` is negative, or ``wrong`` is not less than ``right``, or ``mean_range`` is empty or
            combined with several returns per row.

    Example:
        >>> from tensordict import TensorDict
        >>> earned = {0: (1.0, 0.0), 1: (1.0, 1.0)}
        >>> rows = stack_rows([
        ...     TensorDict({"group_id": torch.tensor(g), ("next", "reward"): torch.tensor([[r]])})
        ...     for g, both in earned.items() for r in both
        ... ])
        >>> signal = ZeroSignalFilter()
        >>> signal.keep_informative(rows)["group_id"].tolist(), dict(signal.counts)
        ([0, 0], {'zero_signal/kept': 1, 'zero_signal/all_right': 1})
    """

    def __init__(
        self,
        tolerance: float = 0.0,
        *,
        returns: Returns = final_return,
        wrong: float = 0.0,
        right: float = 1.0,
        mean_range: Sequence[float] | None = None,
    ):
        super().__init__()
        if not tolerance >= 0:
            raise ValueError(f"tolerance={tolerance} must be at least 0")
        if not wrong < right:
            raise ValueError(f"wrong={wrong} must be less than right={right}")
        if mean_range is not None and (len(mean_range) != 2 or not mean_range[0] < mean_range[1]):
            raise ValueError(f"mean_range={mean_range} must be (low, high) with low < high")
        self.tolerance, self.returns, self.wrong, self.right = tolerance, returns, wrong, right
        self.mean_range = mean_range
        self.counts: Counter[str] = Counter()

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Return the rows to write to the buffer, or None if there are none."""
        if tensordict is None:
            return None
        rows = self.keep_informative(tensordict)
        return rows if len(rows) else None

    def keep_informative(self, rows: TensorDictBase) -> TensorDictBase:
        """Drop the groups without a signal, and count groups.

        Args:
            rows: batch size ``[B]``, whole groups.

        Returns:
            Remaining rows, batch size ``[B']``, possibly 0.
        """
        if not len(rows):
            return rows
        returns = self.returns(rows)
        _, groups = rows[keys.GROUP_ID].reshape(-1).unique(return_inverse=True)
        ranges = group_ranges(returns, groups)
        signal = has_signal(ranges, self.tolerance)
        equal = ~signal
        if self.mean_range is not None:
            if returns.ndim > 1:
                raise ValueError(f"mean_range={self.mean_range} cannot be combined with several returns per row")
            sums = torch.zeros(len(signal)).index_add(0, groups, returns.float().nan_to_num(0.0))
            means, (low, high) = sums / ranges.answered.clamp(min=1), self.mean_range
            inside = (means > low) & (means < high)
            self.counts["zero_signal/out_of_range"] += int((signal & ~inside).sum())
            signal = signal & inside
        self.counts["zero_signal/kept"] += int(signal.sum())
        for low, high, answered in zip(*(entry[equal] for entry in ranges), strict=True):
            self.counts[f"zero_signal/{self._kind(low, high, answered)}"] += 1
        if bool(signal.all()):
            return rows
        kept = signal[groups].nonzero().flatten().tolist()
        return stack_rows([rows[i] for i in kept]) if kept else rows[:0]

    def _kind(self, low: torch.Tensor, high: torch.Tensor, answered: torch.Tensor) -> str:
        if not bool((answered > 1).any()):
            return "unanswered"
        if low.ndim == 0 and bool(high <= self.wrong):
            return "all_wrong"
        return "all_right" if low.ndim == 0 and bool(low >= self.right) else "flat"

    def get_extra_state(self) -> dict[str, Any]:
        """Return the counters for ``state_dict``."""
        return {"counts": dict(self.counts)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the counters in place."""
        self.counts.clear()
        self.counts.update(state["counts"])


def top_by_reward(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices ``[k]`` of the largest of ``[n]`` returns; ties keep their order."""
    return returns.argsort(descending=True, stable=True)[:k]


def top_by_variance(returns: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices ``[k]`` of those of ``[n]`` returns with the largest variance: some best and some worst ones.

    This is max-variance down-sampling (arXiv 2504.13818). Among choices of equal variance it takes the most balanced.
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


def merge_groups(rows: TensorDictBase) -> TensorDictBase:
    """Return copies of rows ``[B]`` in which those of a prompt (and role) form one group, with a common baseline."""
    members: dict[tuple[int, ...], list[TensorDictBase]] = {}
    for row in rows.unbind(0):
        key = tuple(int(row[k]) for k in (keys.PROMPT_ID, keys.ROLE_ID) if k in row.keys())
        members.setdefault(key, []).append(row.copy())
    for group in members.values():
        first, size = min(int(row[keys.GROUP_ID]) for row in group), torch.tensor(len(group))
        for row in group:
            row.update({keys.GROUP_ID: torch.tensor(first), keys.GROUP_SIZE: size})
    return stack_rows([row for group in members.values() for row in group])


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
