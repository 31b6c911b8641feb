"""Which rows of a finished batch are worth a forward pass, and which groups worth a place in a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import Returns, final_return
from torchrl_rloo.data.rows import ragged, stack_rows
from torchrl_rloo.functional.groups import group_ranges, has_signal


def drop_zero_advantage(rows: TensorDictBase, key: NestedKey = keys.ADVANTAGE) -> TensorDictBase:
    """Drop the rows whose advantages are all exactly 0: they add nothing to the policy gradient.

    With ``loss.normalizers`` of all rows the gradient is the same at a fraction of the cost. With a KL or entropy term
    in the loss such rows do count (``loss.needs_zero_advantage``): keep them then.

    Args:
        rows: batch size ``[B]``.
        key: of the advantages.

    Returns:
        The other rows; a batch of size 0 if there are none.
    """
    kept = [i for i, advantage in enumerate(ragged(rows, key)) if bool((advantage != 0).any())]
    if len(kept) == len(rows):
        return rows
    return stack_rows([rows[i] for i in kept]) if kept else rows[:0]


class ZeroSignalFilter(Transform):
    """Drops groups whose members all earned the same, from which a group baseline learns nothing.

    The dynamic sampling of DAPO (arXiv 2503.14476, section 3.2); a
    :class:`~torchrl_rloo.collectors.refill.RefillingCollector` samples others in their place. Whole groups come in and
    whole groups go out, in the order of their rows. Use :meth:`keep_informative` on a batch, say as the collector's
    ``postproc``, or put the filter into a replay buffer *before* :class:`MCAdvantage`, ``Compose(ZeroSignalFilter(),
    MCAdvantage(8))``: what is written passes transforms from last to first, so rows come from there as complete groups.
    Advantages that are whitened were so together with the groups that are dropped then, and are not on a batch.

    Returns of whole trajectories are compared: with rewards of turns a group of equal returns may still have a signal.

    Args:
        tolerance: largest difference of two returns that counts as none.
        returns: what is compared, see :mod:`torchrl_rloo.data.outcomes`; with several returns for each row, a group
            is dropped if none of them differs. With a KL in the reward use ``WeightedScores``, else every group passes.
        wrong: a flat group of at most this return counts as all wrong.
        right: a flat group of at least this return counts as all right.

    Attributes:
        counts: ``"zero_signal/kept"`` and the groups dropped by kind: ``"zero_signal/all_wrong"``, ``"/all_right"``,
            ``"/flat"`` (neither, or several returns), ``"/unanswered"`` (fewer than two members did not abstain).

    Raises:
        ValueError: for a negative tolerance, or ``wrong`` not less than ``right``.

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

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leaves rows that are sampled from a buffer as they are: the work is done when rows are written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """On the way into a buffer; None where nothing is written."""
        if tensordict is None:
            return None
        rows = self.keep_informative(tensordict)
        return rows if len(rows) else None

    def keep_informative(self, rows: TensorDictBase) -> TensorDictBase:
        """The rows of the groups that have a signal, counted.

        Args:
            rows: batch size ``[B]``, whole groups.
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
        """The counters, for ``state_dict``."""
        return {"counts": dict(self.counts)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restores the counters, in place."""
        self.counts.clear()
        self.counts.update(state["counts"])
