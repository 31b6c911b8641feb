"""Which rows of a finished batch are worth a forward pass."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows


def drop_zero_advantage(rows: TensorDictBase) -> TensorDictBase:
    """Leaves out the rows whose advantages are all exactly 0: they add nothing to the policy gradient.

    Count the loss's normalisers over all rows (``loss.count(rows)``), and the gradient is the same at a fraction of the
    cost. With a KL or entropy term in the loss such rows do count (``loss.needs_zero_advantage``): keep them then.

    Args:
        rows: batch size ``[B]``.

    Returns:
        The other rows; a batch of size 0 if there are none.
    """
    kept = [i for i, advantage in enumerate(ragged(rows, keys.ADVANTAGE)) if bool((advantage != 0).any())]
    if len(kept) == len(rows):
        return rows
    return stack_rows([rows[i] for i in kept]) if kept else rows[:0]
