"""Simulation of a cluster: the real ledger and scheduler in virtual time, over simulated engines and a trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torchrl_rloo.collectors.ledger import GroupLedger, GroupState
from torchrl_rloo.collectors.scheduler import Batch, GroupScheduler
from torchrl_rloo.collectors.staleness import OnStale
from torchrl_rloo.data import keys
from torchrl_rloo.diagnostics.cluster_clock import run_virtual
from torchrl_rloo.diagnostics.cluster_engine import EngineSpeed, InFlight, SimulatedEngine, SimulatedPool
from torchrl_rloo.diagnostics.cluster_load import Load
from torchrl_rloo.diagnostics.cluster_runner import ProcessCosts, SimulatedPrimer, SimulatedRunner

_MAX_LOOKS = 2000  # moments of a timeline
_MAX_DRAWN_ENGINES = 64


@dataclass(frozen=True)
class Mode:
    """Relation of sampling and training.

    Args:
        max_staleness: see :class:`~torchrl_rloo.collectors.LLMCollector`; 0 samples nothing ahead.
        on_stale: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        in_flight: treatment of running requests by a weight update: ``"finish"`` or ``"continue"``.
        ahead: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        min_members: see :class:`~torchrl_rloo.collectors.LLMCollector`.
        background_push: whether the trainer continues while engines receive new weights.
    """

    max_staleness: int | None = 0
    on_stale: OnStale = "mask"
    in_flight: InFlight = "finish"
    ahead: int = 0
    min_members: int | None = None
    background_push: bool = False


def modes(max_staleness: int = 4) -> dict[str, Mode]:
    """Return the four modes by name, from on-policy to fully asynchronous.

    Args:
        max_staleness: bound of the two asynchronous modes.
    """
    return {
        "sync": Mode(),
        "one-step-off": Mode(1, "wait"),
        "async": Mode(max_staleness),
        "partial": Mode(max_staleness, in_flight="continue"),
    }


@dataclass(frozen=True)
class ClusterSettings:
    """Cluster and its run.

    Args:
        load: the conversations.
        engines: number of engines.
        speed: speed and memory of each.
        groups_per_batch: groups of a training step.
        group_size: conversations of a group.
        train_seconds: duration of a step, without that of its tokens.
        train_rate: tokens of rows per second, of all trainer GPUs together.
        transfer_seconds: time in which new weights travel to the engines while these sample.
        still_seconds: time in which an engine stands still to put them in use.
        commit_at_once: engines that put weights in use at a time; None takes all.
        mode: relation of sampling and training.
        costs: CPU time of the driver and of the rollout workers.
        max_in_flight: largest number of conversations at a time; None disables the limit.

    Raises:
        ValueError: if a number is out of range.
    """

    load: Load
    engines: int
    speed: EngineSpeed
    groups_per_batch: int
    group_size: int
    train_seconds: float = 0.0
    train_rate: float = float("inf")
    transfer_seconds: float = 0.0
    still_seconds: float = 0.0
    commit_at_once: int | None = None
    mode: Mode = Mode()
    costs: ProcessCosts = ProcessCosts()
    max_in_flight: int | None = None

    def __post_init__(self):
        for name in ("engines", "groups_per_batch", "group_size", "commit_at_once", "max_in_flight"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not self.train_rate > 0:
            raise ValueError(f"train_rate={self.train_rate} must be above 0 tokens per second")


@dataclass
class Timeline:
    """Course of a simulation, for a picture.

    Attributes:
        trainer: ``(begin, end, what)``, ``what`` being ``"waits"``, ``"trains"`` or ``"pushes"``.
        looks: times at which the engines were looked at, in seconds.
        running: running requests of each engine at these times, -1 while it stands still.
    """

    trainer: list[tuple[float, float, str]] = field(default_factory=list)
    looks: list[float] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class ClusterResult:
    """Result of a simulation, over the steps after its warm-up. All shares are of the time.

    Attributes:
        settings: the cluster.
        seconds: virtual time.
        steps: number of steps.
        tokens: sampled tokens in the trained rows.
        masked_tokens: tokens of these rows beyond the bound on staleness.
        staleness: tokens by their staleness at delivery.
        engine_busy: share in which an engine has a running request, over all engines.
        running: running requests of an engine, on average over its busy time.
        engine_still: share in which an engine stands still for new weights.
        engine_tokens: tokens sampled by all engines.
        trainer_busy: share in which the trainer trains.
        trainer_waiting: share in which it waits for a batch.
        trainer_pushing: share in which it waits for a weight update.
        driver_busy: share in which the driver's CPU works.
        worker_busy: share in which the CPU of a rollout worker works, over all workers.
        queue: complete groups when the trainer asks for a batch, on average.
        timeline: course of the simulation; None if it was not recorded.
    """

    settings: ClusterSettings
    seconds: float
    steps: int
    tokens: int
    masked_tokens: int
    staleness: Counter[int]
    engine_busy: float
    running: float
    engine_still: float
    engine_tokens: float
    trainer_busy: float
    trainer_waiting: float
    trainer_pushing: float
    driver_busy: float
    worker_busy: float
    queue: float
    timeline: Timeline | None = None

    @property
    def steps_per_hour(self) -> float:
        """Training steps per hour."""
        return 3600 * self.steps / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second that reach the trainer within the bound on staleness."""
        return (self.tokens - self.masked_tokens) / self.seconds

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of a token, over the tokens within the bound."""
        bound = self.settings.mode.max_staleness
        kept = {age: n for age, n in self.staleness.items() if bound is None or age <= bound}
        return sum(age * n for age, n in kept.items()) / max(1, sum(kept.values()))


def simulate(settings: ClusterSettings, steps: int = 8, *, warmup: int = 3, record: bool = False) -> ClusterResult:
    """Run a cluster in virtual time.

    Args:
        settings: the cluster.
        steps: number of measured steps.
        warmup: number of steps before them.
        record: whether to record a timeline.

    Raises:
        ValueError: if a number is out of range.

    Example:
        >>> from torchrl_rloo.diagnostics.cluster_engine import linear_rate
        >>> from torchrl_rloo.diagnostics.cluster_load import Distribution
        >>> load = Load(Distribution(100.0), prompt=Distribution(0.0))
        >>> cluster = ClusterSettings(load, 1, EngineSpeed(linear_rate(10, 40)), 2, 2, train_seconds=5.0)
        >>> simulate(cluster).seconds  # 8 steps of 10 s to sample and 5 s to train
        120.0
    """
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    return run_virtual(_Cluster.run(settings, steps, warmup, record))


class _Cluster:
    """Parts of a running simulation."""

    def __init__(self, settings: ClusterSettings, record: bool):
        self.settings, self.version = settings, 0
        self.loop = asyncio.get_running_loop()
        self.engines = [SimulatedEngine(settings.speed) for _ in range(settings.engines)]
        self.ledger = GroupLedger(SimulatedPrimer())
        self.runner = SimulatedRunner(
            settings.load,
            settings.group_size,
            SimulatedPool(self.engines),
            settings.costs,
            lambda: self.version,
            settings.max_in_flight,
        )
        mode = settings.mode
        self.scheduler = GroupScheduler(
            self.ledger,
            self.runner,
            lambda: self.version,
            per_batch=settings.groups_per_batch,
            ahead=mode.ahead,
            max_staleness=mode.max_staleness,
            on_stale=mode.on_stale,
            min_members=mode.min_members,
        )
        self.spent: Counter[str] = Counter()  # seconds of the trainer
        self.staleness: Counter[int] = Counter()
        self.queued = 0
        self._pushing: asyncio.Future | None = None
        self.timeline = Timeline() if record else None

    @classmethod
    async def run(cls, settings: ClusterSettings, steps: int, warmup: int, record: bool) -> ClusterResult:
        """Run all steps, and return the result of those after the warm-up."""
        cluster = cls(settings, record)
        watching = asyncio.ensure_future(cluster._watch()) if record else None
        start, before = 0.0, cluster._totals()
        for step in range(warmup + steps):
            if step == warmup:
                cluster.staleness.clear()
                start, before = cluster.loop.time(), cluster._totals()
            await cluster._step()
        if watching is not None:
            watching.cancel()
        return cluster._result(steps, start, before)

    async def _step(self) -> None:
        """Collect, train and update the weights, as a user's loop does."""
        self.queued += self.ledger.count(GroupState.COMPLETE)
        with self._spend("waits"):
            batch = await self.scheduler.next_batch()
        self.ledger.settle(batch.group_ids)
        self.ledger.acknowledge()
        self.scheduler.has_delivered = True
        tokens = self._note(batch)
        with self._spend("trains"):
            await asyncio.sleep(self.settings.train_seconds + tokens / self.settings.train_rate)
        with self._spend("pushes"):
            await self._push()

    def _note(self, batch: Batch) -> int:
        """Count the staleness of a batch, and return the tokens of its rows."""
        for row in batch.rows:
            for version, tokens in row[keys.VERSION_COUNTS].tolist():
                self.staleness[max(0, self.version - version)] += tokens
        return sum(int(row[keys.TOKEN_COUNT]) for row in batch.rows)

    async def _push(self) -> None:
        """Wait for the previous weight update, then for this one unless it runs in the background."""
        if self._pushing is not None:
            await self._pushing
        self._pushing = asyncio.ensure_future(self._update_engines(self.version + 1))
        if not self.settings.mode.background_push:
            await self._pushing

    async def _update_engines(self, version: int) -> None:
        settings = self.settings
        if settings.transfer_seconds:
            await asyncio.sleep(settings.transfer_seconds)
        places = asyncio.Semaphore(settings.commit_at_once or settings.engines)

        async def commit(engine: SimulatedEngine) -> None:
            async with places:
                await engine.update(version, settings.still_seconds, settings.mode.in_flight)

        await asyncio.gather(*map(commit, self.engines))
        self.version = version
        self.scheduler.admit_ahead()

    @contextmanager
    def _spend(self, what: str) -> Iterator[None]:
        begin = self.loop.time()
        yield
        self.spent[what] += self.loop.time() - begin
        if self.timeline is not None and self.loop.time() > begin:
            self.timeline.trainer.append((begin, self.loop.time(), what))

    async def _watch(self) -> None:
        """Look at the engines at intervals that double once there are too many looks."""
        period, timeline = 0.01, self.timeline
        while True:
            timeline.looks.append(self.loop.time())
            timeline.running.append([-1 if e.paused else e.running for e in self.engines[:_MAX_DRAWN_ENGINES]])
            if len(timeline.looks) > _MAX_LOOKS:
                timeline.looks, timeline.running, period = timeline.looks[::2], timeline.running[::2], 2 * period
            await asyncio.sleep(period)

    def _totals(self) -> Counter[str]:
        """Return all counters of time and work so far."""
        for engine in self.engines:
            engine.count()
        return Counter(
            self.spent,
            busy=sum(engine.busy_seconds for engine in self.engines),
            requests=sum(engine.request_seconds for engine in self.engines),
            still=sum(engine.still_seconds for engine in self.engines),
            sampled=sum(engine.sampled_tokens for engine in self.engines),
            driver=self.runner.driver.busy_seconds,
            workers=sum(worker.busy_seconds for worker in self.runner.workers),
            queued=self.queued,
        )

    def _result(self, steps: int, start: float, before: Counter[str]) -> ClusterResult:
        seconds, bound = self.loop.time() - start, self.settings.mode.max_staleness
        total = self._totals()
        total.subtract(before)
        engines, workers = seconds * len(self.engines), seconds * max(1, len(self.runner.workers))
        return ClusterResult(
            settings=self.settings,
            seconds=seconds,
            steps=steps,
            tokens=sum(self.staleness.values()),
            masked_tokens=sum(n for age, n in self.staleness.items() if bound is not None and age > bound),
            staleness=self.staleness,
            engine_busy=total["busy"] / engines,
            running=total["requests"] / max(total["busy"], 1e-9),
            engine_still=total["still"] / engines,
            engine_tokens=total["sampled"],
            trainer_busy=total["trains"] / seconds,
            trainer_waiting=total["waits"] / seconds,
            trainer_pushing=total["pushes"] / seconds,
            driver_busy=total["driver"] / seconds,
            worker_busy=total["workers"] / workers,
            queue=total["queued"] / steps,
            timeline=self.timeline,
        )


def compare_modes(
    settings: ClusterSettings, max_staleness: int = 4, steps: int = 8, *, warmup: int = 3
) -> dict[str, ClusterResult]:
    """Simulate one cluster in the four modes, on the same load.

    Args:
        settings: the cluster; its mode only decides ``background_push``.
        max_staleness: bound of the two asynchronous modes.
        steps: number of measured steps.
        warmup: number of steps before them.
    """
    background = settings.mode.background_push
    named = {
        name: replace(mode, background_push=background and name != "sync")
        for name, mode in modes(max_staleness).items()
    }
    return {name: simulate(replace(settings, mode=mode), steps, warmup=warmup) for name, mode in named.items()}
