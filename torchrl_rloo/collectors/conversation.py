"""Runner of a group's conversations on an event loop, from reset to finished rows."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency, Slots
from torchrl_rloo.collectors.ledger import Lease
from torchrl_rloo.collectors.turn_source import Policy, make_turn_source
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, drop_entries, entry_of, make_tensorclass, set_entries, stack_rows
from torchrl_rloo.data.segments import SAMPLE_KEYS, first_action, sampled_versions
from torchrl_rloo.data.stop_reasons import is_done, stop_reason
from torchrl_rloo.engines.base import EngineDeadError
from torchrl_rloo.engines.occupancy import Reading
from torchrl_rloo.envs.activity import Activity, ActivityWindow, Presence, set_present
from torchrl_rloo.envs.stepping import BrokenAgentError, RowStepper, open_rows
from torchrl_rloo.runtime import event_loop

# Entries of a stepped row that belong to one turn
_TURN_KEYS = ("tokens", "masks", "log_probs", "text", "history", "next", keys.RESPONSE_TRUNCATED)
# Entries of the last turn's "next" that the finished row keeps there
_OUTCOME_KEYS = ("done", "terminated", "truncated", "stop_reason", "rewards", "raw_rewards")
_OUTCOME_KEYS += ("ref_log_probs", "token_rewards", "log_extra", keys.ROLE_RECORD[1])
# Entries that only the environment reads
_DROPPED_KEYS = (keys.MAX_NEW_TOKENS, keys.INITIAL_MAX_NEW_TOKENS, keys.STARTED, keys.TOOLS_SEEN)
_DROPPED_KEYS += (keys.DEMONSTRATION_IDS,)
_LEFT_KEYS = frozenset({*_TURN_KEYS, *_OUTCOME_KEYS, *_DROPPED_KEYS, "reward"})  # not taken from the conversation
# Entries of "next" that are not part of the state before the next turn
_SCORE_KEYS = ("reward", "rewards", "raw_rewards", "ref_log_probs")


def next_turn(row: TensorDictBase) -> TensorDictBase:
    """Return the state before the next turn: the step's ``"next"`` and the keys of the whole conversation.

    Args:
        row: one stepped row, without batch dimensions, that is not done.
    """
    return row.exclude(*_TURN_KEYS).update(row["next"].exclude(*_SCORE_KEYS))


def finish_row(row: TensorDictBase, reward: torch.Tensor, version: int) -> TensorDictBase:
    """Return a finished conversation as a row of the schema.

    Args:
        row: one row, without batch dimensions, whose ``"next"`` is done.
        reward: ``[1, 1]`` sum of the rewards of all turns.
        version: policy version at the first turn. If the policy reports versions of tokens, the oldest replaces it.
    """
    # Take outcome and tokens from the last step, whose prompt for a next turn is the whole trajectory
    end = entry_of(row, "next")
    tokens, mask, log_probs = (entry_of(end, key) for key in (keys.PROMPT_TOKENS, keys.ACTION_MASK, keys.LOG_PROBS))
    entries = dict(end.items())
    outcome = {k: entries[k] for k in _OUTCOME_KEYS if k in entries} | {"reward": reward}
    # Take everything else from the conversation
    finished = drop_entries(row, _LEFT_KEYS)
    set_entries(finished, {k: entries[k] for k in (keys.COMPLETION, keys.NUM_TURNS, *SAMPLE_KEYS) if k in entries})
    # Add the version, and the tokens with their masks and log-probs
    versions = sampled_versions(finished)
    sampled = versions is not None and len(versions)
    parts = {
        keys.POLICY_VERSION: versions.min() if sampled else torch.tensor(version),
        "tokens": make_tensorclass(Tokens, full=tokens, prompt=tokens[: first_action(mask)]),
        "masks": make_tensorclass(Masks, all_attention_mask=torch.ones_like(mask), all_assistant_mask=mask),
        "log_probs": make_tensorclass(LogProbs, full=log_probs),
        "next": TensorDict._new_unsafe(outcome, batch_size=torch.Size([])),
    }
    return set_entries(finished, parts)


_LOGGER = logging.getLogger(__name__)
_MAX_RESETS = 16  # groups reset at a time, each in a thread, since sessions may start slowly
_MAX_REPLACEMENTS = 3  # conversations that replace a failed one before it abstains

OnFailure = Literal["abstain", "replace"]
ON_FAILURE: tuple[str, ...] = get_args(OnFailure)


class RunnerSettings(NamedTuple):
    """Settings of a runner of groups, each explained at :class:`~torchrl_rloo.collectors.LLMCollector`.

    With ``eager``, turns are sampled while the loop trains.
    """

    seed: int
    eager: bool
    max_in_flight: int | AdaptiveConcurrency | None
    max_batch_size: int | None
    reward_threads: int
    max_consecutive_failures: int | None
    on_failure: OnFailure


class GroupRunner:
    """Runner of any number of concurrent groups on one event loop.

    Args:
        env: environment, adapted to the policy.
        policy: callable that takes and returns rows.
        version: function that returns the current policy version.
        settings: settings of the conversations.

    Raises:
        ValueError: if the policy and the settings cannot be combined.

    Attributes:
        source: source of the turns.
        slots: places of the conversations.
        counts: ``"collector/failed_turns"``, turns on which the policy failed; ``"collector/timed_out"``, conversations
            that the environment's ``max_seconds`` ended while they waited; ``"collector/replaced"`` and
            ``"collector/cancelled_rows"``, conversations that were replaced after a failure and cut as stragglers.
        turn_counts: number of turns by ``group_id``, until :meth:`forget`.
        ended_counts: number of ended conversations by ``group_id``, until :meth:`forget`.
        pending: number of conversations that have not ended.
        activity: record of where conversations spend their time.
    """

    def __init__(self, env: EnvBase, policy: Policy, version: Callable[[], int], settings: RunnerSettings):
        self.env, self.stepper, self.version, self.seed = env, RowStepper(env), version, settings.seed
        self.max_seconds = getattr(self.stepper.base, "max_seconds", None)
        self.max_consecutive_failures, self.on_failure = settings.max_consecutive_failures, settings.on_failure
        self.counts: Counter[str] = Counter()
        self.turn_counts: Counter[int] = Counter()
        self.ended_counts: Counter[int] = Counter()
        self.pending = 0
        self.activity = Activity()
        self._reset_slots, self._scoring_slots = (
            asyncio.Semaphore(_MAX_RESETS),
            asyncio.Semaphore(settings.reward_threads),
        )
        self._consecutive_failures = 0
        self._running: dict[int, list[_Conversation]] = {}
        self._thread_work: set[asyncio.Future] = set()  # outlives a cancelled group
        self.source = make_turn_source(
            policy, version, self.expected, eager=settings.eager, max_batch_size=settings.max_batch_size
        )
        self.slots = Slots(settings.max_in_flight, self.source.load)

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep the policy from using weights in this process within the context."""
        return self.source.exclusive()

    def take_activity(self) -> ActivityWindow:
        """Return where conversations spent their time since the last call."""
        return self.activity.take()

    def occupancies(self) -> dict[int, Reading]:
        """Return the occupancy of the engine, or of the policy, by turns of this runner."""
        return {0: self.source.occupancy.read()}

    def end_batch(self) -> None:
        """Tell the environment that the rows scored since the last call form a batch."""
        self.stepper.end_batch()

    def expected(self) -> float:
        """Return the number of conversations that hold a place or could, and have not ended."""
        return min(self.pending, self.slots.limit)

    async def run(
        self, lease: Lease, begin: Callable[[int], None], ended: Callable[[int], None] = lambda group_id: None
    ) -> list[TensorDictBase]:
        """Run a group to its end. Cancelling it cancels its turns and tools and releases its state.

        Args:
            lease: group to run.
            begin: function called with the policy version when a conversation begins.
            ended: function called with the ``group_id`` when a conversation has ended.

        Returns:
            ``G`` finished rows of the schema, in the order of the drawn rows.

        Raises:
            EngineDeadError: if the engine is dead or closed.
            RuntimeError: after ``max_consecutive_failures`` consecutive failed turns.
            Exception: raised by the environment or its transforms.
        """
        group = lease.group_id
        self.forget(group)  # counts of an earlier attempt
        conversations = [_Conversation(row, lease, i, self, begin) for i, row in enumerate(lease.rows.unbind(0))]
        self.pending += len(conversations)
        unended = set(conversations)
        try:
            for conversation, row in zip(conversations, await self._open(conversations), strict=True):
                conversation.row = row
            self._running[group] = conversations
            await _gather_or_cancel([self._run_conversation(c, unended, ended) for c in conversations])
            began = [c.presence.enter("rewards") for c in conversations][0]
            async with self._scoring_slots:
                rows = await asyncio.shield(self._run_in_thread(self._score, conversations))
            self.activity.record("rewards", [c.presence.leave() for c in conversations][0] - began)
            return rows
        finally:
            for conversation in conversations:
                conversation.presence.leave()
            if self._running.get(group) is conversations:  # otherwise the next attempt runs
                del self._running[group]
            self.pending -= len(unended)
            self.source.notify()
            # Release the state to the end, even if the group is cancelled during it
            releasing = asyncio.ensure_future(self._release([c.row for c in conversations if c.row is not None]))
            try:
                await asyncio.shield(releasing)
            except asyncio.CancelledError:
                await asyncio.wait({releasing})
                raise

    def cut_stragglers(self, group_id: int) -> None:
        """Cancel the conversations of a group that have not ended; the group then completes with them abstaining."""
        for conversation in self._running.get(group_id, ()):
            running = conversation.task is not None and not conversation.task.done()
            if running and not conversation.cut:
                conversation.cut = True
                conversation.task.cancel()

    def forget(self, group_id: int) -> None:
        """Drop the counts of a delivered or cancelled group."""
        self.turn_counts.pop(group_id, None)
        self.ended_counts.pop(group_id, None)

    async def _open(self, conversations: list[_Conversation]) -> list[TensorDictBase]:
        drawn = stack_rows([conversation.draw() for conversation in conversations])
        if not self.stepper.opens_slowly:
            return list(open_rows(self.env, drawn).unbind(0))
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
        return self._track(asyncio.ensure_future(event_loop.call_at_once(function, *args)))

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
        if not self.stepper.keeps_state:
            return
        for outcome in await asyncio.gather(*map(self.stepper.release, rows), return_exceptions=True):
            if isinstance(outcome, Exception):
                _LOGGER.error("releasing the state of a conversation failed", exc_info=outcome)

    async def _run_conversation(
        self, conversation: _Conversation, unended: set[_Conversation], ended: Callable[[int], None]
    ) -> None:
        """Run a conversation to its end, or to the cut of a straggler."""
        conversation.task = asyncio.current_task()
        set_present(conversation.presence)
        try:
            await self._converse(conversation)
        except asyncio.CancelledError:
            if not conversation.cut:
                raise
            self.counts["collector/cancelled_rows"] += 1
            self._truncate(conversation, "cancelled")
        conversation.presence.enter("group")
        self.ended_counts[conversation.group_id] += 1
        unended.discard(conversation)
        self.pending -= 1
        self.source.notify()
        ended(conversation.group_id)

    async def _converse(self, conversation: _Conversation) -> None:
        """Run one conversation to its end once a place is free, and its replacements after failures."""
        conversation.presence.enter("place")
        async with self.slots:
            conversation.presence.enter("environment")
            for replacement in range(_MAX_REPLACEMENTS + 1):
                await self._take_turns_in_time(conversation)
                failed = stop_reason(conversation.row["next"]) == "failed"
                if self.on_failure == "abstain" or not failed or replacement == _MAX_REPLACEMENTS:
                    return
                self.counts["collector/replaced"] += 1
                conversation.presence.enter("environment")
                await self._release([conversation.row])
                conversation.replace()
                (conversation.row,) = await self._open([conversation])

    async def _take_turns_in_time(self, conversation: _Conversation) -> None:
        conversation.start(self.version())
        turns = self._take_turns(conversation)
        if self.max_seconds is None or self.stepper.player is not None:  # the latter keeps the time itself
            await turns
        elif not await _finish_within(self.max_seconds, turns):
            self.counts["collector/timed_out"] += 1
            self._truncate(conversation, "time")

    async def _take_turns(self, conversation: _Conversation) -> None:
        if is_done(conversation.row):  # the prompt leaves the policy no turn
            self._truncate(conversation, stop_reason(conversation.row))
            return
        presence, record, player = conversation.presence, self.activity.record, self.stepper.player

        answered = 0.0

        async def sample(row: TensorDictBase) -> TensorDictBase:
            nonlocal answered
            began = presence.enter("engine")
            try:
                return await self.source.turn(row, conversation.order)
            finally:
                answered = presence.enter("environment")
                record("engine", answered - began)

        while True:
            try:
                row = await (sample(conversation.row) if player is None else player.play(conversation.row, sample))
            except (EngineDeadError, BrokenAgentError):
                raise
            except Exception as error:
                if getattr(getattr(self.source.policy, "engine", None), "closed", False):
                    raise EngineDeadError(f"the policy's engine is closed: {error}") from error
                self._fail(conversation, error)
                return
            self._consecutive_failures, conversation.row = 0, row
            if player is None:
                await self.stepper.step(row)
                record("environment", presence.enter("environment") - answered)
            self.turn_counts[conversation.group_id] += 1 if player is None else int(row["next", keys.NUM_TURNS])
            if is_done(entry_of(row, "next")):
                return
            conversation.reward += row[keys.REWARD]
            conversation.row = next_turn(row)

    def _fail(self, conversation: _Conversation, error: Exception) -> None:
        self.counts["collector/failed_turns"] += 1
        self._consecutive_failures += 1
        if self._consecutive_failures == self.max_consecutive_failures:
            self._consecutive_failures = 0  # another collect has as many again
            raise RuntimeError(
                f"the policy failed on {self.max_consecutive_failures} consecutive turns, the last with "
                f"{type(error).__name__}: {error}; fix the policy, or raise "
                f"max_consecutive_failures={self.max_consecutive_failures} (None disables the limit)"
            ) from error
        _LOGGER.warning("the policy failed on a turn; its conversation is truncated there", exc_info=error)
        self._truncate(conversation, "failed")

    def _truncate(self, conversation: _Conversation, reason: str) -> None:
        row = copy_row(conversation.row)
        if hasattr(self.source.policy, "set_empty_outputs"):
            self.source.policy.set_empty_outputs(row)
        conversation.row = self.stepper.truncate(row, reason)

    def _score(self, conversations: list[_Conversation]) -> list[TensorDictBase]:
        self.stepper.finish([conversation.row for conversation in conversations])
        return [conversation.finish() for conversation in conversations]


class _Conversation:
    """One conversation: its current row, accumulated reward and policy version."""

    def __init__(
        self, drawn: TensorDictBase, lease: Lease, member: int, runner: GroupRunner, begin: Callable[[int], None]
    ):
        self.drawn, self.group_id, self.order = drawn, lease.group_id, (lease.group_id, member)
        self.row: TensorDictBase | None = None
        self.reward, self.version, self.begin = torch.zeros(1, 1), runner.version(), begin
        self.task: asyncio.Task | None = None
        self.presence = Presence(runner.activity)
        self.presence.enter("environment")  # until its reset
        self.cut = self.seeded = False
        self._is_played = runner.stepper.player is not None
        self._seed, self._attempt, self._replacements = runner.seed, lease.attempt, 0

    def draw(self) -> TensorDictBase:
        """Return the row to open, with ids that no other conversation has."""
        row, numbers = copy_row(self.drawn), (*self.order, self._replacements)
        number = _hash("trajectory", self._seed, *numbers, self._attempt)
        return set_entries(row, {keys.TRAJECTORY_ID: torch.tensor(number)})

    def replace(self) -> None:
        """Prepare for another conversation in place of this one, which failed."""
        self._replacements += 1
        self.reward = torch.zeros(1, 1)

    def start(self, version: int) -> None:
        """Record the version, the seed and the time of the first turn."""
        self.version = version
        self.begin(version)
        # Give the conversation a seed, so that its samples do not depend on the batch; another attempt repeats them
        if keys.SEED not in self.row.keys():
            self.seeded = True
            numbers = self.order if not self._replacements else (*self.order, self._replacements)
            set_entries(self.row, {keys.SEED: torch.tensor(_hash(self._seed, *numbers))})
        if keys.STARTED in self.row.keys():
            self.row.set(keys.STARTED, torch.tensor(time.monotonic(), dtype=torch.float64))

    def finish(self) -> TensorDictBase:
        """Return the finished row."""
        # An agent records versions; TorchRL's PolicyVersion transform does not know of updates
        recorded = entry_of(self.row, keys.POLICY_VERSION) if self._is_played else None
        version = self.version if recorded is None else int(recorded)
        row = finish_row(self.row, self.reward + entry_of(self.row, keys.REWARD), version)
        return row.del_(keys.SEED) if self.seeded else row


def _hash(*values: int | str) -> int:
    """Hash values to a number below ``2**62``."""
    digest = hashlib.blake2b(repr(values).encode(), digest_size=8).digest()
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
