"""Which rows of a finished batch are worth a forward pass."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_rloo.data import keys


def drop_zero_advantage(rows: TensorDictBase) -> TensorDictBase:
    """Leaves out the rows whose advantage is exactly 0: they add nothing to the policy gradient.

    Keep the count of all rows as the loss's normaliser, and the gradient is the same at a fraction of the cost. With a
    KL or entropy term in the loss such rows do count: do not drop them then.

    Args:
        rows: batch size ``[B]``.

    Returns:
        The other rows; a batch of size 0 if there are none.
    """
    return rows[(rows[keys.ADVANTAGE] != 0).reshape(-1)]
