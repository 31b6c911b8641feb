"""RayGroupBuffer and RayMCAdvantage: groups whose members come from several writers, in a Ray actor.

TorchRL's classes of these names send whole rows through their actors. ``RayReplayBuffer`` is bounded in entries only,
overwrites the oldest silently, and copies its entries with every sample. Here actors keep metadata and references, and
consumers share the rows of the object store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data.packed import PackedRows, from_plain, pack_rows, to_plain
from torchrl_rloo.data.rows import concatenate, stack_rows, tensor_rows
from torchrl_rloo.ray.group_store import (
    PAYLOAD,
    GroupAdvantages,
    GroupStore,
    Members,
    Payload,
    ReadyGroup,
    WhenFull,
    join_rows,
    split_members,
)
from torchrl_rloo.ray.session import call, require_ray, start_actor
from torchrl_rloo.ray.source import RowReferences
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.pending import BufferTransform

_SLICE_S = 1.0  # longest wait of one call: the request of a consumer that died takes no groups after it
_VALUE = "non-tensor value"


class RayGroupBuffer:
    """Buffer of whole groups in an actor: many writers, many consumers, bounded memory.

    :meth:`extend` sends rows without text to the actor, which puts them into the object store of its node. The actor
    waits for all members of a group, and writes advantages from metadata. :meth:`sample` reads rows from the object
    store. They outlive their writer, but not the actor or its node.

    The memory bound is ``max_bytes``, plus one batch for each writer that waits, plus members that complete a waiting
    group. A pickled copy is a client of the same actor, which ends with the last copy.

    Args:
        advantage: transform that writes advantages when groups are complete; None is ``MCAdvantage()``.
        max_groups: limit of complete groups; None sets none.
        max_bytes: limit of the bytes of rows, those of incomplete groups included; None sets none.
        when_full: ``"wait"`` lets a writer wait until consumers have made room. ``"drop_oldest"`` drops the oldest
            complete groups, and counts them.
        max_uses: number of times that a group is sampled before it leaves; None keeps it until it is dropped.
        max_staleness: largest number of versions that a group may be behind when it is sampled; None sets no bound.
        remote_config: resources of the actor, see ``ray.remote``. None reserves no CPU.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if an argument is out of range, or arguments cannot be combined.

    Example:
        ::

            buffer = RayGroupBuffer(max_bytes=2_000_000_000, max_uses=2)
            collector = LLMCollector(env, policy, replay_buffer=buffer)  # also in other processes
            rows = buffer.sample(16)
    """

    def __init__(
        self,
        advantage: MCAdvantage | None = None,
        *,
        max_groups: int | None = None,
        max_bytes: int | None = None,
        when_full: WhenFull = "wait",
        max_uses: int | None = 1,
        max_staleness: int | None = None,
        remote_config: Mapping[str, Any] | None = None,
    ):
        advantage = MCAdvantage() if advantage is None else advantage
        limits = {"max_groups": max_groups, "max_bytes": max_bytes, "when_full": when_full}
        limits |= {"max_uses": max_uses, "max_staleness": max_staleness}
        GroupStore(advantage, **limits)  # refuse arguments here, not when the actor is first used
        self._reads_tokens = advantage.reads_tokens
        self._actor = start_actor(_BufferActor, (advantage, limits), remote_config)

    def extend(self, rows: TensorDictBase) -> None:
        """Add rows ``[B]`` of any groups without their text; with ``when_full="wait"``, wait until there is room.

        Raises:
            ValueError: if the rows exceed the limits by themselves, or disagree on the size of their group.
            KeyError: if a row lacks an entry. No row is taken in.
            ray.exceptions.RayActorError: if the actor died. The rows were not delivered to any consumer.
        """
        call(self._actor.extend.remote(split_members(tensor_rows(rows), self._reads_tokens)))

    def extend_references(self, groups: RowReferences | Iterable[tuple[TensorDictBase, Any, int]]) -> None:
        """Add groups whose rows are in the object store already; only their metadata go through the actor.

        The process that owns a reference keeps its rows alive, so it must outlive the buffer. Rows keep their text, and
        tokens beyond a collector's bound on staleness; set ``max_staleness`` of the buffer to drop their groups.

        Args:
            groups: batch of ``RayLLMCollector.collect_references()``. Or for each group its ``[n]``
                :func:`~torchrl_rloo.data.metadata.metadata_of`, the reference to its packed ``[n]`` rows in the same
                order, and the bytes of their tensors.

        Raises:
            ValueError: if the advantages need tokens, or as :meth:`extend` does.
        """
        if self._reads_tokens:
            raise ValueError("advantages per token or with a KL per token need more than metadata; use extend(rows)")
        groups = groups.groups() if isinstance(groups, RowReferences) else groups
        batch = [Members(pack_rows(metadata), [ref], nbytes) for metadata, ref, nbytes in groups]
        call(self._actor.extend.remote(batch))

    def sample(self, groups: int, policy_version: int | None = None, timeout_s: float | None = None) -> TensorDictBase:
        """Return the rows of the least used groups, oldest first, after waiting until there are enough.

        Args:
            groups: number of groups.
            policy_version: current policy version, which ``max_staleness`` requires.
            timeout_s: seconds to wait; None waits without limit.

        Returns:
            ``[B]`` rows with advantages. Do not write to their other tensors in place.

        Raises:
            ValueError: if ``groups`` exceeds the limit, or ``policy_version`` is missing.
            TimeoutError: if there are too few groups after ``timeout_s``.
            ray.exceptions.RayActorError: if the actor died.
        """
        return concatenate(list(map(fetch_group, self.sample_groups(groups, policy_version, timeout_s))))

    def sample_groups(
        self, groups: int, policy_version: int | None = None, timeout_s: float | None = None
    ) -> list[ReadyGroup]:
        """Return groups as :meth:`sample` does, with references for :func:`~torchrl_rloo.ray.buffer.fetch_group`."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            wait = min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            try:
                return call(self._actor.sample.remote(groups, policy_version, wait))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def __len__(self) -> int:
        """Return the number of complete groups."""
        return call(self._actor.size.remote())

    def empty(self) -> None:
        """Drop all complete groups; incomplete ones stay."""
        call(self._actor.empty.remote())

    def stats(self) -> dict[str, int]:
        """Return the counters of :class:`~torchrl_rloo.ray.group_store.GroupStore` and of its advantages."""
        return call(self._actor.stats.remote())

    def state_dict(self) -> dict[str, Any]:
        """Return all groups with their uses, incomplete ones included, as plain values and tensors."""
        stored, counts, state = call(self._actor.snapshot.remote())
        groups = [{**_save_group(group), "uses": uses} for group, uses in stored]
        return {"groups": groups, "counts": counts, "advantage": _save_rows(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        stored = [(_restore_group(saved), saved["uses"]) for saved in state_dict["groups"]]
        state = _restore_rows(state_dict["advantage"])
        call(self._actor.restore.remote(stored, state_dict["counts"], state))


class RayMCAdvantage(BufferTransform):
    """Replay-buffer transform like :class:`MCAdvantage`, whose groups wait in an actor that all writers share.

    Members of a group may come from any writer. The writer that completes a group receives all of its rows, with
    advantages. The actor reads metadata only, unless the credit or a KL is per token. Rows stay in the object store,
    where they outlive the writer that sampled them.

    A pickled copy uses the same actor. So does another instance in the cluster with the same ``actor_name``.

    Args:
        num_generations: see :class:`MCAdvantage`, as are all arguments that are not named here.
        remote_config: resources of the actor, see ``ray.remote``. None reserves no CPU.
        actor_name: name of the actor in the cluster's namespace; an actor of this name is used if there is one. None
            creates one that ends with the last copy of this transform.
        **kwargs: arguments of :class:`MCAdvantage`, except ``process_group``.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if the named actor has other settings, or :class:`MCAdvantage` refuses an argument.

    Note:
        If the actor dies, its incomplete groups are lost and each call raises ``ray.exceptions.RayActorError``. Restore
        the last ``state_dict``, or have the ledger sample the groups again.

    Example:
        ::

            buffer = ReplayBuffer(storage=RowStorage(), transform=RayMCAdvantage(actor_name="advantages"))
    """

    def __init__(
        self,
        num_generations: int | None = None,
        *,
        remote_config: Mapping[str, Any] | None = None,
        actor_name: str | None = None,
        **kwargs: Any,
    ):
        super().__init__()
        if kwargs.get("process_group") is not None:
            raise ValueError("process_group cannot be combined with an actor, which normalizes over all writers")
        advantage = MCAdvantage(num_generations, **kwargs)
        self._reads_tokens = advantage.reads_tokens
        settings = {"num_generations": num_generations, **kwargs}
        self._actor = start_actor(_AdvantageActor, (advantage,), remote_config, actor_name, settings)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take rows in and return those of all groups that they complete, with advantages, or None."""
        if tensordict is None:
            return None
        rows = stack_rows([tensordict]) if tensordict.ndim == 0 else stack_rows(tensordict.reshape(-1).unbind(0))
        ready = call(self._actor.add.remote(split_members(rows, self._reads_tokens)))
        return concatenate([fetch_group(group) for group in ready]) if ready else None

    @property
    def counts(self) -> dict[str, int]:
        """Counters of :class:`MCAdvantage`, ``"advantage/pending_rows"`` and ``"advantage/waiting_groups"``."""
        return call(self._actor.counters.remote())

    @property
    def pending_rows(self) -> int:
        """Rows that wait for the rest of their group."""
        return self.counts["advantage/pending_rows"]

    @property
    def waiting_groups(self) -> int:
        """Complete groups that wait for the rest of the batch to normalize."""
        return self.counts["advantage/waiting_groups"]

    def get_extra_state(self) -> dict[str, Any]:
        """Return held rows, counters and the estimator's state, which :class:`MCAdvantage` can load as well."""
        return _save_rows(call(self._actor.state.remote()))

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore held rows, counters and the estimator's state."""
        call(self._actor.load_state.remote(_restore_rows(state)))


class _OwnedRows:
    """Mixin of actors that put rows into the object store, where they outlive the process that sent them."""

    def keep(self, rows: Any) -> Any:
        """Return a reference to packed rows; a reference is kept as it is."""
        return _put(rows) if isinstance(rows, PackedRows) else rows


def fetch_group(group: ReadyGroup) -> TensorDictBase:
    """Return the ``[n]`` rows of a group with their advantages; other tensors lie in the object store.

    If the node that held the rows died, it raises ``ray.exceptions.ObjectLostError``: sample the group again.
    """
    return join_rows(group, _get({payload.ref for payload in group.payloads}))


def _save_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an ``MCAdvantage`` with rows instead of references, as plain values and tensors."""

    def save(row: dict[str, Any]) -> dict[str, Any]:
        payload = row[PAYLOAD][_VALUE]
        return {**row, PAYLOAD: _load(payload)}

    return _map_rows(state, save)


def _restore_rows(state: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`_save_rows`: put the rows into the object store again."""
    return _map_rows(state, lambda row: {**row, PAYLOAD: {_VALUE: _store(row[PAYLOAD])}})


def _save_group(group: ReadyGroup) -> dict[str, Any]:
    """Return a complete group as plain values and tensors."""
    rows = [_load(payload) for payload in group.payloads]
    return {"group_id": group.group_id, "oldest": group.oldest, "rows": rows, "advantages": group.advantages}


def _restore_group(saved: dict[str, Any]) -> ReadyGroup:
    """Undo :func:`_save_group`: put the rows into the object store again."""
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
    return require_ray().put(packed)


def _get(references: set[Any]) -> dict[Any, PackedRows]:
    ordered = list(references)
    return dict(zip(ordered, require_ray().get(ordered), strict=True))


class _BufferActor(_OwnedRows, GroupStore):
    def __init__(self, advantage: MCAdvantage, limits: dict[str, Any]):
        super().__init__(advantage, **limits)


class _AdvantageActor(_OwnedRows, GroupAdvantages):
    pass
