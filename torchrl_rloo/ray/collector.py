"""RayLLMCollector: LLMCollector whose conversations run in workers of a Ray cluster.

It replaces TorchRL's class of the same name, which is one blocking actor and does not know groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.conversation import RunnerSettings
from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.collectors.scheduler import Batch
from torchrl_rloo.collectors.staleness import limit_staleness
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.engines import EnginePool
from torchrl_rloo.envs.stepping import transforms_of
from torchrl_rloo.ray.fleet import WorkerSettings
from torchrl_rloo.ray.runner import RemoteRunner
from torchrl_rloo.ray.session import note_connected
from torchrl_rloo.ray.source import MAX_REPLACEMENTS, LostRowsError, RowReferences
from torchrl_rloo.ray.worker import counting_parts
from torchrl_rloo.runtime.event_loop import LoopCall
from torchrl_rloo.runtime.torchrl_arguments import with_torchrl_arguments

Policy = Callable[[TensorDictBase], TensorDictBase]


class RayLLMCollector(LLMCollector):
    """Collector whose conversations run in rollout workers: actors with their own environment, tools and policy.

    The ledger of groups and the choice of batches stay in this process, the driver. Finished groups lie in Ray's object
    store. :meth:`collect` returns their rows, as :class:`LLMCollector` does. :meth:`collect_references` returns their
    metadata and references, so that the processes that train fetch the rows themselves.

    With engines as policies, the number of workers does not change any row, since each conversation has its own seed.
    A worker that dies, or does not answer, is replaced; its groups are drawn again under the same ids. Workers may be
    added and removed at any time. Counters of their environments, tools and rewards are added to those of the driver's
    copy at each heartbeat.

    Args:
        env: environment, or a function that makes one. It is pickled. The driver draws prompts from its own copy, whose
            state is that of the run; the copies of workers start like it.
        policy: policy, which is pickled. None if ``policy_factory`` is given.
        policy_factory: function that makes the policy in each worker. None takes ``policy``.
        num_workers: number of workers at the start.
        worker_options: options of the workers' actors, such as ``num_cpus``, ``resources`` or ``runtime_env``.
        worker_conversations: number of conversations that a worker is given at a time. Other groups wait in the driver.
            None sets no limit.
        beat_every: seconds between two heartbeats of a worker.
        beat_timeout: seconds that a worker may take to answer one. After them it counts as dead.
        start_timeout: seconds that a worker may take to start, with the wait for a place in the cluster.
        max_worker_restarts: number of times in an hour that a worker is replaced.
        **kwargs: further arguments of :class:`LLMCollector`.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: if an argument is out of range, or arguments cannot be combined, see :class:`LLMCollector`.

    Note:
        Weights of a policy in the workers are not updated. To train, sample with a
        :class:`~torchrl_rloo.ray.RayEngine`, or a pool of several, which receive weights themselves.

    Example::

        with ray_session():
            engines = EnginePool([RayEngine(make_engine) for _ in range(2)])
            policy = vLLMWrapper(engines, tokenizer=tokenizer)
            updater = WeightPublisher(model, engines)
            collector = RayLLMCollector(env, policy, num_workers=4, weight_updater=updater, max_staleness=1)
            for rows in collector:
                ...
                collector.update_policy_weights_()
    """

    runner: RemoteRunner

    @with_torchrl_arguments
    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        policy: Policy | None = None,
        *,
        policy_factory: Callable[[], Policy] | None = None,
        num_workers: int = 1,
        worker_options: dict[str, Any] | None = None,
        worker_conversations: int | None = None,
        beat_every: float = 0.2,
        beat_timeout: float = 60.0,
        start_timeout: float = 600.0,
        max_worker_restarts: int = 5,
        **kwargs: Any,
    ):
        if (policy is None) == (policy_factory is None):
            raise ValueError("exactly one of policy and policy_factory must be given")
        for name, value in {"num_workers": num_workers, "worker_conversations": worker_conversations}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name, value in {
            "beat_every": beat_every,
            "beat_timeout": beat_timeout,
            "start_timeout": start_timeout,
        }.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0 seconds")
        if max_worker_restarts < 0:
            raise ValueError(f"max_worker_restarts={max_worker_restarts} must be at least 0")
        make_env = env if not isinstance(env, EnvBase) else None
        env = env if make_env is None else make_env()
        batched = [type(t).__name__ for t in transforms_of(env) if hasattr(t, "end_batch")]
        if num_workers > 1 and batched:
            raise ValueError(
                f"num_workers={num_workers} cannot be combined with {batched}, which compare the rows of a batch; "
                "use one worker, or normalize advantages in MCAdvantage"
            )
        self._parts = partial(_make_parts, make_env or env, policy, policy_factory)
        self._num_workers = num_workers
        self._workers = WorkerSettings(
            options=dict(worker_options or {}),
            conversations=worker_conversations,
            beat_every=beat_every,
            beat_timeout=beat_timeout,
            start_timeout=start_timeout,
            max_restarts=max_worker_restarts,
        )
        super().__init__(env, policy if policy is not None else policy_factory, **kwargs)
        note_connected(self)

    def _make_runner(self, settings: RunnerSettings) -> RemoteRunner:
        engine = getattr(self.policy, "engine", None)
        pool = engine if isinstance(engine, EnginePool) else None
        sizes = {"num_workers": self._num_workers, "workers": self._workers}
        parts = counting_parts(self.env)
        return RemoteRunner(self._parts, settings, self._version, **sizes, pool=pool, parts=parts)

    # Collection

    def collect(self) -> TensorDictBase:
        for left in reversed(range(MAX_REPLACEMENTS + 1)):
            try:
                return super().collect()
            except LostRowsError as error:  # with the node that held them
                self._call_on_loop(self._requeue_lost, error.group_ids)
                if not left:
                    raise

    def collect_references(self) -> RowReferences:
        """Return references to one batch ``[B]`` of finished trajectories, after a weight update if one is due.

        ``postproc`` and ``replay_buffer`` need rows, and are not called.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
            RuntimeError: if the collector is shut down.
            ValueError: if the environment's agent has roles.
        """
        if self.roles:
            raise ValueError(f"roles={[r.name for r in self.roles]} cannot be split by reference; use collect()")
        batch = self._next_batch()
        self._deliver(self._count(batch, sum(int(row[keys.TOKEN_COUNT]) for row in batch.rows)))
        return self._references(batch)

    def replace_lost(self, group_ids: Iterable[int]) -> RowReferences:
        """Sample groups again whose rows the object store lost, under the same ids, and wait for as many groups.

        Args:
            group_ids: groups of the last batch.

        Returns:
            References to the replacements.

        Raises:
            KeyError: if a group is not part of the last batch.
        """
        group_ids = list(group_ids)
        self._call_on_loop(self._requeue_lost, group_ids)
        totals = self._totals
        batch = self._wait_for_batch(0, 0, len(group_ids))
        self._totals = totals._replace(returned=(*totals.returned, *batch.group_ids))
        return self._references(batch)

    def _rows_of(self, batch: Batch) -> list[TensorDictBase]:
        references = self._references(batch)
        rows = list(references.fetch().unbind(0))
        self.scheduler.counts.update(references.counts)
        return rows

    def _references(self, batch: Batch) -> RowReferences:
        groups = {int(group): index for index, group in enumerate(batch.group_ids)}
        of_row = [groups[int(row[keys.GROUP_ID])] for row in batch.rows]
        members = [itertools.count() for _ in groups]
        member = [next(members[group]) for group in of_row]
        found = [(group, self.ledger.groups[group].attempt) for group in batch.group_ids]
        refs = [self.runner.objects[key] for key in found]
        nbytes = [self.runner.nbytes.get(key, 0) for key in found]
        bound = self.scheduler.max_staleness
        finish = partial(_finish, version=batch.version, max_staleness=bound, on_stale=self.scheduler.on_stale)
        return RowReferences(stack_rows(batch.rows), refs, list(batch.group_ids), of_row, member, finish, nbytes)

    def _begin_batch(self) -> None:
        super()._begin_batch()
        # Also keep those of leased groups, whose rows may have arrived a moment ago
        self.runner.prune((group.group_id, group.attempt) for group in self.ledger.groups.values())

    def _requeue_lost(self, group_ids: Iterable[int]) -> None:
        """Return delivered groups whose rows are lost to the drawn ones."""
        lost = set(group_ids)
        if missing := [g for g in lost if g not in self.ledger.groups]:
            raise KeyError(f"group_ids={missing} are not delivered")
        self._totals = self._totals._replace(returned=tuple(g for g in self._totals.returned if g not in lost))
        self.ledger.unsettle(lost)
        self.ledger.settle(self._totals.returned)
        self.ledger.requeue(lost)
        self.scheduler.counts["workers/lost_groups"] += len(lost)

    # Workers and weights

    def update_policy_weights_(self, policy_or_weights: Any = None, *, state_dict: Any = None) -> None:
        super().update_policy_weights_(policy_or_weights, state_dict=state_dict)
        self._call_on_loop(self.runner.wake)

    def add_worker(self) -> int:
        """Start another worker, and return its number."""
        return self._call_on_loop(self.runner.fleet.add_worker)

    def remove_worker(self, number: int, *, drain: bool = True) -> None:
        """Remove a worker.

        Args:
            number: number of the worker, as in :attr:`worker_numbers`.
            drain: True lets it finish its groups first. False samples them again elsewhere.

        Raises:
            ValueError: if there is no worker of this number.
        """
        LoopCall(self._loop, self.runner.fleet.remove_worker(number, drain=drain)).result()

    @property
    def worker_numbers(self) -> list[int]:
        """Numbers of the current workers, which start or are ready."""
        return [worker.number for worker in self.runner.fleet.workers]

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the workers, see :class:`RemoteRunner`."""
        return self.runner.metrics()

    def timings(self) -> dict[str, float]:
        """Return what depends on the clock, see :class:`LLMCollector` and :class:`RemoteRunner`."""
        return super().timings() | self.runner.timings()

    def disconnect(self) -> None:
        """Shut the collector down, before the session ends."""
        self.shutdown(raise_on_error=False)

    async def _shut_down(self) -> None:
        await super()._shut_down()
        await self.runner.close()


def _make_parts(
    env: EnvBase | Callable[[], EnvBase], policy: Policy | None, policy_factory: Callable[[], Policy] | None
) -> tuple[EnvBase, Policy]:
    """Return environment and policy of a worker."""
    return env if isinstance(env, EnvBase) else env(), policy if policy_factory is None else policy_factory()


def _finish(rows: list[TensorDictBase], counts: Any, *, version: int, max_staleness: int | None, on_stale: Any) -> list:
    return rows if max_staleness is None else limit_staleness(rows, version, max_staleness, on_stale, counts)
