"""GroupScheduler: begins groups, waits for them and chooses the next batch, on the event loop of a collector."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from tensordict import TensorDictBase

from torchrl_rloo.collectors.conversation import GroupRunner
from torchrl_rloo.collectors.ledger import Group, GroupLedger, GroupState, Lease
from torchrl_rloo.collectors.staleness import AgeTable, OnStale, oldest_sampled, oldest_version


class LateGroups:
    """Running groups with enough ended members, oldest first. Each call costs the logarithm of their number.

    Args:
        ledger: record of the groups.
        runner: runner of their conversations.
    """

    def __init__(self, ledger: GroupLedger, runner: GroupRunner):
        self.ledger, self.runner = ledger, runner
        self._waiting: list[tuple[int, int]] = []  # heap of (group_id, attempt), with some that have ended
        self._known: set[tuple[int, int]] = set()
        self._cut: set[tuple[int, int]] = set()

    def add(self, group_id: int) -> None:
        """Note that enough members of a running group have ended."""
        group = self.ledger.groups.get(group_id)
        if group is None or group.state != GroupState.LEASED or (key := (group_id, group.attempt)) in self._known:
            return
        self._known.add(key)
        heappush(self._waiting, key)

    def remove(self, group_id: int, attempt: int) -> None:
        """Forget an attempt of a group, which has ended."""
        self._known.discard((group_id, attempt))
        self._cut.discard((group_id, attempt))

    def cut(self, number: int) -> None:
        """Cut the stragglers of the oldest groups, so that at most ``number`` groups have been cut and still run."""
        while len(self._cut) < number and self._waiting:
            key = heappop(self._waiting)
            group = self.ledger.groups.get(key[0])
            if key in self._known and group is not None and (group.state, group.attempt) == (GroupState.LEASED, key[1]):
                self._cut.add(key)
                self.runner.cut_stragglers(key[0])


_LOGGER = logging.getLogger(__name__)
_CANCEL_TIMEOUT_S = 10.0
_MAX_STALE_ATTEMPTS = 3  # attempts of a group before its stale tokens are masked instead
_BEGUN = (GroupState.LEASED, GroupState.COMPLETE)
_UNDELIVERED = (GroupState.DRAWN, *_BEGUN)


class LeaseExpiredError(RuntimeError):
    """Loss of the worker that ran a group. The group is drawn again under its next attempt."""


class Batch(NamedTuple):
    """Groups that were chosen for delivery.

    Attributes:
        group_ids: ids of the groups, in ascending order.
        rows: finished rows of the groups, in the same order; those of a remote runner are metadata.
        version: policy version at the delivery, to which the staleness refers.
    """

    group_ids: list[int]
    rows: list[TensorDictBase]
    version: int


class GroupScheduler:
    """Scheduler of a collector's groups. All methods are called on the collector's event loop.

    Args:
        ledger: record of the groups.
        runner: runner of their conversations.
        version: function that returns the current policy version.
        per_batch: number of groups in a batch.
        ahead: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        max_staleness: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        on_stale: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        min_members: see :class:`~torchrl_rloo.collectors.LLMCollector`.

    Attributes:
        counts: ``"collector/cancelled_groups"`` and the counters ``"staleness/..."``.
        has_delivered: whether groups may begin between two batches; set once a batch was delivered.
        closed: True once nothing may begin any more.
    """

    def __init__(
        self,
        ledger: GroupLedger,
        runner: GroupRunner,
        version: Callable[[], int],
        *,
        per_batch: int,
        ahead: int,
        max_staleness: int | None,
        on_stale: OnStale,
        min_members: int | None,
    ):
        self.ledger, self.runner, self.version, self.per_batch = ledger, runner, version, per_batch
        self.ahead, self.max_staleness, self.on_stale, self.min_members = ahead, max_staleness, on_stale, min_members
        self.counts: Counter[str] = Counter()
        self.closed = self.has_delivered = False
        self._tasks: dict[int, asyncio.Task] = {}
        self._waiter: asyncio.Task | None = None  # waits for the batch of the current collect
        self._failures: dict[int, BaseException] = {}  # by group, until a collect raises them
        self._news = asyncio.Event()
        self._checked_version: int | None = None  # version of the last search for stale groups
        self._unchecked: list[Group] = []  # groups that completed since
        self._ages = AgeTable(ledger) if on_stale == "wait" and max_staleness else None
        self._late = LateGroups(ledger, runner)

    def drop_waiter(self) -> None:
        """Cancel the wait of an earlier ``collect`` that an interrupt left behind."""
        if self._waiter is not None:
            self._waiter.cancel()

    async def next_batch(self, groups: int | None = None) -> Batch:
        """Return the next batch, once it is ready; its groups are delivered.

        Args:
            groups: number of groups, which are all that may begin for it. None takes ``per_batch``.
        """
        self._waiter = asyncio.current_task()
        try:
            return await self._choose_batch(groups)
        finally:
            if self._waiter is asyncio.current_task():
                self._waiter = None

    async def _choose_batch(self, groups: int | None) -> Batch:
        if self.max_staleness is None and not self.ahead:
            self._requeue_older()
        while True:
            if self._failures:
                group, failure = next(iter(self._failures.items()))
                await asyncio.shield(self.requeue_running())  # to the end, even if the caller is interrupted
                self._failures.pop(group, None)
                raise failure
            if self.closed:
                raise RuntimeError("the collector is shut down; create another one")
            self.ledger.flush()
            self._requeue_stale()
            needed = self.admit() if groups is None else self._admit_only(groups)
            if chosen := self._choose(needed):
                return self._deliver(chosen)
            self._news.clear()
            await self._news.wait()

    async def requeue_running(self) -> None:
        """Stop all groups, wait until their state is released, and return them to the drawn ones."""
        running = [(group, group.attempt) for group in self.ledger.of(GroupState.LEASED)]
        await self.stop(self._tasks.copy())
        await self.runner.settle(_CANCEL_TIMEOUT_S)
        # Other calls may have ended some of these groups by now, and begun others
        leased = {(group, group.attempt) for group in self.ledger.of(GroupState.LEASED)}
        requeued = [group.group_id for group, attempt in running if (group, attempt) in leased]
        self.ledger.requeue(requeued)
        for group_id in requeued:  # what failed were attempts that have ended
            self._failures.pop(group_id, None)
        self._news.set()

    def admit(self) -> int:
        """Begin groups in all free places, and return the number of groups in the batch."""
        per_batch = self.per_batch
        free = self._free_places(per_batch * (1 + (self.max_staleness or 0)) + self.ahead)
        # Without any group the primer must be asked, since it raises at the end of the dataset
        if free > 0 or not self.ledger.count(*_UNDELIVERED):
            self._start(self.ledger.lease(free if free > 0 else per_batch))
        return min(per_batch, self.ledger.count(*_UNDELIVERED))

    def _admit_only(self, groups: int) -> int:
        if (free := groups - self.ledger.count(*_BEGUN)) > 0:
            self._start(self.ledger.lease(free))
        return groups

    def admit_ahead(self) -> None:
        """Begin groups between two batches, if they can be delivered in time after the next updates."""
        self._requeue_stale()
        free = self._free_places(self.per_batch * (self.max_staleness or 0))
        if free > 0 and self.has_delivered and not self.closed:
            self._start(self.ledger.lease(free))
        self._news.set()

    def _free_places(self, places: int) -> int:
        """Return the number of groups to begin, so that ``places`` are undelivered.

        New draws that do not fill a last batch are left out, but not groups that were drawn before.
        """
        primer, begun = self.ledger.primer, self.ledger.count(*_BEGUN)
        if (remaining := primer.remaining()) != float("inf"):
            undelivered = self.ledger.count(*_UNDELIVERED)
            in_whole_batches = int(undelivered + remaining) // self.per_batch * self.per_batch
            places = min(places, max(in_whole_batches, undelivered + primer.num_requeued))
        return places - begun

    def _start(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._tasks[lease.group_id] = asyncio.ensure_future(self._run_group(lease))

    async def _run_group(self, lease: Lease) -> None:
        group, attempt, _ = lease
        try:
            rows = await self.runner.run(lease, partial(self.ledger.begin, group, attempt), self._note_end)
        except asyncio.CancelledError:
            if self._tasks.get(group) is asyncio.current_task():  # otherwise stop() cancelled it
                self._failures[group] = RuntimeError(
                    f"the environment or the policy cancelled a task of group_id={group}"
                )
            raise
        except LeaseExpiredError as error:
            self._renew(group, attempt, error)
        except BaseException as error:
            if self._tasks.get(group) is asyncio.current_task():
                self._failures[group] = error
            else:  # stopped before it failed: another attempt decides
                _LOGGER.info("group_id=%d failed while it was stopped: %r", group, error)
        else:
            oldest = None if self.max_staleness is None else oldest_sampled(rows)
            if self.ledger.complete(group, attempt, rows, oldest) and self.on_stale == "requeue":
                self._unchecked.append(self.ledger.groups[group])
        finally:
            if self._tasks.get(group) is asyncio.current_task():
                del self._tasks[group]
            self._late.remove(group, attempt)
            self._news.set()

    def _renew(self, group_id: int, attempt: int, error: LeaseExpiredError) -> None:
        """Return a group whose lease expired to the drawn ones, and begin it again if groups may begin now."""
        group = self.ledger.groups.get(group_id)
        if group is None or (group.state, group.attempt) != (GroupState.LEASED, attempt):
            return
        _LOGGER.warning("group_id=%d is drawn again: %s", group_id, error)
        self.ledger.requeue([group_id])
        if not self.closed:
            asyncio.get_running_loop().call_soon(self.admit_ahead)

    def _choose(self, needed: int) -> list[Group]:
        """Return the groups to deliver, oldest first; none if they are not ready."""
        missing = needed - self.ledger.count(GroupState.COMPLETE)
        if missing <= 0:
            if self._ages is None:
                return self.ledger.of(GroupState.COMPLETE)[:needed]
            chosen = self._ages.choose(needed, self.per_batch, self.version(), self.max_staleness)
            if chosen is not None:
                return chosen
        # Complete groups whose last members are late
        self._late.cut(missing if missing > 0 else needed)
        return []

    def _note_end(self, group_id: int) -> None:
        """Look at a group in which a conversation has ended, which may have enough members now."""
        if self.min_members is not None and self.runner.ended_counts[group_id] >= self.min_members:
            self._late.add(group_id)
            self._news.set()

    def _deliver(self, chosen: list[Group]) -> Batch:
        """Return the rows of complete groups, sorted by id."""
        group_ids = sorted(group.group_id for group in chosen)
        rows = self.ledger.deliver(group_ids)
        for group in group_ids:
            self.runner.forget(group)
        return Batch(group_ids, rows, self.version())

    def _requeue_stale(self) -> None:
        """Draw groups again that are beyond the bound on staleness."""
        if self.max_staleness is None or self.on_stale != "requeue":
            return
        # Only an update, or the rows of a complete group, can make a group stale
        version, groups = self.version(), self.ledger.groups
        if version != self._checked_version:
            begun = self.ledger.of(*_BEGUN)
        else:
            begun = [g for g in self._unchecked if groups.get(g.group_id) is g and g.state in _BEGUN]
        self._checked_version, self._unchecked = version, []
        stale = [
            group.group_id
            for group in begun
            if oldest_version(group, version) < version - self.max_staleness and group.attempt < _MAX_STALE_ATTEMPTS
        ]
        self._requeue(stale)

    def _requeue_older(self) -> None:
        """Draw groups again that an interrupted ``collect`` began under older weights."""
        begun, version = self.ledger.of(*_BEGUN), self.version()
        if older := [group.group_id for group in begun if group.version is not None and group.version < version]:
            self._requeue(older)

    def _requeue(self, group_ids: list[int]) -> None:
        for group_id in group_ids:
            if (task := self._tasks.pop(group_id, None)) is not None:
                task.cancel()
            self.runner.forget(group_id)
        self.counts["staleness/requeued_groups"] += len(group_ids)
        self.ledger.requeue(group_ids)

    async def cancel(self, group_ids: set[int] | None) -> int:
        """Cancel incomplete groups for good, and return their number; None cancels all."""
        chosen = [g.group_id for g in self.ledger.of(GroupState.LEASED) if group_ids is None or g.group_id in group_ids]
        await self.stop(chosen)
        # Keep groups that completed before their task stopped
        cancelled = [group for group in chosen if self.ledger.groups[group].state == GroupState.LEASED]
        self.ledger.drop(cancelled)
        self.counts["collector/cancelled_groups"] += len(cancelled)
        for group in cancelled:
            self._failures.pop(group, None)
        self._news.set()
        return len(cancelled)

    async def stop(self, groups: Iterable[int]) -> None:
        """Cancel the tasks of groups and wait for their end."""
        tasks = {self._tasks.pop(group) for group in groups if group in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
        for group in groups:
            self.runner.forget(group)

    async def reset(self) -> None:
        """Stop all groups, return them to the drawn ones, and forget their failures."""
        await self.requeue_running()
        self._failures.clear()

    async def close(self) -> None:
        """Stop all groups, for good, and return them to the drawn ones."""
        self.closed = True
        self._news.set()
        await self.requeue_running()

    def wake(self) -> None:
        """Let a waiting ``collect`` look at the ledger again."""
        self._news.set()
