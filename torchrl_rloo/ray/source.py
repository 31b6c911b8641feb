"""References to rows in the object store, and the source of a step's rows on ranks that each fetch their own."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torch import nn

from torchrl_rloo.collectors.shared_source import SharedSource
from torchrl_rloo.collectors.source import GroupSource, StepRows
from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import OwnRows, metadata_of, shares_of_groups
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.rows import stack_rows, tensor_row, unbind_rows
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update import WeightUpdater

_LOGGER = logging.getLogger(__name__)
MAX_REPLACEMENTS = 3  # consecutive times that lost groups of a step are sampled again


class LostRowsError(RuntimeError):
    """Loss of rows of some groups that were in the object store, with the node that held them."""

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
        """Return rows from the object store, ``[n]`` in the order of ``indices``; None takes all.

        Tensors of unchanged rows are read-only views of the store's memory. A row that the store lost, or does not
        deliver within ``timeout`` seconds, raises :class:`LostRowsError`.
        """
        indices = range(len(self)) if indices is None else indices
        groups = self._get(sorted({self.group_of_row[i] for i in indices}), timeout)
        rows = [groups[self.group_of_row[i]][self.member_of_row[i]] for i in indices]
        return stack_rows(self.finish(rows, self.counts))

    def groups(self) -> list[tuple[LazyStackedTensorDict, Any, int]]:
        """Return metadata, reference and bytes of each group, for ``RayGroupBuffer.extend_references``."""
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


class ReferencedSource(SharedSource):
    """Source on each rank of the metadata of a step's rows, and of the rows that this rank trains on.

    Rank 0 has the collector, which samples in a cluster and delivers references. All ranks get these and the metadata
    of all rows. Each fetches the rows of its share once per step; shares have nearly equally many tokens. The rows pass
    rank 0 only if it trains on them.

    If the store lost a row, all ranks learn it before the step. The collector samples the group again, and the ranks
    fetch the replacement.

    Args:
        ranks: ranks that train together, all in processes that have joined the cluster.
        source: source of rank 0 over a collector with ``collect_references`` and ``replace_lost``, such as
            ``RayLLMCollector``, without refill and cache. None on the other ranks.
        updater: see :class:`SharedSource`.
        offloaded: see :class:`SharedSource`.
        finish: function that completes this rank's rows ``[n]``, together with the other ranks, such as
            :func:`~torchrl_rloo.envs.transforms.add_reference_kl` with ``split=False``. ``n`` may be 0. What it changes
            in a row's metadata, such as the reward, reaches all ranks. None leaves the rows.
        has_signal: function from metadata ``[B]`` to ``B`` flags, False for rows that the step will probably drop, such
            as :func:`~torchrl_rloo.data.outcomes.rows_with_signal`. Both kinds are balanced over ranks. None balances
            all rows together.

    Attributes:
        policy_version: version of the sampler's weights after the last :meth:`collect`.
        num_tokens: tokens that the collector has sampled so far.
        own: rows of this rank; None before the first :meth:`collect`.

    Raises:
        ValueError: if the source has a refill or a cache, which need the rows on rank 0.

    Example::

        source = ReferencedSource(ranks, GroupSource(collector) if ranks.is_main else None, updater)
        metadata, _ = source.collect()
        buffer.extend(metadata)
        for batch in minibatches(buffer, 4):
            accumulate(loss_fn, batch, ranks=ranks, rows_of=source.rows_of)
    """

    def __init__(
        self,
        ranks: Ranks,
        source: GroupSource | None,
        updater: WeightUpdater,
        *,
        offloaded: nn.Module | None = None,
        finish: Callable[[TensorDictBase], Any] | None = None,
        has_signal: Callable[[TensorDictBase], Sequence[bool] | torch.Tensor] | None = None,
    ):
        for name in ("refill", "cache"):
            if getattr(source, name, None) is not None:
                raise ValueError(
                    f"{name} needs the rows of all ranks and cannot be combined with references; remove it"
                )
        super().__init__(ranks, source, updater, offloaded=offloaded, finish=finish)
        self.has_signal = has_signal
        self._references: list[RowReferences] = []

    def collect(self) -> StepRows:
        """Return the metadata ``[B]`` of the next step's rows, equal on all ranks, after this rank fetched its own.

        It raises RuntimeError if the store loses groups ``MAX_REPLACEMENTS`` times more in a row.
        """
        self.own, self._references = None, []  # release the rows of the last step
        metadata, own, counts = self._fetch_step()
        if self.source is not None and self.source.observe is not None:
            self.source.observe(stack_rows(metadata))
        if self.finish is not None:
            self.finish(stack_rows(own))
        metadata = self._update_metadata(metadata, own, counts)
        self.own = OwnRows(metadata, stack_rows(own))
        return StepRows(metadata, metadata)

    def _fetch_step(self) -> tuple[list[TensorDictBase], list[TensorDictBase], Counter[str]]:
        """Return the metadata of all rows, this rank's rows, and the counters of fetching them."""
        metadata: list[TensorDictBase] = []
        own: list[TensorDictBase] = []
        counts: Counter[str] = Counter()
        lost: dict[int, str] = {}
        for _ in range(1 + MAX_REPLACEMENTS):
            references = self._next_references(sorted(lost))
            fetched, mine = self._fetch(references)
            # A group that one rank could not fetch is left out on all of them
            told = self.ranks.all_gather(mine, "lost rows")
            lost = {group: cause for part in told for group, cause in part.items()}
            metadata += _without(references.metadata, lost)
            own += _without(fetched, lost)
            counts.update(references.counts)
            self._references.append(references)
            if not lost:
                return metadata, own, counts
            self.ranks.log(f"the rows of {len(lost)} groups are lost and sampled again: {next(iter(lost.values()))}")
        raise RuntimeError(
            f"groups {sorted(lost)} were lost after {MAX_REPLACEMENTS} replacements; check the nodes and the memory of "
            f"the object store: {next(iter(lost.values()))}"
        )

    def _next_references(self, lost: list[int]) -> RowReferences:
        """Return the references to a batch, or to replacements of lost groups, on all ranks."""

        def collect() -> tuple[RowReferences, int, int]:
            collector = self.source.collector
            references = collector.replace_lost(lost) if lost else collector.collect_references()
            packed = replace(references, metadata=pack_rows(references.metadata))
            return packed, collector.policy_version, collector.num_tokens

        with self._sampling():
            packed, self.policy_version, self.num_tokens = self.ranks.broadcast(collect, "collect")
        return replace(packed, metadata=unpack_rows(packed.metadata))

    def _fetch(self, references: RowReferences) -> tuple[list[TensorDictBase], dict[int, str]]:
        """Fetch this rank's share; return its rows, without text, and the causes of lost groups."""
        trained = None if self.has_signal is None else self.has_signal(references.metadata)
        share = shares_of_groups(references.metadata, self.ranks.data_size, trained)[self.ranks.data_rank]
        groups = references.metadata[keys.GROUP_ID].reshape(-1).tolist()
        lost: dict[int, str] = {}
        while share:
            try:
                return [tensor_row(row) for row in references.fetch(share).unbind(0)], lost
            except LostRowsError as error:
                lost |= dict.fromkeys(error.group_ids, str(error))
                left = [i for i in share if groups[i] not in lost]
                if len(left) == len(share):  # an error about groups of no row would repeat for ever
                    raise
                share = left
        return [], lost

    def _update_metadata(
        self, metadata: list[TensorDictBase], own: list[TensorDictBase], counts: Counter[str]
    ) -> TensorDictBase:
        """Return the metadata of the rows as the ranks have them now; rank 0 counts what all have fetched."""
        mine = pack_rows(metadata_of(stack_rows(own))) if own else None
        told = self.ranks.all_gather((mine, counts), "metadata of the rows")[:: self.ranks.share_size]
        by_id = {int(row[keys.TRAJECTORY_ID]): row for row in metadata}
        for packed, _ in told:
            for row in unbind_rows(stack_rows([]) if packed is None else unpack_rows(packed)):
                by_id[int(row[keys.TRAJECTORY_ID])].update(row)
        if self.source is not None:
            for _, counted in told:
                self.source.collector.scheduler.counts.update(counted)
        return stack_rows(metadata)

    def with_text(self, rows: TensorDictBase) -> list[TensorDictBase]:
        """Fetch rows of the step by metadata ``[n]``, with their text; without those that the store has lost."""
        wanted = {int(row[keys.TRAJECTORY_ID]): None for row in unbind_rows(rows)}
        found: dict[int, TensorDictBase] = {}
        for references in self._references:
            ids = references.metadata[keys.TRAJECTORY_ID].reshape(-1).tolist()
            for i in (i for i, number in enumerate(ids) if number in wanted):
                try:
                    found[ids[i]] = references.fetch([i])[0]
                except LostRowsError as error:
                    _LOGGER.warning("a table lacks a row: %s", error)
        return [found[number] for number in wanted if number in found]


def _without(rows: Any, lost: dict[int, str]) -> list[TensorDictBase]:
    """Return the rows of the groups that are not lost."""
    rows = unbind_rows(rows) if isinstance(rows, TensorDictBase) else rows
    return [row for row in rows if int(row[keys.GROUP_ID]) not in lost]
