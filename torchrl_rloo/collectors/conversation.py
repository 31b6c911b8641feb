"""Runner of a group's conversations on an event loop, from reset to finished rows."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.finishing import finish_row, next_turn
from torchrl_rloo.collectors.turn_source import TurnSource
from torchrl_rloo.data import keys
from torchrl_rloo.engines.base import EngineDeadError
from torchrl_rloo.envs import event_loop
from torchrl_rloo.envs.stepping import RowStepper, open_rows

_LOGGER = logging.getLogger(__name__)
_MAX_RESETS = 16  # groups reset at a time, each in a thread, since sessions may start slowly


class GroupRunner:
    """Runner of any number of concurrent groups on the loop of :mod:`torchrl_rloo.envs.event_loop`.

    Args:
        env: environment, see :class:`AsyncLLMCollector`.
        source: source of the turns.
        version: function that returns the current policy version.
        seed: seed from which the conversations' seeds are derived.
        max_in_flight: maximum number of concurrent conversations; None disables the limit.
        reward_threads: number of groups scored at a time.
        max_consecutive_failures: number of consecutive failed turns that stops collection; None disables the limit.

    Attributes:
        counts: ``"collector/failed_turns"``, turns on which the policy failed, and ``"collector/timed_out"``,
            conversations that the environment's ``max_seconds`` ended while they waited.
        turn_counts: number of turns by ``group_id``, until :meth:`forget`.
        ended_counts: number of ended conversations by ``group_id``, until :meth:`forget`.

    Example::

        source = make_turn_source(policy, version)
        runner = GroupRunner(env, source, version, seed=0, max_in_flight=None, reward_threads=1,
                             max_consecutive_failures=None)
        rows = event_loop.run(runner.run(primer.draw_groups(1)[0]))  # one finished row per member of the group
    """

    def __init__(
        self,
        env: EnvBase,
        source: TurnSource,
        version: Callable[[], int],
        *,
        seed: int,
        max_in_flight: int | None,
        reward_threads: int,
        max_consecutive_failures: int | None,
    ):
        self.env, self.source, self.stepper, self.version, self.seed = env, source, RowStepper(env), version, seed
        self.max_seconds = getattr(self.stepper.base, "max_seconds", None)
        self.max_consecutive_failures = max_consecutive_failures
        self.counts: Counter[str] = Counter()
        self.turn_counts: Counter[int] = Counter()
        self.ended_counts: Counter[int] = Counter()
        self._conversation_slots = nullcontext() if max_in_flight is None else asyncio.Semaphore(max_in_flight)
        self._reset_slots, self._scoring_slots = asyncio.Semaphore(_MAX_RESETS), asyncio.Semaphore(reward_threads)
        self._consecutive_failures = 0
        self._thread_work: set[asyncio.Future] = set()  # outlives a cancelled group

    async def run(self, drawn: TensorDictBase) -> list[TensorDictBase]:
        """Run a group to its end. Cancelling it cancels its turns and tools and releases its state.

        Args:
            drawn: ``[G]`` rows of one group, from the primer.

        Returns:
            ``G`` finished rows of the schema, in the same order.

        Raises:
            EngineDeadError: if the engine died and cannot be restarted.
            RuntimeError: after ``max_consecutive_failures`` consecutive failed turns.
            Exception: raised by the environment or its transforms.
        """
        group_id = int(drawn[0][keys.GROUP_ID])
        conversations = [_Conversation(row, group_id, i, self) for i, row in enumerate(await self._open(drawn))]
        try:
            await _gather_or_cancel([self._converse(conversation) for conversation in conversations])
            async with self._scoring_slots:
                return await asyncio.shield(self._run_in_thread(self._score, conversations))
        finally:
            # Release the state to the end, even if the group is cancelled during it
            releasing = asyncio.ensure_future(self._release([conversation.row for conversation in conversations]))
            try:
                await asyncio.shield(releasing)
            except asyncio.CancelledError:
                await asyncio.wait({releasing})
                raise

    def forget(self, group_id: int) -> None:
        """Drop the counts of a delivered or cancelled group."""
        self.turn_counts.pop(group_id, None)
        self.ended_counts.pop(group_id, None)

    async def _open(self, drawn: TensorDictBase) -> list[TensorDictBase]:
        async with self._reset_slots:
            opening = self._run_in_thread(open_rows, self.env, drawn)
            try:
                return list((await asyncio.shield(opening)).unbind(0))
            except asyncio.CancelledError:
                opening.add_done_callback(self._release_opened)
                raise

    def _release_opened(self, opening: asyncio.Future) -> None:
        """Release the state that a reset acquired after its group was cancelled."""
        if not opening.cancelled() and opening.exception() is None:
            self._track(asyncio.ensure_future(self._release(opening.result().unbind(0))))

    def _run_in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future:
        return self._track(asyncio.ensure_future(event_loop.call(function, *args)))

    def _track(self, work: asyncio.Future) -> asyncio.Future:
        self._thread_work.add(work)
        work.add_done_callback(self._thread_work.discard)
        return work

    async def settle(self, seconds: float) -> None:
        """Wait at most ``seconds`` for resets and scoring of cancelled groups, which continue in their threads."""
        deadline = time.monotonic() + seconds
        while self._thread_work and (remaining := deadline - time.monotonic()) > 0:
            await asyncio.wait(set(self._thread_work), timeout=remaining)

    async def _release(self, rows: list[TensorDictBase]) -> None:
        for outcome in await asyncio.gather(*map(self.stepper.release, rows), return_exceptions=True):
            if isinstance(outcome, Exception):
                _LOGGER.error("releasing the state of a conversation failed", exc_info=outcome)

    async def _converse(self, conversation: _Conversation) -> None:
        """Run one conversation to its end, once a slot is free."""
        async with self._conversation_slots:
            conversation.start(self.version())
            turns = self._take_turns(conversation)
            if self.max_seconds is None:
                await turns
            elif not await _finish_within(self.max_seconds, turns):
                self.counts["collector/timed_out"] += 1
                self._truncate(conversation, "time")
        self.ended_counts[conversation.group_id] += 1

    async def _take_turns(self, conversation: _Conversation) -> None:
        while True:
            try:
                row = await self.source.turn(conversation.row)
            except EngineDeadError:
                raise
            except Exception as error:
                self._fail(conversation, error)
                return
            self._consecutive_failures, conversation.row = 0, row
            await self.stepper.step(row)
            self.turn_counts[conversation.group_id] += 1
            if row[keys.DONE].any():
                return
            conversation.reward += row[keys.REWARD]
            conversation.row = next_turn(row)

    def _fail(self, conversation: _Conversation, error: Exception) -> None:
        self.counts["collector/failed_turns"] += 1
        self._consecutive_failures += 1
        if self._consecutive_failures == self.max_consecutive_failures:
            raise RuntimeError(
                f"the policy failed on {self._consecutive_failures} consecutive turns, the last with "
                f"{type(error).__name__}: {error}; fix the policy, or raise "
                f"max_consecutive_failures={self.max_consecutive_failures} (None disables the limit)"
            ) from error
        _LOGGER.warning("the policy failed on a turn; its conversation is truncated there", exc_info=error)
        self._truncate(conversation, "failed")

    def _truncate(self, conversation: _Conversation, reason: str) -> None:
        row = conversation.row.copy()
        if hasattr(self.source.policy, "set_empty_outputs"):
            self.source.policy.set_empty_outputs(row)
        conversation.row = self.stepper.truncate(row, reason)

    def _score(self, conversations: list[_Conversation]) -> list[TensorDictBase]:
        self.stepper.finish([conversation.row for conversation in conversations])
        return [conversation.finish() for conversation in conversations]


class _Conversation:
    """One conversation: its current row, accumulated reward and policy version."""

    def __init__(self, row: TensorDictBase, group_id: int, member: int, runner: GroupRunner):
        self.row, self.group_id, self.reward, self.version = row, group_id, torch.zeros(1, 1), runner.version()
        self.seeded = keys.SEED not in row.keys()
        # Give the conversation a seed, so that its samples do not depend on the batch
        if self.seeded:
            row.set(keys.SEED, torch.tensor(_seed(runner.seed, group_id, member)))

    def start(self, version: int) -> None:
        """Record the version and the time of the first turn."""
        self.version = version
        if keys.STARTED in self.row.keys():
            self.row.set(keys.STARTED, torch.tensor(time.time(), dtype=torch.float64))

    def finish(self) -> TensorDictBase:
        """Return the finished row."""
        recorded = self.row.get(keys.POLICY_VERSION, None)
        version = self.version if recorded is None else int(recorded)
        row = finish_row(self.row, self.reward + self.row[keys.REWARD], version)
        return row.exclude(keys.SEED) if self.seeded else row


def _seed(*numbers: int) -> int:
    """Hash numbers to a seed below ``2**62``."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


async def _gather_or_cancel(coroutines: list[Coroutine[Any, Any, None]]) -> None:
    """Await all coroutines. After a failure or a cancellation, cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        if not all(task.done() for task in tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _finish_within(seconds: float, coroutine: Coroutine[Any, Any, None]) -> bool:
    """Return whether a coroutine ended in time; cancel it otherwise."""
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        return False
    task.result()
    return True
