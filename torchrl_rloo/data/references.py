"""References to rows in the object store of a cluster, with their metadata."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase

from torchrl_rloo.data.packed import PackedRows, unpack_rows
from torchrl_rloo.data.rows import stack_rows


class LostRowsError(RuntimeError):
    """Loss of rows that were in the object store, with the node that held them.

    Args:
        group_ids: groups whose rows are lost.
        cause: error of the object store.
    """

    def __init__(self, group_ids: Sequence[int], cause: str):
        super().__init__(list(group_ids), cause)
        self.group_ids, self.cause = list(group_ids), cause

    def __str__(self) -> str:
        return f"the rows of groups {self.group_ids} are lost: {self.cause}"


@dataclass(frozen=True)
class RowReferences:
    """``B`` rows of whole groups, which are in the object store.

    Args:
        metadata: ``[B]`` rows of :func:`~torchrl_rloo.data.metadata.metadata_of`.
        refs: one Ray reference per group, to its :class:`~torchrl_rloo.data.packed.PackedRows`.
        group_ids: ids of the groups, in the order of ``refs``.
        group_of_row: index of each row's group in ``refs``, ``B`` numbers.
        member_of_row: index of each row in its group, ``B`` numbers.
        finish: function applied to fetched rows, with counters; it takes tokens beyond the bound on staleness out.
        nbytes: bytes of the tensors of each group, in the order of ``refs``; empty if unknown.
    """

    metadata: LazyStackedTensorDict
    refs: list[Any]
    group_ids: list[int]
    group_of_row: list[int]
    member_of_row: list[int]
    finish: Callable[[list[TensorDictBase], Counter[str]], list[TensorDictBase]]
    nbytes: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.group_of_row)

    def __getstate__(self) -> dict[str, Any]:
        from ray import cloudpickle  # plain pickle loses the owner of a reference, so another process could not read it

        return self.__dict__ | {"refs": cloudpickle.dumps(self.refs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"refs": pickle.loads(state["refs"])})

    def fetch(self, indices: Sequence[int] | None = None, *, timeout: float = 600.0) -> LazyStackedTensorDict:
        """Return rows from the object store.

        Args:
            indices: indices of the rows; None takes all.
            timeout: seconds to wait for the objects.

        Returns:
            ``[n]`` finished rows in the order of ``indices``. Tensors of unchanged rows are read-only views of the
            store's memory.

        Raises:
            LostRowsError: if the store lost groups of these rows, or does not deliver them in time.
        """
        indices = range(len(self)) if indices is None else indices
        groups = self._get(sorted({self.group_of_row[i] for i in indices}), timeout)
        rows = [groups[self.group_of_row[i]][self.member_of_row[i]] for i in indices]
        return stack_rows(self.finish(rows, self.counts))

    def groups(self) -> list[tuple[LazyStackedTensorDict, Any, int]]:
        """Return metadata, reference and bytes of each group, for ``RayGroupBuffer.extend_references``.

        Raises:
            ValueError: if the bytes are unknown.
        """
        if len(self.nbytes) != len(self.refs):
            raise ValueError(f"nbytes={self.nbytes} must have the bytes of each of the {len(self.refs)} groups")
        rows: list[list[TensorDictBase]] = [[] for _ in self.refs]
        for row, group in zip(self.metadata.unbind(0), self.group_of_row, strict=True):
            rows[group].append(row)
        return [
            (stack_rows(members), ref, size) for members, ref, size in zip(rows, self.refs, self.nbytes, strict=True)
        ]

    def _get(self, needed: Sequence[int], timeout: float) -> dict[int, list[TensorDictBase]]:
        import ray

        groups, lost, cause = {}, [], ""
        ready, _ = ray.wait([self.refs[i] for i in needed], num_returns=len(needed), timeout=timeout)
        arrived = set(ready)
        for index in needed:
            try:
                packed: PackedRows = ray.get(
                    self.refs[index], timeout=0 if self.refs[index] not in arrived else timeout
                )
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
                lost.append(self.group_ids[index])
                cause = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                groups[index] = list(unpack_rows(packed).unbind(0))
        if lost:
            raise LostRowsError(lost, cause)
        return groups
