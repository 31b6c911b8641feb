"""Storage of ragged rows that warns when unsampled rows are lost."""

from __future__ import annotations

from typing import Any

import torch
from torchrl.data import LazyStackStorage

from torchrl_rloo.data.notices import notify_once


class RowStorage(LazyStackStorage):
    """Replay-buffer storage of ragged rows, which warns once when it overwrites rows that were never sampled.

    TorchRL's storage overwrites its oldest rows silently when it is full. A loop that empties its buffer after each
    step needs no limit.

    Args:
        max_size: limit of rows. None disables it, so nothing is overwritten.

    Example:
        >>> from torchrl.data import ReplayBuffer
        >>> from torchrl_rloo.replay import MCAdvantage
        >>> buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage())
    """

    def __init__(self, max_size: int | None = None):
        super().__init__(max_size)
        self._unsampled: set[int] = set()

    def _set_item(self, cursor: int, data: Any) -> None:
        if cursor in self._unsampled:
            notify_once(
                f"RowStorage(max_size={self.max_size}) overwrites rows that were never sampled: raise max_size to the "
                "rows of a step (prompts_per_batch x num_generations), or leave it out and empty the buffer every step"
            )
        self._unsampled.add(cursor)
        super()._set_item(cursor, data)

    def get(self, index: Any) -> Any:
        """Return the rows at an index and mark them as sampled."""
        rows = super().get(index)
        if isinstance(index, slice):
            index = range(len(self))[index]
        self._unsampled.difference_update(torch.as_tensor(index).reshape(-1).tolist())
        return rows

    def _empty(self) -> None:
        super()._empty()
        self._unsampled.clear()
