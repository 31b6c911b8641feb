"""OwnRows: the rows of a step that one rank trains on, found by the metadata of all rows."""

from __future__ import annotations

from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import METADATA_KEYS
from torchrl_rloo.data.rows import copy_row, set_entries, stack_rows, unbind_rows


class OwnRows:
    """Rows of a step on one rank, which has the metadata of all rows.

    Buffer and advantages work on metadata, which are equal on all ranks. Of each minibatch a rank then trains on its
    own rows::

        buffer.extend(metadata)
        for batch in minibatches(buffer, 4):
            accumulate(loss_fn, batch, rows_of=own.rows_of, ranks=ranks)

    Args:
        metadata: ``[B]`` metadata of all rows of the step.
        rows: ``[n]`` rows of this rank; may be empty.

    Attributes:
        rows: ``[n]`` rows of this rank. Entries written there, such as scores, are those that the rank trains on.

    Raises:
        ValueError: if two rows have the same ``"trajectory_id"``, or a row is not part of the step.
    """

    def __init__(self, metadata: TensorDictBase, rows: TensorDictBase):
        ids = [trajectory_id(row) for row in metadata.unbind(0)]
        self.rows, self._ids = rows, frozenset(ids)
        self._rows = {trajectory_id(row): row for row in unbind_rows(rows)}
        if len(self._ids) < len(ids) or len(self._rows) < len(rows) or not self._ids.issuperset(self._rows):
            raise ValueError(
                f"the {len(rows)} rows must be different ones of the {len(ids)} rows of the step, by trajectory_id"
            )

    def rows_of(self, batch: TensorDictBase) -> TensorDictBase:
        """Return this rank's rows of a batch, with the entries that the batch has in addition.

        Args:
            batch: ``[b]`` metadata of rows of the step, with their advantages.

        Returns:
            ``[m]`` rows in the order of the batch; may be empty.

        Raises:
            ValueError: if a row of the batch is not part of the step.
        """
        own = []
        for given in batch.unbind(0):
            number = trajectory_id(given)
            if number not in self._ids:
                raise ValueError(
                    f"trajectory_id={number} is not a row of this step; empty the buffer after each step, and set "
                    "normalize.groups so that no group waits for a later step"
                )
            if number in self._rows:
                row = copy_row(self._rows[number])
                known = METADATA_KEYS.union(row.keys())
                own.append(set_entries(row, {key: value for key, value in given.items() if key not in known}))
        return stack_rows(own)


def trajectory_id(row: TensorDictBase) -> int:
    """Return the id of a row's conversation."""
    return int(row[keys.TRAJECTORY_ID])
