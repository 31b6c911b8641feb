"""CollectorBase: TorchRL's interface of collectors, around ``collect``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.envs import EnvBase

from torchrl_rloo.collectors.conversation import GroupRunner
from torchrl_rloo.collectors.ledger import GroupLedger
from torchrl_rloo.collectors.scheduler import GroupScheduler
from torchrl_rloo.collectors.waits import CollectorWaits
from torchrl_rloo.collectors.weights import PolicyWeights
from torchrl_rloo.envs.transforms.data import DatasetExhaustedError
from torchrl_rloo.runtime.event_loop import EventLoop
from torchrl_rloo.runtime.loop_call import LoopCall
from torchrl_rloo.weight_update import WeightUpdater


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


class CollectorBase(BaseCollector):
    """Base of collectors: iteration, seeds, versions and counters.

    Attributes:
        batches: number of delivered batches.
        dialog_turns: number of turns in delivered rows.
        num_tokens: number of tokens in delivered rows.
    """

    env: EnvBase
    ledger: GroupLedger
    runner: GroupRunner
    scheduler: GroupScheduler
    weights: PolicyWeights
    waits: CollectorWaits
    total_dialog_turns: int
    auto_acknowledge: bool
    closed: bool = False
    _loop: EventLoop
    _totals: Totals

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

    def start(self) -> NoReturn:
        """Raise: a collector samples in the background without a call."""
        raise NotImplementedError(
            "start() is TorchRL's; set ahead= or max_staleness=, with which sampling continues while the loop trains, "
            "and take batches by collect()"
        )

    def _version(self) -> int:
        return self.weights.version

    def initialize_policy_(self) -> None:
        """Give engines that have no weights of this process the current ones; :meth:`collect` calls it once.

        Raises:
            WeightSyncError: if the weights did not arrive.
        """
        self.weights.initialize()

    def update_policy_weights_(self) -> None:
        """Send the training model's weights to the policy under a new version.

        A policy in this process is updated between two batches. After a failed update, sampling continues with the old
        weights, until ``max_failed_pushes`` updates in a row have failed.

        Raises:
            RuntimeError: if the collector has no ``weight_updater``.
            WeightSyncError: if too many updates in a row have failed.
        """
        self.weights.update()

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

    @abstractmethod
    def collect(self) -> TensorDictBase:
        """Return one batch ``[B]`` of finished trajectories."""

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
