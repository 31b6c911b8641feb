"""Collector of finished trajectories in whole groups, from conversations that advance independently.

It replaces TorchRL's class of the same name, which writes the version of the previous update, does not know groups and
cannot be resumed.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.concurrency import AdaptiveConcurrency
from torchrl_rloo.collectors.conversation import ON_FAILURE, GroupRunner, OnFailure, RunnerSettings
from torchrl_rloo.collectors.ledger import GroupLedger
from torchrl_rloo.collectors.scheduler import Batch, GroupScheduler
from torchrl_rloo.collectors.staleness import ON_STALE, OnStale, limit_staleness
from torchrl_rloo.collectors.waits import CollectorWaits
from torchrl_rloo.collectors.weights import PolicyWeights
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import entry_of, ragged, stack_rows, tensor_rows
from torchrl_rloo.data.segments import split_roles
from torchrl_rloo.envs.stepping import adapt_to_policy, transforms_of
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.runtime.event_loop import EventLoop, LoopCall
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments
from torchrl_rloo.weight_update import WeightUpdater

_MINIMA = {"ahead": 0, "max_staleness": 0}  # 1 for all other numbers
_CHOICES = {"on_stale": ON_STALE, "on_failure": ON_FAILURE}
_PROGRESS_PERIOD_S = 0.2


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


class Totals(NamedTuple):
    """Counters of delivered rows, and the groups that the last call of ``collect`` returned."""

    batches: int = 0
    dialog_turns: int = 0
    num_tokens: int = 0
    returned: tuple[int, ...] = ()


class LLMCollector(BaseCollector):
    """Collector that runs a policy in an environment and returns finished trajectories in whole groups.

    Each conversation advances independently: its turn is submitted as soon as it is ready, while tools, sessions and
    rewards of others run. Iterating yields batches of rows ``[B]``. The environment writes ``"group_id"`` and the
    rewards. The policy writes token ids, masks and log-probs ``[T]`` of each row. The collector adds the trajectory's
    return ``("next", "reward")`` ``[1, 1]`` and ``"policy_version"`` ``[]``. :mod:`torchrl_rloo.data.keys` lists all
    entries.

    By default nothing is sampled ahead: every batch is sampled with the weights current at :meth:`collect`, prompts
    keep their order, and the same seed gives the same rows. After an interrupted :meth:`collect` and an update, the
    next call samples the groups that had begun again, under the same ids. With ``ahead`` or ``max_staleness``, sampling
    continues while the loop trains, and groups are delivered as they complete, oldest first. The sampler, reward models
    and reference models then need weights that the optimizer does not change.

    Compared to TorchRL, ``dialog_turns_per_batch`` is a minimum, since groups stay whole. Completed trajectories are
    always yielded (``yield_completed_trajectories``) and versions always tracked (``track_policy_version``).

    Args:
        env: environment with a :class:`DataLoadingPrimer` (:class:`DatasetChatEnv`), or a function that makes it.
        policy: callable that takes and returns rows. A :class:`vLLMWrapper` over an :class:`AsyncEngine` samples each
            turn at once. Any other policy samples batches of the waiting rows
            (:mod:`torchrl_rloo.collectors.turn_source`).
        groups_per_batch: number of groups to deliver at a time; None delivers as many as one reset draws.
        dialog_turns_per_batch: minimum number of policy turns in a batch, which then has one or more times
            ``groups_per_batch`` groups; None sets no minimum. Groups in which no prompt leaves room for a turn end it.
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
        roles: roles of the environment's agent, whose rows are delivered in place of the conversations'; or ``()``.
        policy_version: version of the newest weights that reached the policy.
        batches: number of delivered batches.
        dialog_turns: number of turns in delivered rows.
        num_tokens: number of tokens in delivered rows.
        counts: counters of the collector, of :class:`~torchrl_rloo.collectors.conversation.GroupRunner` and of
            :class:`GroupLedger`: ``"collector/cancelled_groups"``, ``"staleness/masked_tokens"``,
            ``"staleness/masked_rows"``, ``"staleness/requeued_groups"`` and ``"weights/failed_pushes"``.

    Raises:
        ValueError: if an argument is out of range, or arguments cannot be combined. Also if the environment has no
            primer or cannot step single rows, or has another ``input_mode`` than the policy. Also if sampling ahead
            shares the training model's weights.
        TypeError: if ``weight_updater`` is not a :class:`WeightUpdater`.

    Note:
        A turn on which the policy fails truncates its conversation, with the stop reason ``"failed"``, and the row
        abstains. The environment's ``max_seconds`` also ends a conversation that waits for an engine or a tool, with
        the reason ``"time"``. A dead engine without an :class:`~torchrl_rloo.engines.EnginePool` ends :meth:`collect`.

        Groups pass through a :class:`GroupLedger`. If :meth:`collect` raises or is interrupted at any instant, no group
        is lost or delivered twice, and it may be called again. A ``state_dict`` may be taken at any time: a resumed run
        first draws the groups that were begun but not delivered, under the same ids. If ``audit`` cannot be written,
        :meth:`collect` and ``state_dict`` raise, until all its lines are written.

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

    init_random_frames = 0  # TorchRL's trainers optimize once a collector has delivered this number
    closed: bool = False  # also while the constructor refuses an argument

    @with_torchrl_arguments
    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
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
        env = env() if callable(env) and not isinstance(env, EnvBase) else env
        _check_arguments(
            groups_per_batch=groups_per_batch,
            dialog_turns_per_batch=dialog_turns_per_batch,
            total_dialog_turns=total_dialog_turns,
            ahead=ahead,
            max_staleness=max_staleness,
            on_stale=on_stale,
            min_members=min_members,
            on_failure=on_failure,
            max_in_flight=None if isinstance(max_in_flight, AdaptiveConcurrency) else max_in_flight,
            max_batch_size=max_batch_size,
            reward_threads=reward_threads,
            max_consecutive_failures=max_consecutive_failures,
            sync_every=sync_every,
            max_failed_pushes=max_failed_pushes,
            weight_updater=weight_updater,
        )
        primer = _find_primer(env, min_members)
        adapt_to_policy(env, policy)
        self.roles = next((t.roles for t in transforms_of(env) if getattr(t, "roles", ())), ())
        self.env, self.policy, self.replay_buffer = env, policy, replay_buffer
        self.groups_per_batch = groups_per_batch or env.batch_size[0] // primer.num_generations
        self.dialog_turns_per_batch, self.total_dialog_turns = dialog_turns_per_batch, total_dialog_turns
        self.postproc, self.progress, self.auto_acknowledge = postproc, progress, auto_acknowledge
        self.sync_every = sync_every
        # Parts: a record of the groups, their runner, and the policy's weights
        self.ledger = GroupLedger(primer, audit=audit)
        self.runner = self._make_runner(
            RunnerSettings(
                seed=_default_seed(policy) if seed is None else seed,
                eager=bool(ahead or max_staleness),
                max_in_flight=max_in_flight,
                max_batch_size=max_batch_size,
                reward_threads=reward_threads,
                max_consecutive_failures=max_consecutive_failures,
                on_failure=on_failure,
            )
        )
        self.weights = PolicyWeights(weight_updater, self.runner.exclusive, max_failed_pushes)
        # What begins and chooses groups, and the loop that it all runs on
        self.scheduler = GroupScheduler(
            self.ledger,
            self.runner,
            self._version,
            per_batch=self.groups_per_batch,
            ahead=ahead,
            max_staleness=max_staleness,
            on_stale=on_stale,
            min_members=min_members,
        )
        self.waits = CollectorWaits(self.runner, self.ledger.finished, policy)
        self._totals = Totals()
        self._loop = EventLoop("collector")
        self._close_loop = weakref.finalize(self, self._loop.close)
        if hasattr(policy, "register_collector"):
            policy.register_collector(self)

    def _make_runner(self, settings: RunnerSettings) -> GroupRunner:
        return GroupRunner(self.env, self.policy, self._version, settings)

    batches = property(lambda self: self._totals.batches)
    dialog_turns = property(lambda self: self._totals.dialog_turns)
    num_tokens = property(lambda self: self._totals.num_tokens)

    @property
    def counts(self) -> dict[str, int]:
        """Counters of events."""
        parts = (self.scheduler, self.weights, self.runner, self.ledger)
        return {name: number for part in parts for name, number in dict(part.counts).items()}

    @property
    def policy_version(self) -> int:
        """Version of the newest weights that reached the policy."""
        return self.weights.version

    @property
    def weight_updater(self) -> WeightUpdater | None:
        """Sender of new weights to the policy."""
        return self.weights.updater

    @weight_updater.setter
    def weight_updater(self, value: WeightUpdater | None) -> None:
        self.weights.updater = value

    @property
    def policy_version_tracker(self) -> PolicyWeights:
        """Record of versions, under TorchRL's name; its ``version`` is :attr:`policy_version`."""
        return self.weights

    def initialize_policy_(self) -> None:
        """Give engines that have no weights of this process the current ones; :meth:`collect` calls it once.

        Raises:
            WeightSyncError: if the weights did not arrive.
        """
        self.weights.initialize()

    @with_torchrl_arguments
    def update_policy_weights_(self, policy_or_weights: Any = None, *, state_dict: Any = None) -> None:
        """Send the training model's weights to the policy under a new version.

        A policy in this process is updated between two batches. After a failed update, sampling continues with the old
        weights, until ``max_failed_pushes`` updates in a row have failed. The arguments are TorchRL's, and may only be
        the model that ``weight_updater`` sends or its ``state_dict()``.

        Raises:
            ValueError: for other weights.
            RuntimeError: if the collector has no ``weight_updater``.
            WeightSyncError: if too many updates in a row have failed.
        """
        self.weights.update(state_dict if policy_or_weights is None else policy_or_weights)
        self._call_on_loop(self.scheduler.admit_ahead)

    def update_weights(self) -> None:
        """Call :meth:`update_policy_weights_`, as the ``weight_sync_sender`` of TorchRL's ``GRPOTrainer``."""
        self.update_policy_weights_()

    def collect(self) -> TensorDictBase:
        """Return one batch ``[B]`` of finished trajectories, after a weight update if one is due.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
            RuntimeError: if the collector is shut down.
        """
        batch = self._next_batch()
        finished = self._rows_of(batch)
        rows = stack_rows(finished)
        # Count before postproc, which may drop rows
        after = self._count(batch, sum(map(len, ragged(rows, keys.TOKENS))))
        if self.roles:
            rows = stack_rows(split_roles(finished, self.roles))
        if self.postproc is not None:
            rows = self.postproc(rows)
        if self.replay_buffer is not None:
            self.replay_buffer.extend(tensor_rows(rows))
        self._deliver(after)
        return rows

    def _next_batch(self) -> Batch:
        """Begin a batch, with a weight update if one is due, and wait for its groups."""
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
                with self.waits.for_rows():
                    batch = self._wait_for_batch(len(parts), turns)
            except DatasetExhaustedError:
                if not parts:
                    raise
                break
            groups += batch.group_ids
            parts += batch.rows
            turns += (new_turns := _count_turns(batch))
            if self.progress is not None:
                self.progress(CollectionProgress(len(parts), len(parts), turns))
            if not new_turns:  # prompts that leave no room for a turn would never fill the batch
                break
        return Batch(groups, parts, batch.version)

    def _rows_of(self, batch: Batch) -> list[TensorDictBase]:
        """Return the finished rows of a batch, without tokens beyond the bound on staleness."""
        bound, counts = self.scheduler.max_staleness, self.scheduler.counts
        if bound is None:
            return batch.rows
        return limit_staleness(batch.rows, batch.version, bound, self.scheduler.on_stale, counts)

    def _count(self, batch: Batch, tokens: int) -> Totals:
        """Return the totals after the delivery of a batch."""
        totals, turns = self._totals, _count_turns(batch)
        return Totals(totals.batches + 1, totals.dialog_turns + turns, totals.num_tokens + tokens, (*batch.group_ids,))

    def _deliver(self, after: Totals) -> None:
        self.scheduler.has_delivered = True
        # One assignment delivers the batch: an interrupt before it leaves all groups in the ledger
        self._totals = after

    def _wait_for_batch(self, rows_before: int, turns_before: int, groups: int | None = None) -> Batch:
        """Wait for the next batch, and report its progress."""
        waiting = LoopCall(self._loop, self.scheduler.next_batch(groups))
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

    def start(self) -> NoReturn:
        """Raise: a collector samples in the background without a call."""
        raise NotImplementedError(
            "start() is TorchRL's; set ahead= or max_staleness=, with which sampling continues while the loop trains, "
            "and take batches by collect()"
        )

    def _version(self) -> int:
        return self.weights.version

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches of rows until ``total_dialog_turns`` is reached or the dataset's epochs end."""
        while not self.closed and (self.total_dialog_turns == -1 or self.dialog_turns < self.total_dialog_turns):
            try:
                rows = self.collect()
            except DatasetExhaustedError:
                return
            yield rows

    def __len__(self) -> int:
        """Raise a ``TypeError``, since trajectories differ in their number of turns."""
        raise TypeError("the number of batches of an LLMCollector is unknown in advance")

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment and return the next seed. Prompts and samples have separate seeds."""
        return self.env.set_seed(seed, static_seed=static_seed)

    def timings(self) -> dict[str, float]:
        """Return shares and durations of waits since the last call; they depend on the clock."""
        return self._call_on_loop(self.waits.take)

    # Acknowledgement, cancellation, state and end

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
        self._settle(self._totals, reclaim=False)
        return self.ledger.acknowledge(group_ids)

    def cancel(self, group_ids: Iterable[int] | None = None) -> int:
        """Cancel incomplete groups, their requests and tools, and release their state. They are never delivered.

        Args:
            group_ids: ids of the groups to cancel; None cancels all incomplete groups.

        Returns:
            Number of groups that were cancelled.
        """
        chosen = None if group_ids is None else set(map(int, group_ids))
        return 0 if self.closed else LoopCall(self._loop, self.scheduler.cancel(chosen)).result()

    def state_dict(self) -> dict[str, Any]:
        """Return counters, version, random stream, and the environment's state with open groups re-queued.

        With ``auto_acknowledge``, groups that :meth:`collect` returned count as trained on.
        """
        return self._call_on_loop(self._state)

    def _state(self) -> dict[str, Any]:
        self._settle(totals := self._totals, reclaim=False)
        self._acknowledge_returned()
        return {
            "seed": self.runner.seed,
            "versions": [self.weights.version, self.weights.spent_version],
            "totals": list(totals[:3]),
            "counts": [dict(part.counts) for part in (self.scheduler, self.weights, self.runner)],
            "ledger": self.ledger.state_dict(self.env.state_dict),
            "sampler": self.policy.sampler_state() if hasattr(self.policy, "sampler_state") else {},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, which does not contain the policy's weights, after cancelling all groups."""
        LoopCall(self._loop, self._load(state_dict)).result()
        if state_dict["sampler"]:
            self.policy.load_sampler_state(state_dict["sampler"])

    async def _load(self, state: dict[str, Any]) -> None:
        await self.scheduler.reset()
        self.ledger.load_state_dict(state["ledger"], self.env.load_state_dict)
        self.weights.resume_from(*state["versions"])
        self._totals, self.runner.seed = Totals(*state["totals"]), state["seed"]
        self.scheduler.has_delivered = self._totals.batches > 0
        for part, counts in zip((self.scheduler, self.weights, self.runner), state["counts"], strict=True):
            part.counts.clear()
            part.counts.update(counts)
        self.scheduler.wake()

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
        await self.scheduler.close()
        self.ledger.close()

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
        self.waits.begin()
        self.scheduler.drop_waiter()
        self._settle(self._totals, reclaim=True)
        self._acknowledge_returned()

    def _settle(self, totals: Totals, *, reclaim: bool) -> None:
        if self.ledger.settle(totals.returned, reclaim=reclaim):
            self.runner.end_batch()

    def _acknowledge_returned(self) -> None:
        if self.auto_acknowledge:
            self.ledger.acknowledge()


def _count_turns(batch: Batch) -> int:
    return sum(int(entry_of(row, keys.NUM_TURNS)) for row in batch.rows)


def _check_arguments(*, weight_updater: Any, total_dialog_turns: int, **arguments: Any) -> None:
    """Refuse arguments of the collector that are out of range or do not go together; None is always valid."""
    for name, value in arguments.items():
        if name in _CHOICES:
            if value not in _CHOICES[name]:
                raise ValueError(f"{name}={value!r} must be one of {list(_CHOICES[name])}")
        elif value is not None and value < (minimum := _MINIMA.get(name, 1)):
            raise ValueError(f"{name}={value} must be at least {minimum}")
    if total_dialog_turns != -1 and total_dialog_turns < 1:
        raise ValueError(f"total_dialog_turns={total_dialog_turns} must be -1 (no limit) or at least 1")
    ahead, max_staleness = arguments["ahead"], arguments["max_staleness"]
    if ahead and max_staleness is not None:
        raise ValueError(f"ahead={ahead} cannot be combined with max_staleness={max_staleness}; set only one")
    if weight_updater is not None and not isinstance(weight_updater, WeightUpdater):
        kind = getattr(weight_updater, "__name__", type(weight_updater).__name__)
        raise TypeError(
            f"weight_updater={kind} must be a torchrl_rloo.weight_update.WeightUpdater, "
            "whose pushes have a version; use WeightPublisher or InProcessWeightUpdater"
        )
    if arguments["sync_every"] is not None and weight_updater is None:
        raise ValueError(f"sync_every={arguments['sync_every']} requires a weight_updater")
    # Sampling ahead runs during training, so the optimizer must not change the sampler's weights
    if weight_updater is not None and weight_updater.shares_weights and (ahead or max_staleness):
        setting = f"ahead={ahead}" if ahead else f"max_staleness={max_staleness}"
        raise ValueError(
            f"{setting} samples while the loop trains and cannot be combined with a weight_updater whose source is "
            "its target; sample from a copy (torchrl_rloo.modules.frozen_copy) or set it to 0"
        )


def _find_primer(env: EnvBase, min_members: int | None) -> DataLoadingPrimer:
    """Return the environment's only primer, whose groups have at least ``min_members`` members."""
    primers = [t for t in transforms_of(env) if isinstance(t, DataLoadingPrimer)]
    if len(primers) != 1:
        raise ValueError(
            f"the environment has {len(primers)} DataLoadingPrimers, but LLMCollector requires one; use DatasetChatEnv"
        )
    if min_members is not None and min_members > (members := primers[0].num_generations):
        raise ValueError(f"min_members={min_members} must be at most num_generations={members} of the environment")
    return primers[0]


def _default_seed(policy: Callable[[TensorDictBase], TensorDictBase]) -> int:
    """Return the seed in the policy's ``generate_kwargs``, or torch's initial seed."""
    seed = getattr(getattr(policy, "config", None), "seed", None)
    return torch.initial_seed() if seed is None else seed
