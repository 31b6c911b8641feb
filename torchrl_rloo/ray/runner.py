"""RemoteRunner: runs a collector's groups in rollout workers, and outlives the death of each."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from math import ceil
from typing import Any

from tensordict import TensorDictBase

from torchrl_rloo.collectors.conversation import RunnerSettings
from torchrl_rloo.collectors.ledger import Lease
from torchrl_rloo.data.packed import pack_rows, unpack_rows
from torchrl_rloo.engines import EnginePool
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.envs.activity import ActivityWindow
from torchrl_rloo.ray.fleet import CLOSE_TIMEOUT_S, Order, Worker, WorkerFleet, WorkerSettings, describe, result_of
from torchrl_rloo.ray.session import require_ray
from torchrl_rloo.ray.worker import GroupDone, PackedLease, WorkerStatus

_START_SHARE_S = 30.0  # a worker that starts for longer gets no share of the groups yet


class RemoteRunner:
    """Runner of any number of groups in rollout workers, with the interface of :class:`GroupRunner`.

    Groups wait in the driver until a worker has places, and go to the one with the fewest conversations. A heartbeat
    brings each worker the policy version and the states of the engines. A worker that died, or did not answer a
    heartbeat in time, is killed: its leases expire, and another actor takes its place.

    Attributes:
        seed: seed from which the conversations' seeds are derived.
        counts: the counters of :class:`GroupRunner` over all workers, and those of the fleet.
        objects: references to the rows of finished groups, by ``(group_id, attempt)``.
        nbytes: bytes of their tensors, by the same keys.
    """

    def __init__(
        self,
        make: Any,
        settings: RunnerSettings,
        version: Callable[[], int],
        *,
        num_workers: int,
        workers: WorkerSettings,
        pool: EnginePool | None,
        parts: Sequence[Any] = (),
    ):
        self.seed, self.version, self._places = settings.seed, version, workers.conversations
        self.turn_counts: Counter[int] = Counter()
        self.ended_counts: Counter[int] = Counter()
        self.objects: dict[tuple[int, int], Any] = {}
        self.nbytes: dict[tuple[int, int], int] = {}
        self._queue: dict[tuple[int, int], Order] = {}  # by group and attempt, oldest first
        self._queued = 0  # conversations in it
        self._flush_due = False
        self._last_cause: BaseException | None = None
        self._readers: set[asyncio.Task] = set()
        self._activity = ActivityWindow()
        sizes = {"num_workers": num_workers, "workers": workers}
        self.fleet = WorkerFleet(self, make, settings, version, **sizes, pool=pool, counting=parts)
        self.counts = self.fleet.counts

    # Interface of GroupRunner

    async def run(
        self, lease: Lease, begin: Callable[[int], None], ended: Callable[[int], None] = lambda group_id: None
    ) -> list[TensorDictBase]:
        """Run a group in a worker, and return metadata of its ``G`` rows; ``objects`` has their reference.

        Cancelling it cancels its turns and tools there and releases its state. If the worker is lost, it raises
        ``LeaseExpiredError``.
        """
        self.forget(lease.group_id)
        order = Order(lease, begin, ended)
        self._queue[order.key] = order
        self._queued += order.size
        self.wake()
        if not self.fleet.workers:
            self._fail_waiting()
        try:
            return await order.done
        except asyncio.CancelledError:
            await asyncio.shield(self._withdraw(order))
            raise

    def cut_stragglers(self, group_id: int) -> None:
        """Cancel the conversations of a group that have not ended; the group then completes with them abstaining."""
        for worker in self.fleet.workers:
            if group_id in worker.groups and worker.actor is not None:
                worker.actor.cut.remote(group_id)

    def forget(self, group_id: int) -> None:
        """Drop the counts of a delivered or cancelled group."""
        self.turn_counts.pop(group_id, None)
        self.ended_counts.pop(group_id, None)

    def end_batch(self) -> None:
        """Tell the environments that the rows scored since the last call form a batch."""
        for worker in self.fleet.ready():
            worker.actor.end_batch.remote()

    def exclusive(self) -> AbstractContextManager[None]:
        """Return an empty context, since no policy of this process samples."""
        return nullcontext()

    async def settle(self, seconds: float) -> None:
        """Wait at most ``seconds`` for resets and scoring of cancelled groups."""
        calls = [asyncio.ensure_future(result_of(w.actor.settle.remote(seconds))) for w in self.fleet.ready()]
        if calls:
            await asyncio.wait(calls, timeout=seconds)
        for call in calls:
            call.cancel()

    def metrics(self) -> dict[str, float]:
        """Return numbers of workers, conversations and stored groups."""
        ready = self.fleet.ready()
        statuses = [worker.status for worker in ready if worker.status is not None]
        return {
            "workers/number": len(self.fleet.workers),
            "workers/ready": len(ready),
            "workers/in_flight": sum(status.in_flight for status in statuses),
            "workers/queued_groups": len(self._queue),
            "workers/stored_groups": len(self.objects),
            "workers/stored_bytes": sum(self.nbytes.values()),
        }

    def timings(self) -> dict[str, float]:
        """Return the mean time without a group since the workers' starts, and their memory."""
        statuses = [worker.status for worker in self.fleet.ready() if worker.status is not None]
        return {
            "workers/idle_seconds": sum(status.idle_seconds for status in statuses) / max(1, len(statuses)),
            "workers/resident_bytes": sum(status.resident_bytes for status in statuses),
        }

    def take_activity(self) -> ActivityWindow:
        """Return where conversations spent their time in all workers, up to their last heartbeats."""
        taken, self._activity = self._activity, ActivityWindow()
        return taken

    def occupancies(self) -> dict[tuple[int, float], Reading]:
        """Return the occupancy of each worker's policy, by the number of the worker and the time of its start."""
        ready = [worker for worker in self.fleet.ready() if worker.status is not None]
        return {(worker.number, worker.began_at): worker.status.occupancy for worker in ready}

    async def close(self) -> None:
        """End all workers, and free the rows of all groups."""
        for reader in self._readers:
            reader.cancel()
        await self.fleet.close()
        self.prune(())

    # Groups

    def wake(self) -> None:
        """Give waiting groups to workers, and send heartbeats now."""
        self.fleet.wake()
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """Give waiting groups to ready workers, in one call each."""
        self._flush_due = False
        given: dict[Worker, list[Order]] = {}
        while self._queue and (worker := self._choose(next(iter(self._queue.values())).size)) is not None:
            order = self._unqueue()
            worker.give(order)
            order.begin(self.version())
            given.setdefault(worker, []).append(order)
        for worker, orders in given.items():
            self._readers.add(task := asyncio.ensure_future(self._read(worker, orders)))
            task.add_done_callback(self._readers.discard)

    def _unqueue(self, key: tuple[int, int] | None = None) -> Order:
        """Remove and return a waiting group; None takes the oldest."""
        order = self._queue.pop(next(iter(self._queue)) if key is None else key)
        self._queued -= order.size
        return order

    def _choose(self, size: int) -> Worker | None:
        """Return the worker with the fewest conversations, if it has places within its share."""
        if not (ready := self.fleet.ready()):
            return None
        worker, places = min(ready, key=lambda worker: worker.load), self._places
        if places is not None and worker.load and worker.load + size > places:
            return None
        # Keep the share of workers that start
        now = time.monotonic()
        coming = [w for w in self.fleet.workers if not (w.ready or w.closing) and now - w.began_at < _START_SHARE_S]
        total = sum(worker.load for worker in self.fleet.workers) + self._queued
        share = ceil(total / (len(ready) + len(coming)))
        return worker if not worker.load or worker.load + size <= share or not coming else None

    async def _read(self, worker: Worker, orders: list[Order]) -> None:
        """Run groups in a worker, and take their results as they end."""
        actor = worker.actor
        leases = [PackedLease(*order.key, pack_rows(order.lease.rows)) for order in orders]
        try:
            stream = actor.run.options(num_returns="streaming").remote(leases, self.seed, self.version())
            for _ in orders:
                result: GroupDone = await result_of(await anext(stream))
                # Awaiting the stream would copy the rows to this node
                rows = await asyncio.to_thread(next, stream, None)
                if rows is None or rows == stream.completed():  # the actor died before it had sent them
                    await stream.completed()
                self._take(worker, result, rows)
        except (require_ray().exceptions.RayError, StopAsyncIteration) as error:  # the actor died, or could not answer
            if worker.actor is actor:
                self.fleet.lose(worker, error)
        except Exception as error:
            for order in orders:
                if not order.done.done():
                    order.done.set_exception(error)

    def _take(self, worker: Worker, result: GroupDone, rows: Any) -> None:
        group, attempt = key = (result.group_id, result.attempt)
        order = worker.take(key)
        if self._queue:
            self.wake()
        if order is None or order.done.done():  # cancelled
            return
        if result.error is not None:
            order.done.set_exception(result.error)
            return
        self.turn_counts[group], self.ended_counts[group] = result.turns, order.size
        self.objects[key], self.nbytes[key] = rows, result.nbytes
        order.done.set_result(list(unpack_rows(result.metadata).unbind(0)))

    async def _withdraw(self, order: Order) -> None:
        """Cancel a group, wherever it is."""
        if self._queue.get(order.key) is order:
            self._unqueue(order.key)
        if (worker := order.worker) is not None and worker.orders.get(order.key) is order:
            with suppress(Exception):  # a lost worker has no state to release
                await result_of(worker.actor.cancel.remote(*order.key), CLOSE_TIMEOUT_S)
            worker.take(order.key)

    def prune(self, groups: Iterable[tuple[int, int]]) -> None:
        """Free the rows of all groups except some."""
        kept = set(groups)
        self.objects = {key: ref for key, ref in self.objects.items() if key in kept}
        self.nbytes = {key: size for key, size in self.nbytes.items() if key in kept}

    # News of the fleet

    def worker_ready(self) -> None:
        """Give waiting groups to the worker."""
        self.wake()

    def take_status(self, worker: Worker, status: WorkerStatus) -> None:
        """Take the progress of a worker's groups."""
        self._activity.merge(status.activity)
        for key, order in worker.orders.items():
            if key in status.began:
                order.begin(status.began[key])
            self.turn_counts[key[0]] = status.turns.get(key[0], 0)
            before, now = self.ended_counts[key[0]], status.ended.get(key[0], 0)
            self.ended_counts[key[0]] = now
            if now > before:
                order.ended(key[0])

    def workers_ended(self, cause: BaseException) -> None:
        """Fail all groups, which no worker will ever take."""
        self._last_cause = cause
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        while self._queue:
            order = self._unqueue()
            if not order.done.done():
                cause = describe(self._last_cause)
                order.done.set_exception(RuntimeError(f"no rollout worker is left; the last one failed: {cause}"))
