"""Source of the groups that a step trains on: a collector, optionally with refilling and a cache."""

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
        trained: ``[B]`` rows of whole groups to train on; None if no group has a signal.
        sampled: ``[S]`` rows sampled for the step, for metrics; None if nothing was sampled.
    """

    trained: TensorDictBase | None
    sampled: TensorDictBase | None


class GroupSource:
    """Source of each training step's rows: one batch of a collector, or only groups with a signal.

    Args:
        collector: collector of batches of whole groups.
        refill: collector that drops groups without a signal and samples until enough have one. None trains on all
            groups.
        cache: cache that completes short batches of ``refill`` with groups of earlier steps. None leaves them short.
        observe: function called with each sampled batch, e.g. ``PassRatePool.update``. It is ignored with ``refill``,
            which has ``observers``.

    Raises:
        ValueError: if ``cache`` is given without ``refill``.

    Example::

        source = GroupSource(LLMCollector(env, policy))
        rows, sampled = source.collect()
    """

    def __init__(
        self,
        collector: LLMCollector,
        refill: RefillingCollector | None = None,
        cache: GroupCache | None = None,
        observe: Callable[[TensorDictBase], None] | None = None,
    ):
        if cache is not None and refill is None:
            raise ValueError("cache requires refill, whose short batches it completes; pass a RefillingCollector")
        self.collector, self.refill, self.cache, self.observe = collector, refill, cache, observe

    def collect(self) -> StepRows:
        """Return the rows of the next step.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
        """
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
        """Shut the collector down, which cancels conversations in flight."""
        self.collector.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the collector and, if present, of ``refill`` and ``cache``."""
        return {name: part.state_dict() for name, part in self._stateful().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])

    @property
    def parts(self) -> list[Any]:
        """Parts that may have counters or metrics, including those of the environment; None for absent parts."""
        env, signal = self.collector.env, None if self.refill is None else self.refill.signal
        base, sampler = getattr(env, "base_env", env), getattr(getattr(env, "primer", None), "sampler", None)
        return [base, *transforms_of(env), sampler, self.collector, signal, self.refill, self.cache]

    def _stateful(self) -> dict[str, Any]:
        parts = {"collector": self.collector, "refill": self.refill, "cache": self.cache}
        return {name: part for name, part in parts.items() if part is not None}
