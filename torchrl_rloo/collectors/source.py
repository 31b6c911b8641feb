"""GroupSource: the groups that a step trains on, from a collector and, where asked for, refilling and a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from torchrl_rloo.collectors.llm import LLMCollector
from torchrl_rloo.collectors.refill import RefillingCollector
from torchrl_rloo.envs.stepping import transforms_of
from torchrl_rloo.replay.cache import GroupCache


class StepRows(NamedTuple):
    """Rows of one training step.

    Attributes:
        trained: whole groups to train on; None if no group has a signal.
        sampled: all rows sampled for the step, to take metrics of.
    """

    trained: TensorDictBase | None
    sampled: TensorDictBase


class GroupSource:
    """Give each step its rows: one batch of a collector, or only groups with a signal.

    Args:
        collector: samples batches of whole groups.
        refill: drops groups without a signal and samples until enough have one; None trains on all groups.
        cache: fills what ``refill`` leaves empty with groups of earlier steps; None leaves it empty.
        observe: called with each batch that is sampled, e.g. ``PassRatePool.update``; not with ``refill``, which has
            ``observers``.

    Raises:
        ValueError: for a cache without ``refill``.
    """

    def __init__(
        self,
        collector: LLMCollector,
        refill: RefillingCollector | None = None,
        cache: GroupCache | None = None,
        observe: Callable[[TensorDictBase], None] | None = None,
    ):
        if cache is not None and refill is None:
            raise ValueError("cache requires refill, which leaves the places that it fills; pass a RefillingCollector")
        self.collector, self.refill, self.cache, self.observe = collector, refill, cache, observe

    def collect(self) -> StepRows:
        """Return the rows of the next step."""
        if self.refill is None:
            rows = self.collector.collect()
            if self.observe is not None:
                self.observe(rows)
            return StepRows(rows, rows)
        rows, sampled = self.refill.collect()
        if self.cache is not None:
            fresh, rows = rows, self.cache.fill(rows, self.refill.groups_per_batch, self.collector.policy_version)
            if fresh is not None:
                self.cache.add(fresh)
        return StepRows(rows, sampled)

    def close(self) -> None:
        """Cancel conversations that are in flight."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])

    @property
    def parts(self) -> list[Any]:
        """All parts that may count or measure something, those of the environment among them."""
        env, signal = self.collector.env, None if self.refill is None else self.refill.signal
        base, sampler = getattr(env, "base_env", env), getattr(getattr(env, "primer", None), "sampler", None)
        return [base, *transforms_of(env), sampler, self.collector, signal, self.refill, self.cache]

    def _stateful(self) -> dict[str, Any]:
        parts = {"collector": self.collector, "refill": self.refill, "cache": self.cache}
        return {name: part for name, part in parts.items() if part is not None}
