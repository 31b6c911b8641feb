"""Simulation of a cluster: the real ledger and scheduler in virtual time, over simulated engines and a trainer.

    python benchmarks/simulate_cluster.py                        # four modes on one heavy-tailed load
    python benchmarks/simulate_cluster.py --run outputs/x        # a forecast of a measured run of rloo

All running requests of an engine sample equally fast, and a prompt stops sampling while it is read. Nothing fails. The
second command needs a run with ``rollouts.path``. It takes speeds from the first half of the steps and lengths from
stored rows. Then it compares the simulated seconds of the second half with the measured ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import selectors
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf, ulp
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from common import print_result, print_table

from torchrl_rloo.collectors.concurrency import Slots
from torchrl_rloo.collectors.ledger import GroupLedger, Lease
from torchrl_rloo.collectors.scheduler import GroupScheduler
from torchrl_rloo.collectors.staleness import OnStale
from torchrl_rloo.data import keys

InFlight = Literal["finish", "continue"]
_ROUNDING = 1e-6  # seconds by which a request may end early, above the rounding of the clock
_Z99 = 2.3263478740408408  # 99 % quantile of the normal distribution


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that never sleeps: its clock starts at 0 s and jumps from timer to timer."""

    def __init__(self):
        self._now = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError(f"after {self._now:.1f} simulated s everything waits and no timer is left")
        self._now += seconds
        # A timer is due if it is earlier than the clock plus its resolution
        self._clock_resolution = max(1e-9, 2 * ulp(self._now))


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], None]):
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list:
        """Skip the time-out instead of waiting for it."""
        self._jump(timeout)
        return []


# The load


@dataclass(frozen=True)
class Distribution:
    """Distribution of a positive quantity: constant, or lognormal if ``p99`` is given; cut at ``maximum``."""

    mean: float
    p99: float | None = None
    maximum: float = inf

    def sample(self, random: Random) -> float:
        """Draw a value."""
        if self.p99 is None:
            return min(self.mean, self.maximum)
        # p99 / mean = exp(z s - s^2 / 2)
        sigma = _Z99 - math.sqrt(max(0.0, _Z99**2 - 2 * math.log(self.p99 / self.mean)))
        return min(random.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma), self.maximum)


class Turn(NamedTuple):
    """Turn of a simulated conversation: tokens to read, tokens in the cache before, tokens to sample, and its tool."""

    prefill: float
    context: float
    tokens: float
    tool_seconds: float


Load = Callable[[int, int], list[Turn]]  # from the ids of a group and of its member to a conversation


def drawn_load(tokens: Distribution, prompt: Distribution, seed: int = 0) -> Load:
    """Return conversations of one turn, drawn by their ids."""

    def conversation(group_id: int, member: int) -> list[Turn]:
        length = prompt.sample(Random(f"{seed} {group_id}"))
        count = max(1.0, round(tokens.sample(Random(f"{seed} {group_id} {member}"))))
        return [Turn(length if member == 0 else 0.0, length, count, 0.0)]  # members of a group read their prompt once

    return conversation


# The cluster


@dataclass(frozen=True)
class EngineSpeed:
    """Tokens per second of a single request, of all together at most, and of reading; the most running requests."""

    single_stream: float
    saturated: float = inf
    prefill: float = inf
    max_running: int = 1024


@dataclass(frozen=True)
class Mode:
    """Relation of sampling and training: arguments of the collector, and treatment of requests by a weight update."""

    max_staleness: int | None = 0
    on_stale: OnStale = "mask"
    in_flight: InFlight = "finish"


def modes(max_staleness: int = 4) -> dict[str, Mode]:
    """Return the four modes by name, from on-policy to fully asynchronous."""
    return {
        "sync": Mode(),
        "one-step-off": Mode(1, "wait"),
        "async": Mode(max_staleness),
        "partial": Mode(max_staleness, in_flight="continue"),
    }


@dataclass(frozen=True)
class ClusterSettings:
    """Cluster and its run. A step trains for ``train_seconds`` and its rows' tokens at ``train_rate``."""

    load: Load
    engines: int
    speed: EngineSpeed
    groups_per_batch: int
    group_size: int
    train_seconds: float = 0.0
    train_rate: float = inf
    still_seconds: float = 0.0  # time in which an engine stands still to put new weights in use
    commit_at_once: int | None = None  # engines that do so at a time; None takes all
    mode: Mode = Mode()
    max_in_flight: int | None = None  # conversations at a time; None disables the limit


# Engines


class SimulatedEngine:
    """Engine whose running requests each sample equally many tokens per second. Create it on the event loop.

    The engine keeps one progress: the tokens that a request sampled had it run from the start. A request ends once the
    progress has grown by its tokens, so no event per token is needed.
    """

    def __init__(self, speed: EngineSpeed):
        self.speed, self.version, self.running, self.paused, self.busy_seconds = speed, 0, 0, False, 0.0
        self._loop = asyncio.get_running_loop()
        self._progress = self._debt = 0.0  # debt: seconds of prefill before sampling continues
        self._counted_at = self._loop.time()
        self._admits = True
        self._waiting: deque[tuple[Turn, asyncio.Future]] = deque()
        self._ends: list[tuple[float, int, float, asyncio.Future]] = []  # heap: end, number, start, both in progress
        self._marks = [(0.0, 0)]  # progress at which each version began
        self._timer: asyncio.TimerHandle | None = None
        self._begun = 0
        self._drained = asyncio.Event()

    async def sample(self, turn: Turn) -> list[tuple[int, int]]:
        """Sample a turn, and return pairs of a version and the number of tokens that it sampled."""
        done = self._loop.create_future()
        self._waiting.append((turn, done))
        if not self.paused:
            self.count()
            self._advance()
        return await done

    def count(self) -> None:
        """Count the time since the last change, and let the running requests sample in it."""
        now = self._loop.time()
        seconds, self._counted_at = now - self._counted_at, now
        if self.running and not self.paused:
            self.busy_seconds += seconds
            read = min(seconds, self._debt)
            self._debt -= read
            self._progress += (seconds - read) * self._rate_of_one()

    def _rate_of_one(self) -> float:
        return min(self.speed.single_stream, self.speed.saturated / self.running)

    def _advance(self) -> None:
        """End and begin requests that are due, and set the timer. The time must have been counted."""
        due = self._progress + (_ROUNDING * self._rate_of_one() if self.running else 0.0)
        while self._ends and self._ends[0][0] <= due:
            end, _, start, done = heappop(self._ends)
            self.running -= 1
            done.set_result(self._versions(start, end))
        while self._waiting and self._admits and self.running < self.speed.max_running:
            turn, done = self._waiting.popleft()
            self.running += 1
            self._begun += 1
            self._debt += turn.prefill / self.speed.prefill
            heappush(self._ends, (self._progress + turn.tokens, self._begun, self._progress, done))
        if self.running:
            self._set_timer()
        else:
            self._debt = 0.0
            self._drained.set()

    def _set_timer(self) -> None:
        """Let the timer fire at the next end or earlier; an early one sets itself again."""
        due = self._counted_at + self._debt + max(0.0, self._ends[0][0] - self._progress) / self._rate_of_one()
        if self._timer is None or self._timer.when() > due:
            self._stop_timer()
            self._timer = self._loop.call_at(due, self._fire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self.count()
        self._advance()

    def _versions(self, start: float, end: float) -> list[tuple[int, int]]:
        """Return the versions of a request that ends now, by the progress at which each began."""
        pairs = []
        for began, version in reversed(self._marks):
            if tokens := round(end - max(began, start)):
                pairs.append((version, tokens))
            if began <= start:
                break
            end = began
        return pairs[::-1]

    async def update(self, version: int, seconds: float, in_flight: InFlight) -> None:
        """Use a new version after ``seconds``; running requests finish before, or continue after."""
        if in_flight == "finish":
            self._admits = False
            while self.running:
                self._drained.clear()
                await self._drained.wait()
        self.count()
        self.paused = True
        self._stop_timer()
        await asyncio.sleep(seconds)
        self.count()
        self.paused, self._admits, self.version = False, True, version
        self._marks.append((self._progress, version))
        self._advance()


# Groups, in place of the primer and the runner of the real collector


class SimulatedPrimer:
    """Endless source of draws, for a ledger without a dataset."""

    first_group_id = num_requeued = 0

    def __init__(self):
        self.next_group_id = 0

    def remaining(self) -> float:
        """Return infinity."""
        return inf

    @contextmanager
    def requeue_on_error(self) -> Iterator[None]:
        """Do nothing: these draws do not fail."""
        yield

    def draw_groups(self, groups: int) -> list[list[dict[str, int]]]:
        """Return one row per draw, with the ids that the ledger reads."""
        first, self.next_group_id = self.next_group_id, self.next_group_id + groups
        return [[{keys.GROUP_ID: i, keys.PROMPT_ID: i}] for i in range(first, self.next_group_id)]

    def make_group(self, prompt_id: int, group_id: int) -> None:
        """Return nothing, since simulated conversations depend on their ids alone."""


class SimulatedRunner:
    """Runner of groups in virtual time, with the interface that :class:`GroupScheduler` uses.

    Finished rows hold ``keys.VERSION_COUNTS`` and ``keys.TOKEN_COUNT``, as the metadata of real rows do.
    """

    def __init__(self, settings: ClusterSettings, engines: Sequence[SimulatedEngine], version: Callable[[], int]):
        self.load, self.group_size, self.version = settings.load, settings.group_size, version
        self.engines, self.loads = engines, [0] * len(engines)
        self.slots = Slots(settings.max_in_flight)
        self.ended_counts: Counter[int] = Counter()

    async def run(
        self, lease: Lease, begin: Callable[[int], None], ended: Callable[[int], None]
    ) -> list[dict[Any, torch.Tensor]]:
        """Run the conversations of a group to their end, and return their rows."""
        group = lease.group_id
        self.forget(group)
        # Rotate the members, so that no engine gets all first ones, which read the prompts
        members = [(group + place) % self.group_size for place in range(self.group_size)]
        return await asyncio.gather(*(self._run_conversation(group, member, begin, ended) for member in members))

    async def _run_conversation(
        self, group: int, member: int, begin: Callable[[int], None], ended: Callable[[int], None]
    ) -> dict[Any, torch.Tensor]:
        versions: Counter[int] = Counter()
        async with self.slots:
            begin(self.version())
            engine = self.loads.index(min(self.loads))  # a conversation stays on its engine
            for turn in self.load(group, member):
                self.loads[engine] += 1
                versions.update(dict(await self.engines[engine].sample(turn)))
                self.loads[engine] -= 1
                await asyncio.sleep(turn.tool_seconds)
        self.ended_counts[group] += 1
        ended(group)
        counts = torch.tensor(sorted(versions.items()), dtype=torch.int64).reshape(-1, 2)
        return {keys.VERSION_COUNTS: counts, keys.TOKEN_COUNT: torch.tensor(round(turn.context + turn.tokens))}

    def forget(self, group_id: int) -> None:
        """Drop the counts of a delivered or cancelled group."""
        self.ended_counts.pop(group_id, None)

    async def settle(self, seconds: float) -> None:
        """Return at once, since no thread works for a simulated group."""


# The simulation


@dataclass(frozen=True)
class ClusterResult:
    """Result of a simulation, over the steps after its warm-up."""

    seconds: float
    steps: int
    staleness: Counter[int]  # tokens by their staleness at delivery
    engine_busy: float  # share of the time in which an engine has a running request, over all engines
    trainer_busy: float  # share in which the trainer trains


def simulate(settings: ClusterSettings, steps: int = 8, *, warmup: int = 3) -> ClusterResult:
    """Run a cluster in virtual time, and measure ``steps`` steps after ``warmup`` ones."""

    async def run() -> ClusterResult:
        cluster = _Cluster(settings)
        start = busy = trained = 0.0
        for step in range(warmup + steps):
            if step == warmup:
                cluster.staleness.clear()
                start, busy, trained = cluster.loop.time(), cluster.busy_seconds(), cluster.train_seconds
            await cluster.step()
        seconds = cluster.loop.time() - start
        engines = (cluster.busy_seconds() - busy) / seconds / settings.engines
        return ClusterResult(seconds, steps, cluster.staleness, engines, (cluster.train_seconds - trained) / seconds)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


class _Cluster:
    """Parts of a running simulation."""

    def __init__(self, settings: ClusterSettings):
        self.settings, self.version, self.train_seconds = settings, 0, 0.0
        self.loop = asyncio.get_running_loop()
        self.engines = [SimulatedEngine(settings.speed) for _ in range(settings.engines)]
        self.ledger = GroupLedger(SimulatedPrimer())
        self.staleness: Counter[int] = Counter()
        runner = SimulatedRunner(settings, self.engines, lambda: self.version)
        self.scheduler = GroupScheduler(
            self.ledger,
            runner,
            lambda: self.version,
            per_batch=settings.groups_per_batch,
            max_staleness=settings.mode.max_staleness,
            on_stale=settings.mode.on_stale,
            ahead=0,
            min_members=None,
        )

    async def step(self) -> None:
        """Collect, train and update the weights, as a user's loop does."""
        batch = await self.scheduler.next_batch()
        self.ledger.settle(batch.group_ids)
        self.ledger.acknowledge()
        self.scheduler.has_delivered = True
        for row in batch.rows:
            for version, tokens in row[keys.VERSION_COUNTS].tolist():
                self.staleness[max(0, self.version - version)] += tokens
        tokens = sum(int(row[keys.TOKEN_COUNT]) for row in batch.rows)
        seconds = self.settings.train_seconds + tokens / self.settings.train_rate
        self.train_seconds += seconds
        await asyncio.sleep(seconds)
        places = asyncio.Semaphore(self.settings.commit_at_once or self.settings.engines)

        async def commit(engine: SimulatedEngine) -> None:
            async with places:
                await engine.update(self.version + 1, self.settings.still_seconds, self.settings.mode.in_flight)

        await asyncio.gather(*map(commit, self.engines))
        self.version += 1
        self.scheduler.admit_ahead()

    def busy_seconds(self) -> float:
        """Return the seconds in which engines had a running request so far."""
        for engine in self.engines:
            engine.count()
        return sum(engine.busy_seconds for engine in self.engines)


# Commands


def compare_modes(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulate answers of 3,000 tokens on average and 16,384 at most in the four modes."""
    load = drawn_load(Distribution(3000.0, p99=16_384.0, maximum=16_384.0), Distribution(512.0))
    speed = EngineSpeed(60.0, 2500.0, prefill=3e4)
    cluster = ClusterSettings(load, args.engines, speed, 64, 16, train_rate=5e5, still_seconds=0.8)
    table: list[dict[str, Any]] = []
    for name, mode in modes(args.staleness).items():
        result = simulate(replace(cluster, mode=mode), args.steps)
        total, masked = result.staleness.total(), sum(n for age, n in result.staleness.items() if age > args.staleness)
        speeds = {"steps/h": 3600 * result.steps / result.seconds, "tokens/s": (total - masked) / result.seconds}
        speeds["speed"] = speeds["tokens/s"] / (table[0]["tokens/s"] if table else speeds["tokens/s"])
        shares = {"engines busy": result.engine_busy, "trainer busy": result.trainer_busy, "masked": masked / total}
        age = sum(age * n for age, n in result.staleness.items()) / total
        table.append({"mode": name} | speeds | shares | {"mean staleness": age})
    return table


def forecast(directory: Path) -> list[dict[str, Any]]:
    """Take the speeds of a run from the first half of its steps, and forecast the seconds of the second half."""
    from torchrl_rloo.replay import RolloutFiles

    # Read the times and the lengths of each step
    settings = json.loads((directory / "settings.json").read_text())
    lines = map(json.loads, (directory / "timings.jsonl").read_text().splitlines())
    times = {line["step"]: line for line in lines if line["step"] > 0}
    groups: dict[int, list[list[tuple[int, int]]]] = {}
    files = RolloutFiles(settings["rollouts"]["path"])
    for file in files.files():
        for rows in files.read(file).values():
            lengths = [(len(row[keys.PROMPT_TOKENS]), int(row[keys.ACTION_MASK].sum())) for row in rows.unbind(0)]
            groups.setdefault(file.step, []).append(lengths)
    steps = sorted(groups)
    first, second = steps[: len(steps) // 2], steps[len(steps) // 2 :]

    later = [group for step in second for group in groups[step]]

    def conversation(group_id: int, member: int) -> list[Turn]:
        prompt, sampled = later[group_id % len(later)][member]
        return [Turn(prompt if member == 0 else 0.0, prompt, sampled, 0.0)]

    # A batch of the Transformers sampler takes as long as its longest row
    longest = sum(max(sampled for group in groups[step] for _, sampled in group) for step in first)
    single = longest / sum(times[step]["time/collect"] for step in first)
    tokens = sum(prompt + sampled for step in first for group in groups[step] for prompt, sampled in group)
    train = tokens / sum(times[step]["time/train"] + times[step]["time/sync"] for step in first)
    size, members = len(groups[second[0]]), len(later[0])
    cluster = ClusterSettings(conversation, 1, EngineSpeed(single), size, members, train_rate=train)
    simulated = simulate(cluster, len(second), warmup=0).seconds
    measured = sum(times[step][f"time/{part}"] for step in second for part in ("collect", "train", "sync"))
    return [{"steps": len(second), "measured s": measured, "simulated s": simulated, "ratio": measured / simulated}]


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, metavar="DIR", help="directory of a finished run with stored rows")
    parser.add_argument("--engines", type=int, default=96)
    parser.add_argument("--staleness", type=int, default=4, help="bound of the asynchronous modes")
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after three others")
    args = parser.parse_args()
    table = compare_modes(args) if args.run is None else forecast(args.run)
    print_table("Four modes on one heavy-tailed load" if args.run is None else "Second half of a measured run", table)
    print_result(table)


if __name__ == "__main__":
    main()
