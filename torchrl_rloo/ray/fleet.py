"""WorkerFleet: rollout workers of a collector, their heartbeats, deaths and replacements."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from torchrl_rloo.collectors.conversation import RunnerSettings
from torchrl_rloo.collectors.ledger import Lease
from torchrl_rloo.collectors.scheduler import LeaseExpiredError
from torchrl_rloo.engines import EnginePool
from torchrl_rloo.ray.session import require_ray
from torchrl_rloo.ray.worker import Counts, RolloutWorker, WorkerStatus, add_counts

_LOGGER = logging.getLogger(__name__)
_LOG_PERIOD_S = 30.0  # time between two messages about a worker that has not started
CLOSE_TIMEOUT_S = 10.0
_HOUR = 3600.0


class WorkerSettings(NamedTuple):
    """Settings of rollout workers, see :class:`~torchrl_rloo.ray.RayLLMCollector`."""

    options: dict[str, Any]
    conversations: int | None
    beat_every: float
    beat_timeout: float
    start_timeout: float
    max_restarts: int


class Order:
    """Leased group that a worker runs, or that waits for one."""

    def __init__(self, lease: Lease, begin: Callable[[int], None], ended: Callable[[int], None]):
        self.lease, self.begin, self.ended, self.key = lease, begin, ended, (lease.group_id, lease.attempt)
        self.size = len(lease.rows)
        self.done: asyncio.Future = asyncio.get_running_loop().create_future()
        self.worker: Worker | None = None


class Worker:
    """Rollout worker as the driver knows it."""

    def __init__(self, number: int):
        self.number = number  # never used again
        self.actor: Any = None  # handle of its current actor; None between two
        self.ready = self.closing = False  # whether it takes groups, and whether it is being removed
        self.facts: dict[str, Any] = {}  # process and node of the actor
        self.status: WorkerStatus | None = None  # its last answer
        self.cause: BaseException | None = None  # of its last end
        self.orders: dict[tuple[int, int], Order] = {}  # given and not finished, by group and attempt
        self.groups: Counter[int] = Counter()  # their attempts by group
        self.load = 0  # their conversations
        self.began_at = time.monotonic()
        self.failures: deque[float] = deque()  # times of the last hour
        self.counted: Counts = {}  # counters of its last report
        self.followed: Any = None  # states of the pool's members that it knows
        self.task: asyncio.Task | None = None

    def give(self, order: Order) -> None:
        """Add an order."""
        order.worker, self.orders[order.key] = self, order
        self.groups[order.key[0]] += 1
        self.load += order.size

    def take(self, key: tuple[int, int]) -> Order | None:
        """Remove and return an order; None if it was removed before."""
        if (order := self.orders.pop(key, None)) is not None:
            self.load -= order.size
            self.groups[key[0]] -= 1
            if not self.groups[key[0]]:
                del self.groups[key[0]]
        return order

    def __repr__(self) -> str:
        cause = "" if self.cause is None else f" ({type(self.cause).__name__}: {self.cause})".splitlines()[0]
        return f"worker {self.number} is {'ready' if self.ready else 'starting'}{'' if self.ready else cause}"


class FleetOwner(Protocol):
    """Receiver of what happens to workers."""

    def worker_ready(self) -> None:
        """Note that another worker takes groups."""

    def take_status(self, worker: Worker, status: WorkerStatus) -> None:
        """Take the progress of a worker's groups."""

    def workers_ended(self, cause: BaseException) -> None:
        """Note that the last worker ended, and that none replaces it."""


class WorkerFleet:
    """Workers that are started, called regularly, and replaced when they are lost.

    All methods are called on the loop of the collector.

    Attributes:
        workers: current workers.
        counts: ``"workers/lost"`` and ``"workers/expired_leases"``.
    """

    def __init__(
        self,
        owner: FleetOwner,
        make: Any,
        settings: RunnerSettings,
        version: Callable[[], int],
        *,
        num_workers: int,
        workers: WorkerSettings,
        pool: EnginePool | None,
        counting: Sequence[Any],
    ):
        self._ray = require_ray()
        self._owner, self._settings, self._worker_settings, self._version = owner, settings, workers, version
        self._make, self._pool, self._counting = self._ray.put(self._ray.cloudpickle.dumps(make)), pool, counting
        self.counts: Counter[str] = Counter()
        self.workers: list[Worker] = []
        self._next_number, self._closed = 0, False
        self._news = asyncio.Event()
        for _ in range(num_workers):
            self._new_worker()

    def ready(self) -> list[Worker]:
        """Return the workers that take groups."""
        return [worker for worker in self.workers if worker.ready]

    def wake(self) -> None:
        """Start the supervision of all workers, and send heartbeats now."""
        for worker in self.workers:
            if worker.task is None and not self._closed:
                worker.task = asyncio.ensure_future(self._supervise(worker))
        self._news.set()

    def add_worker(self) -> int:
        """Start another worker, and return its number."""
        worker = self._new_worker()
        self.wake()
        return worker.number

    async def remove_worker(self, number: int, *, drain: bool = True) -> None:
        """Remove a worker, which finishes its groups first, or whose leases expire without ``drain``."""
        worker = next((worker for worker in self.workers if worker.number == number), None)
        if worker is None:
            raise ValueError(f"number={number} must be that of a worker: {[w.number for w in self.workers]}")
        worker.ready, worker.closing = False, True
        while drain and worker.orders:
            await asyncio.wait([order.done for order in worker.orders.values()], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # lets the order end
        self._expire(worker, RuntimeError("the worker was removed"))
        self.workers.remove(worker)
        if worker.task is not None:
            worker.task.cancel()
        await self._end(worker)

    async def close(self) -> None:
        """End all workers."""
        self._closed = True
        tasks = {worker.task for worker in self.workers if worker.task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *map(self._end, self.workers), return_exceptions=True)

    def lose(self, worker: Worker, error: BaseException) -> None:
        """Kill a worker that died or does not answer, and expire its leases."""
        if worker.actor is None:
            return
        with suppress(Exception):
            self._ray.kill(worker.actor, no_restart=True)
        worker.actor, worker.cause = None, error
        was_ready, worker.ready = worker.ready, False
        if was_ready and not self._closed:
            self.counts["workers/lost"] += 1
        if not self._closed:
            _LOGGER.warning("worker %d is lost, with %d groups: %s", worker.number, len(worker.orders), describe(error))
        self._expire(worker, error)
        self._news.set()

    def _new_worker(self) -> Worker:
        worker = Worker(self._next_number)
        self._next_number += 1
        self._create(worker)
        self.workers.append(worker)
        return worker

    def _create(self, worker: Worker) -> None:
        options = {"num_cpus": 1, "max_restarts": 0, "max_concurrency": 10_000} | self._worker_settings.options
        worker.actor = self._ray.remote(RolloutWorker).options(**options).remote(self._make, self._settings)
        worker.began_at, worker.status, worker.followed, worker.counted = time.monotonic(), None, None, {}

    async def _supervise(self, worker: Worker) -> None:
        """Keep one worker alive, until its budget of restarts is spent."""
        while True:
            try:
                worker.facts = await self._started(worker)
                worker.ready = True
                self._owner.worker_ready()
                while True:
                    await self._beat(worker)
            except (self._ray.exceptions.RayError, TimeoutError) as error:
                self.lose(worker, error)
            except Exception as error:  # of a pool or a counter; the worker would never be called again
                _LOGGER.exception("supervision of worker %d failed", worker.number)
                self.lose(worker, error)
            # Replace it, after a wait that grows with its failures
            now = time.monotonic()
            worker.failures = deque(t for t in worker.failures if t > now - _HOUR)
            broken = isinstance(worker.cause, self._ray.exceptions.RayTaskError)  # another start would fail as well
            if broken or len(worker.failures) >= self._worker_settings.max_restarts:
                _LOGGER.error("worker %d is not replaced: %s", worker.number, describe(worker.cause))
                self.workers.remove(worker)
                if not self.workers:
                    self._owner.workers_ended(worker.cause)
                return
            await asyncio.sleep(min(2.0 ** len(worker.failures) - 1, 60.0))
            worker.failures.append(now)
            self._create(worker)

    async def _started(self, worker: Worker) -> dict[str, Any]:
        """Wait for a worker to start; log while it waits for a place in the cluster."""
        starting = asyncio.ensure_future(result_of(worker.actor.start.remote()))
        deadline = time.monotonic() + self._worker_settings.start_timeout
        try:
            while not (await asyncio.wait({starting}, timeout=_LOG_PERIOD_S))[0]:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"it did not start in start_timeout={self._worker_settings.start_timeout:g} s")
                _LOGGER.warning("worker %d has not started yet; it may wait for a place in the cluster", worker.number)
            return starting.result()
        finally:
            starting.cancel()  # without effect on a start that has ended

    async def _beat(self, worker: Worker) -> None:
        """Exchange news with a worker, then wait for the next heartbeat."""
        self._news.clear()
        states = None if self._pool is None else self._pool.member_states()
        changed = states is not None and states != worker.followed
        call = worker.actor.beat.remote(self._version(), states if changed else None)
        status: WorkerStatus = await result_of(call, self._worker_settings.beat_timeout)
        worker.status, worker.followed = status, states
        if status.reports:
            self._pool.note_reports(status.reports)
        self._note_counts(worker, status.counts)
        self._owner.take_status(worker, status)
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), self._worker_settings.beat_every)

    def _note_counts(self, worker: Worker, counts: Counts) -> None:
        add_counts([self, *self._counting], counts, worker.counted)
        worker.counted = counts

    def _expire(self, worker: Worker, error: BaseException) -> None:
        for key in list(worker.orders):
            order = worker.take(key)
            if not order.done.done():
                self.counts["workers/expired_leases"] += 1
                expired = LeaseExpiredError(f"worker {worker.number} was lost: {describe(error)}")
                order.done.set_exception(expired)

    async def _end(self, worker: Worker) -> None:
        if (actor := worker.actor) is None:
            return
        worker.actor = None
        with suppress(Exception):
            if worker.ready:
                self._note_counts(worker, await result_of(actor.close.remote(), CLOSE_TIMEOUT_S))
        with suppress(Exception):
            self._ray.kill(actor, no_restart=True)


async def result_of(ref: Any, timeout: float | None = None) -> Any:
    """Await a Ray reference, or raise TimeoutError if there is no result after ``timeout`` seconds."""
    future = ref.future()
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
    except asyncio.TimeoutError:
        raise TimeoutError(f"no answer in {timeout:g} s") from None


def describe(error: BaseException | None) -> str:
    """Return an error in one line; that of a task is the last line, which has the cause."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return lines[-1] if type(error).__name__.startswith("RayTaskError") else lines[0]
