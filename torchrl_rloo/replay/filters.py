"""Filters that drop rows with zero advantage and groups without a signal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return
from torchrl_rloo.data.rows import ragged, stack_rows, unbind_rows
from torchrl_rloo.functional.statistics import group_ranges, has_signal
from torchrl_rloo.replay.transform import BufferTransform


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

    Attributes:
        counts: numbers of groups: ``"zero_signal/kept"``, and dropped ones by kind. These are
            ``"zero_signal/all_wrong"``, ``"/all_right"``, ``"/flat"`` (neither, or several returns per row) and
            ``"/unanswered"`` (fewer than two rows did not abstain).

    Raises:
        ValueError: if ``tolerance`` is negative, or ``wrong`` is not less than ``right``.

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
        self, tolerance: float = 0.0, *, returns: Returns = final_return, wrong: float = 0.0, right: float = 1.0
    ):
        super().__init__()
        if not tolerance >= 0:
            raise ValueError(f"tolerance={tolerance} must be at least 0")
        if not wrong < right:
            raise ValueError(f"wrong={wrong} must be less than right={right}")
        self.tolerance, self.returns, self.wrong, self.right = tolerance, returns, wrong, right
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
        self.counts["zero_signal/kept"] += int(signal.sum())
        for low, high, answered in zip(*(entry[~signal] for entry in ranges), strict=True):
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
