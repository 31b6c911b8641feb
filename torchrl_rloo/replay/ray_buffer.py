"""Replay buffer of whole groups in a Ray actor, bounded in memory.

TorchRL's ``RayReplayBuffer`` is bounded in entries only, overwrites the oldest silently, and copies its entries with
every sample. Here the actor keeps metadata and references, and consumers share the rows of the object store.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.data.packed import pack_rows
from torchrl_rloo.data.references import RowReferences
from torchrl_rloo.data.rows import concatenate, tensor_rows
from torchrl_rloo.ray_actors import call, start_actor
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.replay.group_store import GroupStore, Members, ReadyGroup, WhenFull, split_members
from torchrl_rloo.replay.ray_objects import (
    OwnedRows,
    fetch_group,
    restore_group,
    restore_rows,
    save_group,
    save_rows,
)

_SLICE_S = 1.0  # longest wait of one call: the request of a consumer that died takes no groups after it


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
        """Add rows of any groups; with ``when_full="wait"``, wait until there is room.

        Args:
            rows: ``[B]`` finished rows. Their text is left out.

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
        """Return groups as :meth:`sample` does, with references instead of rows.

        They may be sent to other processes, which read the rows with
        :func:`~torchrl_rloo.replay.ray_objects.fetch_group`.
        """
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
        """Return the counters of :class:`~torchrl_rloo.replay.group_store.GroupStore` and of its advantages."""
        return call(self._actor.stats.remote())

    def state_dict(self) -> dict[str, Any]:
        """Return all groups with their uses, incomplete ones included, as plain values and tensors."""
        stored, counts, state = call(self._actor.snapshot.remote())
        groups = [{**save_group(group), "uses": uses} for group, uses in stored]
        return {"groups": groups, "counts": counts, "advantage": save_rows(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        stored = [(restore_group(saved), saved["uses"]) for saved in state_dict["groups"]]
        state = restore_rows(state_dict["advantage"])
        call(self._actor.restore.remote(stored, state_dict["counts"], state))


class _BufferActor(OwnedRows, GroupStore):
    def __init__(self, advantage: MCAdvantage, limits: dict[str, Any]):
        super().__init__(advantage, **limits)
