"""SimulatedRunner: stands in for the runner of groups under the real ledger and scheduler."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from torchrl_rloo.collectors.concurrency import Slots
from torchrl_rloo.collectors.ledger import Lease
from torchrl_rloo.data import keys
from torchrl_rloo.diagnostics.cluster_clock import Server
from torchrl_rloo.diagnostics.cluster_engine import SimulatedPool
from torchrl_rloo.diagnostics.cluster_load import Load

Row = dict[Any, torch.Tensor]


@dataclass(frozen=True)
class ProcessCosts:
    """CPU time of the processes between engines and trainer. Each process runs one piece of work at a time.

    Args:
        group_seconds: time of the driver for each group: lease, metadata, ledger and advantages.
        driver_turn_seconds: time of the driver for each turn; 0 if workers run the conversations.
        turn_seconds: time of a rollout worker for each turn.
        workers: number of rollout workers, which take groups in turn; 0 disables their cost.
    """

    group_seconds: float = 0.0
    driver_turn_seconds: float = 0.0
    turn_seconds: float = 0.0
    workers: int = 0


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

    Args:
        load: the conversations.
        group_size: conversations of a group.
        pool: engines.
        costs: CPU time of the driver and of the rollout workers.
        version: function that returns the current policy version.
        max_in_flight: largest number of conversations at a time; None disables the limit.

    Attributes:
        driver: CPU of the driver.
        workers: CPUs of the rollout workers.
        ended_counts: number of ended conversations by ``group_id``, until :meth:`forget`.
        turns: number of turns so far.
        on_end: function called with the ``group_id`` of a conversation that has ended; None calls none.
    """

    def __init__(
        self,
        load: Load,
        group_size: int,
        pool: SimulatedPool,
        costs: ProcessCosts,
        version: Callable[[], int],
        max_in_flight: int | None = None,
    ):
        self.load, self.group_size, self.pool, self.costs, self.version = load, group_size, pool, costs, version
        self.slots, self.driver, self.workers = Slots(max_in_flight), Server(), [Server() for _ in range(costs.workers)]
        self.ended_counts: Counter[int] = Counter()
        self.turns = 0
        self.on_end: Callable[[int], None] | None = None
        self._running: dict[int, list[_Conversation]] = {}

    async def run(self, lease: Lease, begin: Callable[[int], None]) -> list[Row]:
        """Run the conversations of a group to their end, and return their rows."""
        group = lease.group_id
        self.forget(group)
        conversations = self._running[group] = [_Conversation() for _ in range(self.group_size)]
        worker = self.workers[group % len(self.workers)] if self.workers else Server()
        for place, conversation in enumerate(conversations):
            member = (group + place) % self.group_size  # no engine gets all first members, which read the prompts
            running = self._run_conversation(conversation, group, member, worker, begin)
            conversation.task = asyncio.ensure_future(running)
        try:
            await asyncio.gather(*(conversation.task for conversation in conversations))
        finally:
            if self._running.get(group) is conversations:
                del self._running[group]
        await self.driver.work(self.costs.group_seconds)
        return [conversation.row() for conversation in conversations]

    async def _run_conversation(
        self, conversation: _Conversation, group: int, member: int, worker: Server, begin: Callable[[int], None]
    ) -> None:
        try:
            async with self.slots.place():
                begin(self.version())
                await self._take_turns(conversation, group, member, worker)
        except asyncio.CancelledError:
            if not conversation.cut:
                raise
        self.ended_counts[group] += 1
        if self.on_end is not None:
            self.on_end(group)

    async def _take_turns(self, conversation: _Conversation, group: int, member: int, worker: Server) -> None:
        home = None
        for turn in self.load.conversation(group, member):
            conversation.tokens = turn.context
            await worker.work(self.costs.turn_seconds)
            await self.driver.work(self.costs.driver_turn_seconds)
            home, versions = await self.pool.sample(turn, home)
            conversation.versions.update(dict(versions))
            conversation.tokens += turn.tokens
            self.turns += 1
            if turn.tool_seconds:
                await asyncio.sleep(turn.tool_seconds)

    def cut_stragglers(self, group_id: int) -> None:
        """Cancel the conversations of a group that have not ended; the group then completes without them."""
        for conversation in self._running.get(group_id, ()):
            if not conversation.task.done() and not conversation.cut:
                conversation.cut = True
                conversation.task.cancel()

    def forget(self, group_id: int) -> None:
        """Drop the counts of a delivered or cancelled group."""
        self.ended_counts.pop(group_id, None)

    async def settle(self, seconds: float) -> None:
        """Return at once, since no thread works for a simulated group."""


class _Conversation:
    __slots__ = ("cut", "task", "tokens", "versions")

    def __init__(self):
        self.task: asyncio.Task | None = None
        self.cut, self.tokens = False, 0.0
        self.versions: Counter[int] = Counter()

    def row(self) -> Row:
        pairs: Sequence[tuple[int, int]] = sorted(self.versions.items())
        counts = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        return {keys.VERSION_COUNTS: counts, keys.TOKEN_COUNT: torch.tensor(round(self.tokens))}
