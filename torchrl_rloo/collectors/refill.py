"""Full batches of groups with a signal, sampled from several batches if necessary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.outcomes import group_rows
from torchrl_rloo.data.packed import from_plain, to_plain
from torchrl_rloo.data.rows import concatenate, stack_rows, tensor_rows
from torchrl_rloo.envs.transforms.data import DatasetExhaustedError
from torchrl_rloo.replay.filters import ZeroSignalFilter


class RefilledBatch(NamedTuple):
    """Result of :meth:`RefillingCollector.collect`.

    Attributes:
        rows: ``[B]`` rows to train on: whole groups with a signal, without text. None if there is none.
        sampled: ``[S]`` rows sampled for the batch. Take metrics of these: the mean of ``rows`` is biased, since groups
            of equal rewards were dropped. None if nothing was sampled.
    """

    rows: TensorDictBase | None
    sampled: TensorDictBase | None


class RefillingCollector:
    """Collector that samples until there are enough groups with a signal, as in DAPO (arXiv 2503.14476, section 3.2).

    The next batch delivers surplus groups first, oldest policy version first, and samples nothing while they suffice.
    They keep the log-probs of the policy that sampled them, so the loss's ratio does not start at 1 for them.

    Args:
        collector: collector of whole groups. It must not have a ``replay_buffer``, which would receive unfiltered rows,
            or a ``postproc`` that drops rows.
        signal: filter that keeps groups with a signal.
        groups_per_batch: number of groups in a batch.
        max_batches: maximum number of batches collected for one result, which may then have fewer groups.
        max_age: maximum number of policy versions that a surplus group may be behind. Older groups are dropped and
            counted. If a collected batch has at most ``groups_per_batch`` groups, surplus waits for one step only.
        observers: functions called with each collected batch before it is filtered, e.g. ``pool.update``.

    Attributes:
        counts: ``"refill/batches"`` collected, ``"refill/groups"`` delivered, ``"refill/missing_groups"`` still missing
            after ``max_batches``, ``"refill/short_batches"`` with missing groups, ``"refill/stale_groups"`` dropped.

    Raises:
        ValueError: if a number is out of range, or if the collector has a replay buffer.

    Example::

        refill = RefillingCollector(LLMCollector(env, policy), ZeroSignalFilter(), groups_per_batch=8)
        rows, sampled = refill.collect()  # rows of 8 groups with a signal, and all rows that were sampled
    """

    def __init__(
        self,
        collector: LLMCollector,
        signal: ZeroSignalFilter,
        groups_per_batch: int,
        *,
        max_batches: int = 4,
        max_age: int = 1,
        observers: Sequence[Callable[[TensorDictBase], Any]] = (),
    ):
        for name, value, minimum in (
            ("groups_per_batch", groups_per_batch, 1),
            ("max_batches", max_batches, 1),
            ("max_age", max_age, 0),
        ):
            if value < minimum:
                raise ValueError(f"{name}={value} must be at least {minimum}")
        if getattr(collector, "replay_buffer", None) is not None:
            raise ValueError(
                "the collector's replay_buffer would receive unfiltered rows; remove it and extend one with .rows"
            )
        self.collector, self.signal, self.groups_per_batch = collector, signal, groups_per_batch
        self.max_batches, self.max_age, self.observers = max_batches, max_age, tuple(observers)
        self.counts: Counter[str] = Counter()
        self._surplus: list[list[TensorDictBase]] = []

    @property
    def surplus_groups(self) -> int:
        """Number of groups waiting for the next batch."""
        return len(self._surplus)

    def collect(self) -> RefilledBatch:
        """Return the next batch. It has fewer groups, or none, after ``max_batches`` or when the dataset's epochs end.

        Raises:
            DatasetExhaustedError: if the dataset is exhausted and no surplus is left.
        """
        self._drop_stale()
        # Sample until surplus and new groups with a signal fill the batch
        sampled, stream = [], self.collector.iterator()
        while len(self._surplus) < self.groups_per_batch and len(sampled) < self.max_batches:
            rows = next(stream, None)
            if rows is None:
                if not sampled and not self._surplus:
                    raise DatasetExhaustedError("the collector has no further batch, and no surplus group is left")
                break
            sampled.append(rows)
            for observe in self.observers:
                observe(rows)
            informative = tensor_rows(rows) if len(rows := self.signal.keep_informative(rows)) else rows
            self._surplus += [list(group.unbind(0)) for group in group_rows(informative).values()]
        # Deliver the oldest groups first
        self._surplus.sort(key=lambda group: (_version(group), int(group[0][keys.GROUP_ID])))
        delivered, self._surplus = self._surplus[: self.groups_per_batch], self._surplus[self.groups_per_batch :]
        self.counts["refill/batches"] += len(sampled)
        self.counts["refill/groups"] += len(delivered)
        self.counts["refill/missing_groups"] += self.groups_per_batch - len(delivered)
        self.counts["refill/short_batches"] += len(delivered) < self.groups_per_batch
        return RefilledBatch(
            stack_rows([row for group in delivered for row in group]) if delivered else None,
            concatenate(sampled) if sampled else None,
        )

    def _drop_stale(self) -> None:
        kept = [g for g in self._surplus if self.collector.policy_version - _version(g) <= self.max_age]
        self.counts["refill/stale_groups"] += len(self._surplus) - len(kept)
        self._surplus = kept

    def state_dict(self) -> dict[str, Any]:
        """Return the surplus and all counters as plain values and tensors, without the collector's state."""
        return {
            "surplus": [[to_plain(row) for row in group] for group in self._surplus],
            "counts": dict(self.counts),
            "signal": self.signal.get_extra_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the surplus and, in place, the counters."""
        self._surplus = [[from_plain(row) for row in group] for group in state["surplus"]]
        self.counts.clear()
        self.counts.update(state["counts"])
        self.signal.set_extra_state(state["signal"])


def _version(group: list[TensorDictBase]) -> int:
    return min(int(row[keys.POLICY_VERSION]) for row in group)
