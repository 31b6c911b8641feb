"""Asynchronous collector: the rows of LLMCollector, from conversations that advance independently."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.conversation import GroupRunner
from torchrl_rloo.collectors.llm import CollectionProgress, LLMCollector
from torchrl_rloo.collectors.turn_source import make_turn_source
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.envs import event_loop
from torchrl_rloo.envs.stepping import transforms_of
from torchrl_rloo.envs.transforms.data import DataLoadingPrimer
from torchrl_rloo.weight_update.base import InProcessWeightUpdater, WeightUpdater

_PROGRESS_PERIOD_S = 0.2
_SIGNAL_PERIOD_S = 1.0
_CANCEL_TIMEOUT_S = 10.0


class AsyncLLMCollector(LLMCollector):
    """Collector that runs each conversation independently and delivers groups as they complete.

    Each turn is submitted as soon as its conversation is ready, while tools, sessions and rewards of other
    conversations run. Rows, keys and counters are those of :class:`LLMCollector`.

    With ``ahead=0``, every batch is sampled with the weights current at :meth:`collect`. Prompts keep their order, and
    the same seed gives the same rows.

    With ``ahead > 0``, sampling continues while the loop trains, and the groups that complete first are delivered. A
    group of average length begins at most ``ceil(ahead / groups_per_batch)`` batches before its own. A longer group
    is older by the number of batches delivered while it ran. The sampler, reward models and reference models then need
    weights that the optimizer does not change.

    Args:
        env: environment with a :class:`DataLoadingPrimer` (:class:`DatasetChatEnv`).
        policy: callable that takes and returns rows. A :class:`vLLMWrapper` over an :class:`AsyncEngine` samples each
            turn at once. Any other policy samples batches of the waiting rows
            (:mod:`torchrl_rloo.collectors.turn_source`).
        groups_per_batch: number of groups to deliver at a time; None delivers as many as one reset draws.
        ahead: number of groups begun in addition to the batch being delivered. At most ``groups_per_batch + ahead``
            groups are begun and undelivered.
        max_in_flight: maximum number of concurrent conversations; None disables the limit.
        max_batch_size: maximum number of rows in a batch of a policy that samples batches; None takes all waiting rows.
        reward_threads: number of groups scored at a time. With more than one, inline reward functions are called from
            several threads.
        max_consecutive_failures: number of consecutive failed turns that stops collection; None disables the limit.
        seed: seed from which the conversations' seeds are derived. Rows that already have a ``"seed"`` keep it.
        total_dialog_turns: see :class:`LLMCollector`.
        weight_updater: see :class:`LLMCollector`. Its ``in_flight`` determines how an update treats running turns.
        sync_every: see :class:`LLMCollector`.
        replay_buffer: see :class:`LLMCollector`.
        postproc: see :class:`LLMCollector`.
        progress: see :class:`LLMCollector`; called a few times a second, not after every turn.

    Attributes:
        counts: counters of :class:`~torchrl_rloo.collectors.conversation.GroupRunner`, and
            ``"collector/cancelled_groups"``.

    Raises:
        ValueError: if a number is out of range, or if the environment has no primer or cannot step single rows. Also if
            ``ahead > 0`` and the sampler shares the training model's weights.

    Note:
        A turn on which the policy fails truncates its conversation, with the stop reason ``"failed"``. The
        environment's ``max_seconds`` also ends a conversation that waits for an engine or a tool, with the reason
        ``"time"``. :meth:`collect` and :meth:`update_policy_weights_` restart a dead engine by the policy's
        ``recover``, once for all conversations, which then repeat their turns.

        :meth:`collect` may be called again after it raised or was interrupted: incomplete groups restart or continue.
        A ``state_dict`` may be taken at any time. A resumed run, of this class or :class:`LLMCollector`, first draws
        the groups that were begun but not delivered, under the same ids.

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
        >>> collector = AsyncLLMCollector(env, policy, ahead=2)
        >>> collector.collect().batch_size
        torch.Size([4])
        >>> collector.shutdown()
    """

    def __init__(
        self,
        env: EnvBase,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        groups_per_batch: int | None = None,
        ahead: int = 0,
        max_in_flight: int | None = None,
        max_batch_size: int | None = None,
        reward_threads: int = 1,
        max_consecutive_failures: int | None = 100,
        seed: int = 0,
        total_dialog_turns: int = -1,
        weight_updater: WeightUpdater | None = None,
        sync_every: int | None = None,
        replay_buffer: ReplayBuffer | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        progress: Callable[[CollectionProgress], None] | None = None,
    ):
        for name, value, minimum in (
            ("groups_per_batch", groups_per_batch, 1),
            ("ahead", ahead, 0),
            ("max_in_flight", max_in_flight, 1),
            ("reward_threads", reward_threads, 1),
            ("max_consecutive_failures", max_consecutive_failures, 1),
        ):
            if value is not None and value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}")
        if ahead:
            _require_separate_weights(ahead, weight_updater)
        super().__init__(
            env,
            policy,
            total_dialog_turns=total_dialog_turns,
            weight_updater=weight_updater,
            sync_every=sync_every,
            replay_buffer=replay_buffer,
            postproc=postproc,
            progress=progress,
        )
        self.primer = _find_primer(env)
        self.groups_per_batch = groups_per_batch or env.batch_size[0] // self.primer.num_generations
        self.ahead = ahead
        self.source = make_turn_source(policy, self._version, self._notify, max_batch_size=max_batch_size)
        self.runner = GroupRunner(
            env,
            self.source,
            self._version,
            seed=seed,
            max_in_flight=max_in_flight,
            reward_threads=reward_threads,
            max_consecutive_failures=max_consecutive_failures,
        )
        self.counts = self.runner.counts
        # The draw lock orders draws, deliveries and states. It is acquired before _changed, which guards the fields
        # below and is held briefly only, because the event loop acquires it
        self._draw_lock = threading.RLock()
        self._changed = threading.Condition()
        self._undelivered: dict[int, int] = {}  # group id -> prompt id, in the order of draws
        self._complete: dict[int, list[TensorDictBase]] = {}
        self._failure: BaseException | None = None
        self._tasks: dict[int, asyncio.Task] = {}  # by group id; used on the event loop only

    def _version(self) -> int:
        return self.policy_version

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def update_policy_weights_(self) -> None:
        """Send new weights as :class:`LLMCollector` does. A policy in this process is updated between two batches."""
        self.source.recover()
        with self.source.exclusive():
            super().update_policy_weights_()

    def _rollout(self, rows_before: int, turns_before: int) -> TensorDictBase:
        """Return the rows of the next groups to complete."""
        reported = None
        while True:
            needed = self._begin_groups()
            # Wait with a timeout: Python handles a signal that another thread received only between two waits
            with self._changed:
                should_wake = partial(self._should_wake, needed, len(self._undelivered))
                self._changed.wait_for(should_wake, _SIGNAL_PERIOD_S if self.progress is None else _PROGRESS_PERIOD_S)
                failure, self._failure = self._failure, None
                complete = len(self._complete)
            # Re-queue the incomplete groups, so that collect may be called again
            if failure is not None:
                self._cancel_groups(requeue=True)
                raise failure
            self.source.recover()
            if complete >= needed:
                return self._deliver(needed)
            if self.progress is not None and (current := self._progress(needed)) != reported:
                reported = current
                self.progress(current)

    def _should_wake(self, needed: int, undelivered: int) -> bool:
        """Return whether a batch is ready, a task failed, or a slot is free."""
        failed = self.closed or self._failure is not None or self.source.death is not None
        return failed or len(self._complete) >= needed or len(self._undelivered) < undelivered

    def _begin_groups(self) -> int:
        """Begin groups in all free slots, and return the number of groups in the batch."""
        with self._draw_lock:
            if self.closed:
                raise RuntimeError("the collector is shut down; create another one")
            undelivered, remaining = len(self._undelivered), self.primer.remaining()
            free = self.groups_per_batch + self.ahead - undelivered
            # Leave out an incomplete last batch, as LLMCollector does
            if remaining != float("inf"):
                in_whole_batches = int(undelivered + remaining) // self.groups_per_batch * self.groups_per_batch
                free = min(free, in_whole_batches - undelivered)
            # Without any group the primer must be asked, since it raises at the end of the dataset
            if free > 0 or not undelivered:
                drawn = self.primer.draw_groups(free if free > 0 else self.groups_per_batch)
                groups = {int(rows[0][keys.GROUP_ID]): rows for rows in drawn}
                with self._changed:
                    self._undelivered |= {group: int(rows[0][keys.PROMPT_ID]) for group, rows in groups.items()}
                event_loop.default_loop().call_soon(self._start_tasks, groups)
            return min(self.groups_per_batch, len(self._undelivered))

    def _start_tasks(self, groups: Mapping[int, TensorDictBase]) -> None:
        """Create the tasks of groups, on the event loop."""
        for group, rows in groups.items():
            self._tasks[group] = asyncio.ensure_future(self._run_group(group, rows))

    async def _run_group(self, group: int, drawn: TensorDictBase) -> None:
        try:
            rows = await self.runner.run(drawn)
        except asyncio.CancelledError:
            if group in self._tasks:  # otherwise _cancel_groups cancelled it
                self._fail(RuntimeError(f"the environment or the policy cancelled a task of group_id={group}"))
            raise
        except BaseException as error:
            self._fail(error)
        else:
            with self._changed:
                self._complete[group] = rows
                self._changed.notify_all()
        finally:
            self._tasks.pop(group, None)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _deliver(self, groups: int) -> TensorDictBase:
        """Return the oldest complete groups, sorted by id."""
        with self._draw_lock, self._changed:
            chosen = sorted([group for group in self._undelivered if group in self._complete][:groups])
            turns = sum(self.runner.turn_counts[group] for group in chosen)
            rows = [row for group in chosen for row in self._complete[group]]
            for group in chosen:
                del self._undelivered[group], self._complete[group]
                self.runner.forget(group)
        if self.progress is not None:
            self.progress(CollectionProgress(len(rows), len(rows), turns))
        return stack_rows(rows)

    def _progress(self, groups: int) -> CollectionProgress:
        total = groups * self.primer.num_generations
        ended, turns = (sum(list(counter.values())) for counter in (self.runner.ended_counts, self.runner.turn_counts))
        return CollectionProgress(min(ended, total), total, turns)

    def cancel(self, group_ids: Iterable[int] | None = None) -> int:
        """Cancel incomplete groups, their requests and tools, and release their state. They are never delivered.

        Args:
            group_ids: ids of the groups to cancel; None cancels all incomplete groups.

        Returns:
            Number of groups that were cancelled.
        """
        cancelled = self._cancel_groups(None if group_ids is None else set(map(int, group_ids)))
        self.counts["collector/cancelled_groups"] += cancelled
        return cancelled

    def _cancel_groups(self, group_ids: set[int] | None = None, *, requeue: bool = False) -> int:
        with self._draw_lock:
            with self._changed:
                chosen = {g: p for g, p in self._undelivered.items() if group_ids is None or g in group_ids}
            event_loop.run(self._stop([group for group in chosen if group not in self._complete]))
            # Keep groups that completed before their task stopped
            with self._changed:
                cancelled = {group: prompt for group, prompt in chosen.items() if group not in self._complete}
                for group in cancelled:
                    del self._undelivered[group]
                    self.runner.forget(group)
                self._failure = None  # it was raised by a cancelled group
                self._changed.notify_all()
            if requeue:
                self.primer.requeue((prompt, group) for group, prompt in cancelled.items())
            return len(cancelled)

    async def _stop(self, groups: Iterable[int]) -> None:
        tasks = {self._tasks.pop(group) for group in groups if group in self._tasks}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`LLMCollector`, with undelivered groups as re-queued draws, and the counts."""
        with self._draw_lock:
            with self._changed:
                undelivered = [(prompt, group) for group, prompt in self._undelivered.items()]
            with self.primer.with_requeued(undelivered):
                return super().state_dict() | {"counts": dict(self.counts)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` after cancelling incomplete groups."""
        with self._draw_lock:
            self._cancel_groups()
            with self._changed:
                self._undelivered.clear()
                self._complete.clear()
            super().load_state_dict(state_dict)
            self.counts.clear()
            self.counts.update(state_dict.get("counts", {}))

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Cancel incomplete groups and close the environment."""
        if not self.closed:
            with self._draw_lock:
                super().shutdown(timeout, close_env=False)
                self._cancel_groups()
                event_loop.run(self.runner.settle(_CANCEL_TIMEOUT_S))
            self.source.close()
            if close_env:
                self.env.close(raise_if_closed=raise_on_error)


def _find_primer(env: EnvBase) -> DataLoadingPrimer:
    primers = [t for t in transforms_of(env) if isinstance(t, DataLoadingPrimer)]
    if len(primers) != 1:
        raise ValueError(
            f"the environment has {len(primers)} DataLoadingPrimers, but AsyncLLMCollector requires one; "
            "use DatasetChatEnv"
        )
    return primers[0]


def _require_separate_weights(ahead: int, updater: WeightUpdater | None) -> None:
    if isinstance(updater, InProcessWeightUpdater) and updater.source is updater.target:
        raise ValueError(
            f"ahead={ahead} samples while the loop trains and cannot be combined with a weight_updater whose source is "
            "its target; sample from a copy (torchrl_rloo.modules.frozen_copy) or set ahead=0"
        )
