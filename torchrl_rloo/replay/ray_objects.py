"""Rows of groups in Ray's object store, and calls of the actors that keep references to them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data.packed import PackedRows, from_plain, to_plain
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.replay.group_store import PAYLOAD, Payload, ReadyGroup, join_rows, split_members

_VALUE = "non-tensor value"


class OwnedRows:
    """Mixin of actors that put rows into the object store, where they outlive the process that sent them."""

    def keep(self, rows: Any) -> Any:
        """Return a reference to packed rows; a reference is kept as it is."""
        return _put(rows) if isinstance(rows, PackedRows) else rows


def fetch_group(group: ReadyGroup) -> TensorDictBase:
    """Return the ``[n]`` rows of a group with their advantages; other tensors lie in the object store.

    Raises:
        ray.exceptions.ObjectLostError: if the node that held the rows died. Sample the group again.
    """
    return join_rows(group, _get({payload.ref for payload in group.payloads}))


def save_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an ``MCAdvantage`` with rows instead of references, as plain values and tensors."""

    def save(row: dict[str, Any]) -> dict[str, Any]:
        payload = row[PAYLOAD][_VALUE]
        return {**row, PAYLOAD: _load(payload)}

    return _map_rows(state, save)


def restore_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`save_rows`: put the rows into the object store again."""
    return _map_rows(state, lambda row: {**row, PAYLOAD: {_VALUE: _store(row[PAYLOAD])}})


def save_group(group: ReadyGroup) -> dict[str, Any]:
    """Return a complete group as plain values and tensors."""
    rows = [_load(payload) for payload in group.payloads]
    return {"group_id": group.group_id, "oldest": group.oldest, "rows": rows, "advantages": group.advantages}


def restore_group(saved: dict[str, Any]) -> ReadyGroup:
    """Undo :func:`save_group`: put the rows into the object store again."""
    payloads = [_store(row) for row in saved["rows"]]
    return ReadyGroup(saved["group_id"], payloads, saved["advantages"], saved["oldest"])


def _map_rows(state: dict[str, Any], function: Any) -> dict[str, Any]:
    pending = {group_id: list(map(function, rows)) for group_id, rows in state["pending"].items()}
    return {**state, "pending": pending, "waiting": [list(map(function, rows)) for rows in state["waiting"]]}


def _load(payload: Payload) -> dict[str, Any]:
    """Return a row of the object store as plain values and tensors of this process."""
    group = ReadyGroup(0, [payload], [torch.zeros(1, 1)], 0)
    return to_plain(fetch_group(group)[0].exclude("advantage").clone())


def _store(row: dict[str, Any]) -> Payload:
    (members,) = split_members(stack_rows([from_plain(row)]), reads_tokens=False)
    return Payload(_put(members.rows[0]), 0, members.nbytes)


def _put(packed: PackedRows) -> Any:
    import ray

    return ray.put(packed)


def _get(references: set[Any]) -> dict[Any, PackedRows]:
    import ray

    ordered = list(references)
    return dict(zip(ordered, ray.get(ordered), strict=True))
