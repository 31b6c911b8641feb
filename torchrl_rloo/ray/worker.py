"""RolloutWorker: an actor that runs leased groups with its own environment, tools and policy, and counts them."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.conversation import GroupRunner, RunnerSettings
from torchrl_rloo.collectors.ledger import Lease
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines import EnginePool
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.envs.activity import ActivityWindow
from torchrl_rloo.envs.stepping import adapt_to_policy, transforms_of

Policy = Callable[[TensorDictBase], TensorDictBase]
Counts = dict[tuple[int, str], int]  # numbers since the start, by index of the part and name


class PackedLease(NamedTuple):
    """Lease on its way to a worker."""

    group_id: int
    attempt: int
    rows: PackedRows


class GroupDone(NamedTuple):
    """Result of a group, followed by its rows as a second object; it has an error if it failed, else metadata."""

    group_id: int
    attempt: int
    metadata: PackedRows | None
    error: Exception | None
    turns: int
    nbytes: int  # of the tensors of its rows


class WorkerStatus(NamedTuple):
    """Answer of a worker to a heartbeat."""

    began: dict[tuple[int, int], int]  # version at which each group's first conversation began, by group and attempt
    turns: dict[int, int]  # by group
    ended: dict[int, int]  # ended conversations, by group
    counts: Counts  # part 0 is the worker's runner; the others are those of `counting_parts`
    in_flight: int  # conversations that have begun and not ended
    idle_seconds: float  # since its start, without a conversation
    reports: list[Any]  # of its engine pool about members, for the driver's pool
    resident_bytes: int
    activity: ActivityWindow  # since the last heartbeat
    occupancy: Reading  # turns inside the worker's policy since its start


class RolloutWorker:
    """Runner of groups in an actor, which makes its environment and policy with a pickled function."""

    env: EnvBase
    policy: Policy

    def __init__(self, make: bytes, settings: RunnerSettings):
        self._make, self._settings, self._version = make, settings, 0
        self._tasks: dict[tuple[int, int], asyncio.Task] = {}
        self._began: dict[tuple[int, int], int] = {}
        self._pending, self._idle_since, self._idle_seconds = 0, time.monotonic(), 0.0
        self._runner = None

    async def start(self) -> dict[str, Any]:
        """Make environment and policy, and return facts about the worker."""
        import ray
        from ray import cloudpickle

        self.env, self.policy = cloudpickle.loads(self._make)()
        adapt_to_policy(self.env, self.policy)
        self._runner = GroupRunner(self.env, self.policy, lambda: self._version, self._settings)
        self._counts = WorkerCounts([self._runner, *counting_parts(self.env)])
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    async def run(
        self, leases: Sequence[PackedLease], seed: int, version: int
    ) -> AsyncIterator[GroupDone | PackedRows | None]:
        """Run groups, and yield two objects for each as it ends: its result, and its rows.

        The caller owns these objects, so they outlive the worker.
        """
        self._version, self._runner.seed = max(version, self._version), seed
        done: asyncio.Queue[tuple[GroupDone, PackedRows | None]] = asyncio.Queue()
        # Begin all of them before the first turn, so that batches of a local policy are as large as they can be
        for packed in leases:
            lease = Lease(packed.group_id, packed.attempt, unpack_rows(packed.rows))
            self._tasks[packed[:2]] = asyncio.ensure_future(self._run_group(lease, done))
        for _ in leases:
            result, rows = await done.get()
            yield result
            yield rows

    async def _run_group(self, lease: Lease, done: asyncio.Queue) -> None:
        group, attempt, _ = lease
        key = (group, attempt)
        metadata = packed = error = None
        self._note_pending(1)
        try:
            rows = await self._runner.run(lease, lambda version: self._note_begin(key, version))
            rows = stack_rows(rows)
            packed, metadata = pack_rows(rows), pack_rows(metadata_of(rows))
        except asyncio.CancelledError:
            error = RuntimeError("the worker cancelled the group")
        except Exception as raised:
            error = portable(raised)
        finally:
            self._note_pending(-1)
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]
            self._began.pop(key, None)
            turns = self._runner.turn_counts[group]
            if not any(other == group for other, _ in self._tasks):
                self._runner.forget(group)
            nbytes = 0 if packed is None else sum(tensor.nbytes for tensor in packed.tensors.values())
            done.put_nowait((GroupDone(group, attempt, metadata, error, turns, nbytes), packed))

    def _note_begin(self, key: tuple[int, int], version: int) -> None:
        self._began[key] = min(version, self._began.get(key, version))

    def _note_pending(self, change: int) -> None:
        """Count groups, and the time without one."""
        now = time.monotonic()
        if self._pending == 0:
            self._idle_seconds += now - self._idle_since
        self._pending += change
        self._idle_since = now

    async def beat(self, version: int, states: list[Any] | None) -> WorkerStatus:
        """Take the version and the states of the engine pool's members, if they changed; return the worker's state."""
        self._version = max(version, self._version)
        engine = getattr(self.policy, "engine", None)
        pool = engine if isinstance(engine, EnginePool) and engine.follows else None
        if pool is not None and states is not None:
            pool.follow(states)
        idle = self._idle_seconds + (time.monotonic() - self._idle_since if self._pending == 0 else 0.0)
        runner = self._runner
        return WorkerStatus(
            dict(self._began),
            dict(runner.turn_counts),
            dict(runner.ended_counts),
            self._counts.read(),
            runner.pending,
            idle,
            [] if pool is None else pool.reports(),
            _resident_bytes(),
            runner.take_activity(),
            runner.source.occupancy.read(),
        )

    async def cut(self, group_id: int) -> None:
        """Cancel the conversations of a group that have not ended."""
        self._runner.cut_stragglers(group_id)

    async def cancel(self, group_id: int, attempt: int) -> None:
        """Cancel a group, and wait until its state is released."""
        if (task := self._tasks.get((group_id, attempt))) is not None:
            task.cancel()
            await asyncio.wait({task})

    async def end_batch(self) -> None:
        """Tell the environment that the rows scored since the last call form a batch."""
        self._runner.end_batch()

    async def settle(self, seconds: float) -> None:
        """Wait for resets and scoring of cancelled groups."""
        await self._runner.settle(seconds)

    async def close(self) -> Counts:
        """Cancel all groups, close the environment, and return the last counters."""
        for task in list(self._tasks.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=5.0)
        self.env.close(raise_if_closed=False)
        return self._counts.read()


def portable(error: Exception) -> Exception:
    """Return an error that the driver can unpickle: the same, or its text."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not tell it, as outside of Linux."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def counting_parts(env: EnvBase) -> list[Any]:
    """Return the environment and its transforms that have counters, in an order that all copies share."""
    return [part for part in (getattr(env, "base_env", env), *transforms_of(env)) if hasattr(part, "counts")]


class WorkerCounts:
    """Counters of the parts of a worker since its start. A copied part may start with those of the original."""

    def __init__(self, parts: Sequence[Any]):
        self._parts, self._first = parts, {}
        self._first = self.read()

    def read(self) -> Counts:
        """Return the counters that changed since the start."""
        found = {
            (index, name): number - self._first.get((index, name), 0)
            for index, part in enumerate(self._parts)
            for name, number in dict(part.counts).items()
        }
        return {key: number for key, number in found.items() if number or key[0] == 0}


def add_counts(parts: Sequence[Any], counts: Counts, counted: Mapping[tuple[int, str], int]) -> None:
    """Add what a worker counted since its last report, ``counted``, to the same parts of the driver.

    The first part takes what the driver lacks.
    """
    for (index, name), number in counts.items():
        if new := number - counted.get((index, name), 0):
            part = parts[index if index < len(parts) else 0]
            if hasattr(part, "add_counts"):
                part.add_counts({name: new})
            else:
                part.counts[name] = part.counts.get(name, 0) + new
