"""Buckets from all ranks into the storage of a transport, such that no rank holds more than a bucket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update.checksums import CHECKSUMS
from torchrl_rloo.weight_update.protocol import TensorInfo, unpack
from torchrl_rloo.weight_update.shards import SENDER, collective
from torchrl_rloo.weight_update.source import WeightSource
from torchrl_rloo.weight_update.transport import PackedStorage, Storage


class GatherError(RuntimeError):
    """Failure of a rank that all ranks know of."""


class GatherOrder(NamedTuple):
    """Order of rank 0 to the other ranks to gather all buckets.

    Attributes:
        buckets: ``(first, last)`` of each bucket in the manifest.
        checksum: kind of the checksums; None for none.
        open_storage: function that opens the storage in another rank; None if only rank 0 can write it.
    """

    buckets: list[tuple[int, int]]
    checksum: str | None
    open_storage: Callable[[], Storage] | None


class Gathering:
    """Buckets on their way from all ranks into a storage.

    If all ranks can write the storage, each writes its own blocks of every bucket, or whole buckets in turn. Otherwise
    rank 0 writes all buckets. Making it is a collective call of all ranks.

    Args:
        source: weights of this rank.
        storage: storage of rank 0. None on other ranks.
        order: order of rank 0.
        ranks: all ranks that share the model.
    """

    def __init__(self, source: WeightSource, storage: Storage | None, order: GatherOrder, ranks: Ranks):
        self.source, self.storage, self.order, self.ranks = source, storage, order, ranks
        self.manifest, self.spread = source.manifest(), False
        if order.open_storage is not None and ranks.size > 1:
            try:
                self.storage = storage if storage is not None else order.open_storage()
            except OSError:  # on another machine
                self.storage = None
            self.spread = all(ranks.all_gather(self.storage is not None))

    def run(
        self,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int, str | None], None] = lambda number, checksum: None,
    ) -> None:
        """Store all buckets; a collective call of all ranks.

        Args:
            before: function of rank 0 that waits until a bucket may be stored.
            after: function of rank 0 that takes the number and checksum of each bucket once it is stored.

        Raises:
            RankError: if the ranks no longer make the same calls.
            GatherError: if another rank failed. All ranks raise, and may try again.
        """
        count, size = len(self.order.buckets), self.ranks.size if self.spread else 1
        failure: Exception | None = None
        for start in range(0, count, size):
            numbers = range(start, min(start + size, count))
            checksums = self._store(numbers, failure, before)
            # Stage on rank 0; the others learn of an error in the next round
            try:
                if self.ranks.is_main:
                    for number in numbers:
                        after(number, checksums[number] if self._writer(number) is not None else self._hash(number))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _store(self, numbers: range, failure: Exception | None, before: Callable[[int], None]) -> dict[int, str | None]:
        """Store several buckets, one from each rank, and return the checksums of whole ones."""
        # Move the tensors; an error here may leave the other ranks waiting
        with collective("gathered weights") if self.ranks.size > 1 else nullcontext():
            parts = [self._take(number) for number in numbers]
        # Write them; an error here is reported to all ranks
        checksums: dict[int, str | None] = {}
        try:
            if failure is not None:
                raise failure
            for number, part in zip(numbers, parts, strict=True):
                before(number)
                self._write(number, part, checksums)
        except Exception as error:
            failure = error
        return self._agree(failure, checksums)

    def _writer(self, number: int) -> int | None:
        """Return the rank that writes a whole bucket, or None if each rank writes its blocks."""
        if not self.spread:
            return SENDER
        if isinstance(self.storage, PackedStorage) and self.source.convert is None:
            return None
        return number % self.ranks.size

    def _take(self, number: int) -> Any:
        """Return the blocks of this rank, or after a collective call the function that returns its whole tensors."""
        writer = self._writer(number)
        if writer is None:
            return self.source.pieces(*self.order.buckets[number], self.ranks.rank)
        return self.source.collect(*self.order.buckets[number], writer)

    def _write(self, number: int, part: Any, checksums: dict[int, str | None]) -> None:
        """Write what this rank has of a bucket, and note the checksum of a whole one."""
        writer, infos = self._writer(number), self._infos(number)
        if writer is None:
            self.storage.put_pieces(number, infos, part)
        elif writer == self.ranks.rank:
            tensors = part()
            self.storage.put(number, infos, tensors)
            kind = self.order.checksum
            checksums[number] = None if kind is None else CHECKSUMS[kind](tensors)

    def _hash(self, number: int) -> str | None:
        """Return the checksum of a bucket that all ranks wrote."""
        if self.order.checksum is None:
            return None
        return CHECKSUMS[self.order.checksum](unpack(self.storage.view(number), self._infos(number)))

    def _infos(self, number: int) -> list[TensorInfo]:
        first, last = self.order.buckets[number]
        return self.manifest[first:last]

    def _agree(self, failure: Exception | None, checksums: dict[int, str | None]) -> dict[int, str | None]:
        """Return the checksums of all ranks, or raise on all of them if one failed."""
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        reports = self.ranks.all_gather((message, checksums))
        if failure is not None and self.ranks.is_main:
            raise failure
        for rank, (message, _) in enumerate(reports):
            if message is not None:
                raise GatherError(f"rank {rank} failed: {message}")
        return {number: checksum for _, found in reports for number, checksum in found.items()}
