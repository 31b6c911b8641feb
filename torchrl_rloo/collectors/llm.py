"""Collector of finished trajectories in whole groups, from conversations that advance independently.

It replaces TorchRL's class of the same name, which writes the version of the previous update, does not know groups and
cannot be resumed.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency, Slots
from torchrl_rloo.collectors.conversation import ON_FAILURE, GroupRunner, OnFailure
from torchrl_rloo.collectors.ledger import Group, GroupLedger, GroupState, Lease
from torchrl_rloo.collectors.loop_call import LoopCall
from torchrl_rloo.collectors.staleness import ON_STALE, OnStale, choose_groups, limit_staleness, oldest_version
from torchrl_rloo.collectors.turn_source import make_turn_source
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows, tensor_rows
from torchrl_rloo.envs.event_loop import EventLoop
from torchrl_rloo.envs.stepping import adapt_to_policy, transforms_of
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.weight_update.base import InProcessWeightUpdater, WeightSyncError, WeightUpdater

_LOGGER = logging.getLogger(__name__)
_PROGRESS_PERIOD_S = 0.2
_CANCEL_TIMEOUT_S = 10.0
_MAX_STALE_ATTEMPTS = 3  # attempts of a group before its stale tokens are masked instead
_OPEN_COLLECTORS: weakref.WeakSet[LLMCollector] = weakref.WeakSet()

_BEGUN = (GroupState.LEASED, GroupState.COMPLETE)
_UNDELIVERED = (GroupState.DRAWN, *_BEGUN)


class CollectionProgress(NamedTuple):
    """Progress of a batch.

    Attributes:
        finished: number of finished trajectories.
        total: number of trajectories of the batch.
        turns: number of dialog turns sampled for the batch.
    """

    finished: int
    total: int
    turns: int


class _Totals(NamedTuple):
    """Counters of delivered rows, and the groups that the last call of ``collect`` returned."""

    batches: int = 0
    dialog_turns: int = 0
    num_tokens: int = 0
    returned: tuple[int, ...] = ()


class _Batch(NamedTuple):
    group_ids: list[int]
    rows: list[TensorDictBase]


class LLMCollector(BaseCollector):
    """Collector that runs a policy in an environment and returns finished trajectories in whole groups.

    Each conversation advances independently: its turn is submitted as soon as it is ready, while tools, sessions and
    rewards of others run. Iterating yields batches of rows ``[B]``. The environment writes ``"group_id"`` and the
    rewards. The policy writes token ids, masks and log-probs ``[T]`` of each row. The collector adds the trajectory's
    return ``("next", "reward")`` ``[1, 1]`` and ``"policy_version"`` ``[]``. :mod:`torchrl_rloo.data.keys` lists all
    entries.

    By default nothing is sampled ahead: every batch is sampled with the weights current at :meth:`collect`, prompts
    keep their order, and the same seed gives the same rows. With ``ahead`` or ``max_staleness``, sampling continues
    while the loop trains, and groups are delivered as they complete, oldest first. The sampler, reward models and
    reference models then need weights that the optimizer does not change.

    Compared to TorchRL, ``dialog_turns_per_batch`` is a minimum, since groups stay whole. Completed trajectories are
    always yielded (``yield_completed_trajectories``) and versions always tracked (``track_policy_version``).

    Args:
        env: environment with a :class:`DataLoadingPrimer` (:class:`DatasetChatEnv`).
        policy: callable that takes and returns rows. A :class:`vLLMWrapper` over an :class:`AsyncEngine` samples each
            turn at once. Any other policy samples batches of the waiting rows
            (:mod:`torchrl_rloo.collectors.turn_source`).
        groups_per_batch: number of groups to deliver at a time; None delivers as many as one reset draws.
        dialog_turns_per_batch: minimum number of policy turns in a batch, which then has one or more times
            ``groups_per_batch`` groups; None sets no minimum.
        total_dialog_turns: number of turns after which iteration stops; -1 continues until the dataset's epochs end.
        ahead: number of groups begun in addition to the batch being delivered. It does not bound the staleness.
        max_staleness: largest policy version at delivery minus that of any trained token. A group is admitted only if
            it would be delivered in time were all groups equally long. None sets no bound.
        on_stale: treatment of groups that take longer: ``"mask"`` takes their stale tokens out of the loss, and
            ``"baseline"`` their rows with stale tokens. The rewards stay in the baseline. ``"requeue"`` samples them
            again, at most three times. ``"wait"`` holds the batch until they are complete, which leaves places idle.
        min_members: number of ended members with which a group may be delivered while :meth:`collect` waits for it. Its
            other members are cancelled and abstain. None waits for all.
        on_failure: treatment of failed conversations: ``"abstain"`` keeps their rows, without a return, and
            ``"replace"`` runs others of the same prompt in their place.
        max_in_flight: maximum number of concurrent conversations: a number, an :class:`AdaptiveConcurrency` that
            follows the engine's load, or None for no limit.
        max_batch_size: maximum number of rows in a batch of a policy that samples batches; None takes all waiting rows.
        reward_threads: number of groups scored at a time. With more than one, inline reward functions are called from
            several threads.
        max_consecutive_failures: number of consecutive failed turns that stops collection; None disables the limit.
        seed: seed from which the conversations' seeds are derived. None takes that of the policy's ``generate_kwargs``,
            or torch's initial seed. Rows that already have a ``"seed"`` keep it.
        weight_updater: sender of new weights to the policy in :meth:`update_policy_weights_`. Its ``in_flight``
            determines how an update treats running turns. None disables updates.
        sync_every: number of batches between weight updates; None leaves updates to the caller.
        max_failed_pushes: number of consecutive failed updates that raises; before, sampling continues with the old
            weights.
        replay_buffer: buffer that also receives each batch, without its text.
        postproc: function applied to each batch before delivery.
        progress: function called with a :class:`CollectionProgress` a few times a second and at the end of a batch.
        auto_acknowledge: whether the next :meth:`collect` and :meth:`state_dict` acknowledge a returned batch. With
            False, :meth:`acknowledge` must be called, and a state re-queues all other groups.
        audit: file that records every change of a group's state, see :class:`GroupLedger`; None writes none.

    Attributes:
        policy_version: version of the newest weights that reached the policy.
        batches: number of delivered batches.
        dialog_turns: number of turns in delivered rows.
        num_tokens: number of tokens in delivered rows.
        counts: counters of the collector, of :class:`~torchrl_rloo.collectors.conversation.GroupRunner` and of
            :class:`GroupLedger`: ``"collector/cancelled_groups"``, ``"staleness/masked_tokens"``,
            ``"staleness/masked_rows"``, ``"staleness/requeued_groups"`` and ``"weights/failed_pushes"``.

    Raises:
        ValueError: if an argument is out of range, or arguments cannot be combined. Also if the environment has no
            primer or cannot step single rows, or if sampling ahead shares the training model's weights.
        TypeError: if ``weight_updater`` is not a :class:`WeightUpdater`.

    Note:
        A turn on which the policy fails truncates its conversation, with the stop reason ``"failed"``, and the row
        abstains. The environment's ``max_seconds`` also ends a conversation that waits for an engine or a tool, with
        the reason ``"time"``. A dead engine without an :class:`~torchrl_rloo.engines.EnginePool` ends :meth:`collect`.

        Groups pass through a :class:`GroupLedger`. If :meth:`collect` raises or is interrupted at any instant, no group
        is lost or delivered twice, and it may be called again. A ``state_dict`` may be taken at any time: a resumed run
        first draws the groups that were begun but not delivered, under the same ids.

    Example:
        >>> from torchrl_rloo.data import load_prompts
        >>> from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
        >>> from torchrl_rloo.envs import DatasetChatEnv
        >>> from torchrl_rloo.modules import TransformersWrapper
        >>> from torchrl_rloo.rewards import boxed_accuracy
        >>> tokenizer, prompts = build_tokenizer(), load_prompts(addition_prompts("train", size=8))
        >>> env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=2, rewards=boxed_accuracy)
        >>> policy = TransformersWrapper(
        ...     build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
        ... )
        >>> collector = LLMCollector(env, policy)
        >>> rows = next(iter(collector))
        >>> rows.batch_size, rows["next", "reward"].shape
        (torch.Size([4]), torch.Size([4, 1, 1]))
        >>> collector.shutdown()
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        groups_per_batch: int | None = None,
        dialog_turns_per_batch: int | None = None,
        total_dialog_turns: int = -1,
        ahead: int = 0,
        max_staleness: int | None = None,
        on_stale: OnStale = "mask",
        min_members: int | None = None,
        on_failure: OnFailure = "abstain",
        max_in_flight: int | AdaptiveConcurrency | None = None,
        max_batch_size: int | None = None,
        reward_threads: int = 1,
        max_consecutive_failures: int | None = 100,
        seed: int | None = None,
        weight_updater: WeightUpdater | None = None,
        sync_every: int | None = None,
        max_failed_pushes: int = 3,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        progress: Callable[[CollectionProgress], None] | None = None,
        auto_acknowledge: bool = True,
        audit: str | PathLike | None = None,
    ):
        super().__init__()
        for name, value, minimum in (
            ("groups_per_batch", groups_per_batch, 1),
            ("dialog_turns_per_batch", dialog_turns_per_batch, 1),
            ("ahead", ahead, 0),
            ("max_staleness", max_staleness, 0),
            ("min_members", min_members, 1),
            ("max_in_flight", None if isinstance(max_in_flight, AdaptiveConcurrency) else max_in_flight, 1),
            ("max_batch_size", max_batch_size, 1),
            ("reward_threads", reward_threads, 1),
            ("max_consecutive_failures", max_consecutive_failures, 1),
            ("sync_every", sync_every, 1),
            ("max_failed_pushes", max_failed_pushes, 1),
        ):
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}")
        if total_dialog_turns != -1 and total_dialog_turns < 1:
            raise ValueError(f"total_dialog_turns={total_dialog_turns} must be -1 (no limit) or at least 1")
        for name, value, choices in (("on_stale", on_stale, ON_STALE), ("on_failure", on_failure, ON_FAILURE)):
            if value not in choices:
                raise ValueError(f"{name}={value!r} must be one of {list(choices)}")
        if ahead and max_staleness is not None:
            raise ValueError(f"ahead={ahead} cannot be combined with max_staleness={max_staleness}; set only one")
        if weight_updater is not None and not isinstance(weight_updater, WeightUpdater):
            raise TypeError(
                f"weight_updater={type(weight_updater).__name__} must be a torchrl_rloo.weight_update.WeightUpdater, "
                "whose pushes have a version; use WeightPublisher or InProcessWeightUpdater"
            )
        if sync_every is not None and weight_updater is None:
            raise ValueError(f"sync_every={sync_every} requires a weight_updater")
        # Sampling ahead runs during training, so the optimizer must not change the sampler's weights
        samples_ahead = bool(ahead or max_staleness)
        if samples_ahead:
            _require_separate_weights(f"ahead={ahead}" if ahead else f"max_staleness={max_staleness}", weight_updater)
        primer = _find_primer(env)
        if min_members is not None and min_members > primer.num_generations:
            raise ValueError(
                f"min_members={min_members} must be at most num_generations={primer.num_generations} of the environment"
            )
        self.env, self.policy, self.replay_buffer = env, policy, replay_buffer
        adapt_to_policy(env, policy)
        self.groups_per_batch = groups_per_batch or env.batch_size[0] // primer.num_generations
        self.dialog_turns_per_batch, self.total_dialog_turns = dialog_turns_per_batch, total_dialog_turns
        self.ahead, self.max_staleness, self.on_stale, self.min_members = ahead, max_staleness, on_stale, min_members
        self.postproc, self.progress, self.auto_acknowledge = postproc, progress, auto_acknowledge
        self._weight_updater, self.sync_every, self.max_failed_pushes = weight_updater, sync_every, max_failed_pushes
        self.policy_version, self.closed = 0, False
        # Parts: a record of the groups, their runner, the source of its turns, and the loop that they run on
        self.ledger = GroupLedger(primer, audit=audit)
        self.runner = GroupRunner(
            env,
            self._version,
            seed=_default_seed(policy) if seed is None else seed,
            reward_threads=reward_threads,
            max_consecutive_failures=max_consecutive_failures,
            on_failure=on_failure,
        )
        self.source = make_turn_source(
            policy, self._version, self.runner.expected, eager=samples_ahead, max_batch_size=max_batch_size
        )
        self.runner.source, self.runner.slots = self.source, Slots(max_in_flight, self.source.load)
        self._counts: Counter[str] = Counter()
        self._totals, self._failed_pushes, self._initialized = _Totals(), 0, False
        # State of the event loop's thread
        self._tasks: dict[int, asyncio.Task] = {}
        self._waiter: asyncio.Task | None = None  # waits for the batch of the current collect
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        if min_members is not None:
            self.runner.on_end = self._news.set  # a group may have enough members now
        self._loop = EventLoop("collector")
        self._close_loop = weakref.finalize(self, self._loop.close)
        _OPEN_COLLECTORS.add(self)
        if hasattr(policy, "register_collector"):
            policy.register_collector(self)

    batches = property(lambda self: self._totals.batches)
    dialog_turns = property(lambda self: self._totals.dialog_turns)
    num_tokens = property(lambda self: self._totals.num_tokens)

    @property
    def counts(self) -> dict[str, int]:
        """Counters of events."""
        return {**self._counts, **self.runner.counts, **self.ledger.counts}

    @property
    def weight_updater(self) -> WeightUpdater | None:
        """Sender of new weights to the policy."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: WeightUpdater | None) -> None:
        self._weight_updater = value

    def _version(self) -> int:
        return self.policy_version

    # Weights

    def initialize_policy_(self) -> None:
        """Give engines that have no weights of this process the current ones; :meth:`collect` calls it once.

        Raises:
            WeightSyncError: if the weights did not arrive.
        """
        if (updater := self._weight_updater) is not None:
            if not self._initialized:
                with self.source.exclusive():
                    updater.initialize()
            self.policy_version = updater.current_version  # also that of an update that was interrupted
        self._initialized = True

    def update_policy_weights_(self) -> None:
        """Send the training model's weights to the policy under a new version.

        A policy in this process is updated between two batches. After a failed update, sampling continues with the old
        weights, until ``max_failed_pushes`` updates in a row have failed.

        Raises:
            RuntimeError: if the collector has no ``weight_updater``.
            WeightSyncError: if too many updates in a row have failed.
        """
        updater = self._weight_updater
        if updater is None:
            raise RuntimeError("weight_updater=None; pass LLMCollector(weight_updater=...) to update weights")
        try:
            with self.source.exclusive():
                updater.push_weights()
        except WeightSyncError as error:
            self._counts["weights/failed_pushes"] += 1
            self._failed_pushes += 1
            if self._failed_pushes >= self.max_failed_pushes:
                raise
            _LOGGER.warning("sampling continues with version %d: %s", updater.current_version, error)
        else:
            self._failed_pushes, self._initialized = 0, True
        finally:
            self.policy_version = updater.current_version  # some engines may have it after a failure
        self._call_on_loop(self._admit_ahead)

    # Batches

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches of rows until ``total_dialog_turns`` is reached or the dataset's epochs end."""
        while not self.closed and (self.total_dialog_turns == -1 or self.dialog_turns < self.total_dialog_turns):
            try:
                rows = self.collect()
            except DatasetExhaustedError:
                return
            yield rows

    def collect(self) -> TensorDictBase:
        """Return one batch ``[B]`` of finished trajectories, after a weight update if one is due.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
            RuntimeError: if the collector is shut down.
        """
        if self.closed:
            raise RuntimeError("the collector is shut down; create another one")
        self._call_on_loop(self._begin_batch)
        totals = self._totals
        if self.sync_every is not None and totals.batches and totals.batches % self.sync_every == 0:
            self.update_policy_weights_()
        self.initialize_policy_()
        # Wait until there are enough turns; deliver a smaller batch at the end of the dataset
        groups, parts, turns = [], [], 0
        while not parts or turns < (self.dialog_turns_per_batch or 0):
            try:
                batch = self._wait_for_batch(len(parts), turns)
            except DatasetExhaustedError:
                if not parts:
                    raise
                break
            groups += batch.group_ids
            parts += batch.rows
            turns += sum(int(row[keys.NUM_TURNS]) for row in batch.rows)
            if self.progress is not None:
                self.progress(CollectionProgress(len(parts), len(parts), turns))
        # Count before postproc, which may drop rows
        rows = stack_rows(parts)
        tokens = totals.num_tokens + sum(map(len, ragged(rows, keys.TOKENS)))
        after = _Totals(totals.batches + 1, totals.dialog_turns + turns, tokens, tuple(groups))
        if self.postproc is not None:
            rows = self.postproc(rows)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(tensor_rows(rows))
        # One assignment delivers the batch: an interrupt before it leaves all groups in the ledger
        self._totals = after
        return rows

    def acknowledge(self, group_ids: Iterable[int] | None = None) -> int:
        """Note that a training step took returned groups, so that no state re-queues them.

        Args:
            group_ids: groups to acknowledge; None takes all returned groups.

        Returns:
            Number of groups that were acknowledged.

        Raises:
            KeyError: if a group was not returned, or was acknowledged before.
        """
        return self._call_on_loop(self._acknowledge, group_ids)

    def _acknowledge(self, group_ids: Iterable[int] | None) -> int:
        self.ledger.settle(self._totals.returned, reclaim=False)
        return self.ledger.acknowledge(group_ids)

    def _wait_for_batch(self, rows_before: int, turns_before: int) -> _Batch:
        """Wait for the next batch, and report its progress."""
        waiting = LoopCall(self._loop, self._next_batch())
        reported = None
        try:
            while True:
                with suppress(queue.Empty):
                    return waiting.result(None if self.progress is None else _PROGRESS_PERIOD_S)
                if (current := self._progress(rows_before, turns_before)) != reported:
                    reported = current
                    self.progress(current)
        except BaseException:
            waiting.cancel()
            raise

    def _progress(self, rows_before: int, turns_before: int) -> CollectionProgress:
        total = self.groups_per_batch * self.ledger.primer.num_generations
        ended, turns = (sum(list(counter.values())) for counter in (self.runner.ended_counts, self.runner.turn_counts))
        return CollectionProgress(rows_before + min(ended, total), rows_before + total, turns_before + turns)

    # On the event loop

    def _call_on_loop(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the loop's thread and wait for it, so that an interrupt cannot stop it half-way."""
        if self.closed:
            return function(*args)

        async def call() -> Any:
            return function(*args)

        return LoopCall(self._loop, call()).result()

    def _begin_batch(self) -> None:
        """Confirm the groups that the last ``collect`` returned; those of an interrupted one are complete again."""
        if self._waiter is not None:  # an interrupt left it behind
            self._waiter.cancel()
        self._settle(self._totals, reclaim=True)

    def _settle(self, totals: _Totals, *, reclaim: bool) -> None:
        self.ledger.settle(totals.returned, reclaim=reclaim)
        if self.auto_acknowledge:
            self.ledger.acknowledge()

    async def _next_batch(self) -> _Batch:
        self._waiter = asyncio.current_task()
        try:
            return await self._choose_batch()
        finally:
            if self._waiter is asyncio.current_task():
                self._waiter = None

    async def _choose_batch(self) -> _Batch:
        while True:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                await asyncio.shield(self._requeue_running())  # to the end, even if the caller is interrupted
                raise failure
            if self.closed:
                raise RuntimeError("the collector is shut down; create another one")
            self._requeue_stale()
            needed = self._admit()
            if chosen := self._choose(needed):
                return self._deliver(chosen)
            self._news.clear()
            await self._news.wait()

    async def _requeue_running(self) -> None:
        await self._stop(self._tasks.copy())
        await self.runner.settle(_CANCEL_TIMEOUT_S)
        self.ledger.requeue([group.group_id for group in self.ledger.of(GroupState.LEASED)])

    def _admit(self) -> int:
        """Begin groups in all free places, and return the number of groups in the batch."""
        per_batch = self.groups_per_batch
        free = self._free_places(per_batch * (1 + (self.max_staleness or 0)) + self.ahead)
        # Without any group the primer must be asked, since it raises at the end of the dataset
        if free > 0 or not self.ledger.of(*_UNDELIVERED):
            self._start(self.ledger.lease(free if free > 0 else per_batch))
        return min(per_batch, len(self.ledger.of(*_UNDELIVERED)))

    def _admit_ahead(self) -> None:
        """Begin groups between two batches, if they can be delivered in time after the next updates."""
        self._requeue_stale()
        free = self._free_places(self.groups_per_batch * (self.max_staleness or 0))
        if free > 0 and self._totals.batches and not self.closed:
            self._start(self.ledger.lease(free))
        self._news.set()

    def _free_places(self, places: int) -> int:
        """Return the number of groups to begin, so that ``places`` are undelivered.

        New draws that do not fill a last batch are left out, but not groups that were drawn before.
        """
        primer, begun = self.ledger.primer, len(self.ledger.of(*_BEGUN))
        if (remaining := primer.remaining()) != float("inf"):
            undelivered = len(self.ledger.of(*_UNDELIVERED))
            in_whole_batches = int(undelivered + remaining) // self.groups_per_batch * self.groups_per_batch
            places = min(places, max(in_whole_batches, undelivered + primer.num_requeued))
        return places - begun

    def _start(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._tasks[lease.group_id] = asyncio.ensure_future(self._run_group(lease))

    async def _run_group(self, lease: Lease) -> None:
        group, attempt, _ = lease
        try:
            rows = await self.runner.run(lease, partial(self.ledger.begin, group, attempt))
        except asyncio.CancelledError:
            if group in self._tasks and self._tasks[group] is asyncio.current_task():  # otherwise _stop cancelled it
                self._fail(RuntimeError(f"the environment or the policy cancelled a task of group_id={group}"))
            raise
        except BaseException as error:
            self._fail(error)
        else:
            self.ledger.complete(group, attempt, rows)
        finally:
            if self._tasks.get(group) is asyncio.current_task():
                del self._tasks[group]
            self._news.set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _choose(self, needed: int) -> list[Group]:
        """Return the groups to deliver, oldest first; none if they are not ready."""
        complete, running = self.ledger.of(GroupState.COMPLETE), self.ledger.of(GroupState.LEASED)
        if len(complete) >= needed:
            bound = self.max_staleness if self.on_stale == "wait" else None
            if not bound:
                return complete[:needed]
            chosen = choose_groups(complete, running, needed, self.groups_per_batch, self.policy_version, bound)
            if chosen is not None:
                return chosen
        # Complete groups whose last members are late
        if self.min_members is not None:
            ended = self.runner.ended_counts
            late = [group.group_id for group in running if ended[group.group_id] >= self.min_members]
            missing = needed - len(complete)
            for group_id in late[: missing if missing > 0 else needed]:
                self.runner.cut_stragglers(group_id)
        return []

    def _deliver(self, chosen: list[Group]) -> _Batch:
        """Return the rows of complete groups, sorted by id, without tokens beyond the bound on staleness."""
        group_ids = sorted(group.group_id for group in chosen)
        rows = self.ledger.deliver(group_ids)
        for group in group_ids:
            self.runner.forget(group)
        if self.max_staleness is not None:
            rows = limit_staleness(rows, self.policy_version, self.max_staleness, self.on_stale, self._counts)
        return _Batch(group_ids, rows)

    def _requeue_stale(self) -> None:
        """Draw groups again that are beyond the bound on staleness."""
        if self.max_staleness is None or self.on_stale != "requeue":
            return
        oldest = self.policy_version - self.max_staleness
        stale = [
            group.group_id
            for group in self.ledger.of(*_BEGUN)
            if oldest_version(group, self.policy_version) < oldest and group.attempt < _MAX_STALE_ATTEMPTS
        ]
        for group_id in stale:
            if (task := self._tasks.pop(group_id, None)) is not None:
                task.cancel()
            self.runner.forget(group_id)
        self._counts["staleness/requeued_groups"] += len(stale)
        self.ledger.requeue(stale)

    # Cancellation, state and end

    def cancel(self, group_ids: Iterable[int] | None = None) -> int:
        """Cancel incomplete groups, their requests and tools, and release their state. They are never delivered.

        Args:
            group_ids: ids of the groups to cancel; None cancels all incomplete groups.

        Returns:
            Number of groups that were cancelled.
        """
        chosen = None if group_ids is None else set(map(int, group_ids))
        return 0 if self.closed else LoopCall(self._loop, self._cancel(chosen)).result()

    async def _cancel(self, group_ids: set[int] | None) -> int:
        chosen = [g.group_id for g in self.ledger.of(GroupState.LEASED) if group_ids is None or g.group_id in group_ids]
        await self._stop(chosen)
        # Keep groups that completed before their task stopped
        cancelled = [group for group in chosen if self.ledger.groups[group].state == GroupState.LEASED]
        self.ledger.drop(cancelled)
        self._counts["collector/cancelled_groups"] += len(cancelled)
        self._failure = None  # it was raised by a cancelled group
        self._news.set()
        return len(cancelled)

    async def _stop(self, groups: Iterable[int]) -> None:
        tasks = {self._tasks.pop(group) for group in groups if group in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)
        for group in groups:
            self.runner.forget(group)

    def state_dict(self) -> dict[str, Any]:
        """Return counters, version, random stream, and the environment's state with open groups re-queued.

        With ``auto_acknowledge``, groups that :meth:`collect` returned count as trained on.
        """
        return self._call_on_loop(self._state)

    def _state(self) -> dict[str, Any]:
        updater, totals = self._weight_updater, self._totals
        self._settle(totals, reclaim=False)
        return {
            "seed": self.runner.seed,
            "policy_version": self.policy_version,
            "spent_version": self.policy_version if updater is None else updater.version,
            "totals": list(totals[:3]),
            "counts": dict(self._counts),
            "runner_counts": dict(self.runner.counts),
            "ledger": self.ledger.state_dict(self.env.state_dict),
            "sampler": self.policy.sampler_state() if hasattr(self.policy, "sampler_state") else {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, which does not contain the policy's weights, after cancelling all groups."""
        LoopCall(self._loop, self._load(state_dict)).result()
        if state_dict["sampler"]:
            self.policy.load_sampler_state(state_dict["sampler"])
        if self._weight_updater is not None:
            self._weight_updater.resume_from(state_dict["spent_version"])
        self._initialized = False

    async def _load(self, state: dict[str, Any]) -> None:
        await self._stop(self._tasks.copy())
        self._failure = None
        self.ledger.load_state_dict(state["ledger"], self.env.load_state_dict)
        self.policy_version, self._totals = state["policy_version"], _Totals(*state["totals"])
        self.runner.seed = state["seed"]
        for counter, saved in ((self._counts, state["counts"]), (self.runner.counts, state["runner_counts"])):
            counter.clear()
            counter.update(saved)
        self._news.set()

    def __len__(self) -> int:
        """Raise a ``TypeError``, since trajectories differ in their number of turns."""
        raise TypeError("the number of batches of an LLMCollector is unknown in advance")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and return the next seed. Prompts and samples have separate seeds."""
        return self.env.set_seed(seed, static_seed=static_seed)

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Cancel incomplete groups, and close the event loop and the environment.

        Args:
            timeout: ignored; it is part of TorchRL's interface.
            close_env: whether to close the environment.
            raise_on_error: whether to raise an error if the environment is already closed.
        """
        if not self.closed:
            LoopCall(self._loop, self._shut_down()).result()
            self._close_loop()
            if close_env:
                self.env.close(raise_if_closed=raise_on_error)

    async def _shut_down(self) -> None:
        self.closed = True
        self._news.set()
        await self._requeue_running()


@atexit.register
def _shut_down_all() -> None:
    """Shut down at exit: a thread killed inside torch aborts the process."""
    for collector in list(_OPEN_COLLECTORS):
        collector.shutdown(close_env=False)


def _find_primer(env: EnvBase) -> DataLoadingPrimer:
    primers = [t for t in transforms_of(env) if isinstance(t, DataLoadingPrimer)]
    if len(primers) != 1:
        raise ValueError(
            f"the environment has {len(primers)} DataLoadingPrimers, but LLMCollector requires one; use DatasetChatEnv"
        )
    return primers[0]


def _default_seed(policy: Callable[[TensorDictBase], TensorDictBase]) -> int:
    seed = getattr(getattr(policy, "config", None), "seed", None)
    return torch.initial_seed() if seed is None else seed


def _require_separate_weights(setting: str, updater: WeightUpdater | None) -> None:
    if isinstance(updater, InProcessWeightUpdater) and updater.source is updater.target:
        raise ValueError(
            f"{setting} samples while the loop trains and cannot be combined with a weight_updater whose source is "
            "its target; sample from a copy (torchrl_rloo.modules.frozen_copy) or set it to 0"
        )
