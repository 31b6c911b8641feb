"""RefillingCollector: batches full of groups that have a signal, from as many batches as that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.plain import from_plain, to_plain
from torchrl_rloo.data.rows import concatenate, stack_rows, tensor_rows
from torchrl_rloo.envs.transforms.data import DatasetExhaustedError
from torchrl_rloo.replay.filters import ZeroSignalFilter
from torchrl_rloo.replay.outcomes import by_group


class Refill(NamedTuple):
    """What :meth:`RefillingCollector.collect` gives.

    Attributes:
        rows: to train on: whole groups that have a signal, without text; None if there is none.
        sampled: all rows sampled for it, to take metrics of: a mean reward over ``rows`` says little, since groups that
            are all right or all wrong were dropped. None if nothing had to be sampled.
    """

    rows: TensorDictBase | None
    sampled: TensorDictBase | None


class RefillingCollector:
    """Collects until there are enough groups with a signal, as DAPO does (arXiv 2503.14476, section 3.2).

    Groups beyond those asked for are not thrown away: they come first in the next batch, those of the oldest policy
    version before others, and nothing is sampled while they suffice. They carry the log-probs of the policy that
    sampled them, so the loss's ratio does not start at 1 for them.

    Args:
        collector: gives batches of whole groups. It has no ``replay_buffer``, which would get the rows unfiltered, and
            no ``postproc`` that drops any.
        signal: says which groups have a signal.
        groups: how many a batch should have.
        max_batches: how many batches are collected for one; after that there is what there is.
        max_age: how many policy versions a surplus group may be behind; older ones are dropped and counted. As long as
            the collector's batches are not larger than ``groups``, surplus waits for one step only.
        observers: called with each batch that is collected, before it is filtered: ``pool.update``, say.

    Attributes:
        counts: ``"refill/batches"`` collected; ``"refill/groups"`` given out; ``"refill/missing_groups"`` that were not
            to be had in ``max_batches``, ``"refill/short_batches"`` in how many batches that was;
            ``"refill/stale_groups"`` dropped.

    Raises:
        ValueError: for a number out of range, or a collector with a replay buffer.

    Its ``state_dict`` has the surplus and the filter's counters, but not the collector's.
    """

    def __init__(
        self,
        collector: LLMCollector,
        signal: ZeroSignalFilter,
        groups: int,
        *,
        max_batches: int = 4,
        max_age: int = 1,
        observers: Sequence[Callable[[TensorDictBase], Any]] = (),
    ):
        for name, value, least in (("groups", groups, 1), ("max_batches", max_batches, 1), ("max_age", max_age, 0)):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if getattr(collector, "replay_buffer", None) is not None:
            raise ValueError("the collector writes every row to its replay_buffer: write those given out here instead")
        self.collector, self.signal, self.groups = collector, signal, groups
        self.max_batches, self.max_age, self.observers = max_batches, max_age, tuple(observers)
        self.counts: Counter[str] = Counter()
        self._surplus: list[list[TensorDictBase]] = []

    @property
    def surplus_groups(self) -> int:
        """Groups that wait for the next batch."""
        return len(self._surplus)

    def collect(self) -> Refill:
        """The next batch; fewer groups, or none, where ``max_batches`` or the dataset's epochs give no more.

        Raises:
            DatasetExhaustedError: if nothing can be sampled any more and nothing is left.
        """
        self._drop_stale()
        sampled, stream = [], self.collector.iterator()
        while len(self._surplus) < self.groups and len(sampled) < self.max_batches:
            rows = next(stream, None)
            if rows is None:
                if not sampled and not self._surplus:
                    raise DatasetExhaustedError("the collector has no further batch, and no group is left over")
                break
            sampled.append(rows)
            for observe in self.observers:
                observe(rows)
            informative = tensor_rows(rows) if len(rows := self.signal.keep_informative(rows)) else rows
            self._surplus += [list(group.unbind(0)) for group in by_group(informative).values()]
        self._surplus.sort(key=lambda group: (_version(group), int(group[0][keys.GROUP_ID])))
        given, self._surplus = self._surplus[: self.groups], self._surplus[self.groups :]
        self.counts["refill/batches"] += len(sampled)
        self.counts["refill/groups"] += len(given)
        self.counts["refill/missing_groups"] += self.groups - len(given)
        self.counts["refill/short_batches"] += len(given) < self.groups
        return Refill(
            stack_rows([row for group in given for row in group]) if given else None,
            concatenate(sampled) if sampled else None,
        )

    def _drop_stale(self) -> None:
        kept = [g for g in self._surplus if self.collector.policy_version - _version(g) <= self.max_age]
        self.counts["refill/stale_groups"] += len(self._surplus) - len(kept)
        self._surplus = kept

    def state_dict(self) -> dict[str, Any]:
        """Surplus and counters: plain values and tensors."""
        return {
            "surplus": [[to_plain(row) for row in group] for group in self._surplus],
            "counts": dict(self.counts),
            "signal": self.signal.get_extra_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores surplus and, in place, the counters."""
        self._surplus = [[from_plain(row) for row in group] for group in state["surplus"]]
        self.counts.clear()
        self.counts.update(state["counts"])
        self.signal.set_extra_state(state["signal"])


def _version(group: list[TensorDictBase]) -> int:
    return min(int(row[keys.POLICY_VERSION]) for row in group)
