"""Source of rank 0's rows on all ranks that train together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from tensordict import TensorDictBase
from torch import nn

from torchrl_rloo.collectors.source import GroupSource, StepRows
from torchrl_rloo.data import keys
from torchrl_rloo.data.metadata import OwnRows
from torchrl_rloo.data.rows import stack_rows, tensor_row, tensor_rows, unbind_rows
from torchrl_rloo.engines.root import gathered
from torchrl_rloo.modules.reference import Scorer, record_log_probs
from torchrl_rloo.replay.cache import FIRST_CACHED_GROUP
from torchrl_rloo.runtime.ranks import Ranks
from torchrl_rloo.weight_update import WeightUpdater

T = TypeVar("T")


class SharedSource:
    """Source on each rank of the rows that rank 0 collects; with a single rank, the source itself.

    All ranks make the same calls. Rank 0 has environment, engine and collector; the other ranks wait for its rows.

    Args:
        ranks: ranks that train together.
        source: source of rank 0; None on the other ranks.
        updater: weight updater, of which each rank has one: the ranks of a sharded model send together.
        sampler: sharded model that rank 0 samples with; all ranks gather its weights while it samples. None for a
            sampler with weights elsewhere.
        offloaded: model of a sampler that is on the CPU except while it samples. None for a sampler that stays.
        finish: function that completes the rows on all ranks together, such as
            :func:`~torchrl_rloo.envs.transforms.add_reference_kl`. None leaves them.

    Attributes:
        policy_version: version of the sampler's weights after the last :meth:`collect`.
        num_tokens: tokens that the collector has sampled so far.
        own: rows of this rank, if the rows of :meth:`collect` are only metadata; None otherwise.

    Example::

        source = SharedSource(ranks, GroupSource(collector) if ranks.is_main else None, updater)
        rows, sampled = source.collect()
    """

    own: OwnRows | None = None

    def __init__(
        self,
        ranks: Ranks,
        source: GroupSource | None,
        updater: WeightUpdater,
        *,
        sampler: nn.Module | None = None,
        offloaded: nn.Module | None = None,
        finish: Callable[[TensorDictBase], Any] | None = None,
    ):
        self.ranks, self.source, self.updater, self.sampler, self.finish = ranks, source, updater, sampler, finish
        self.offloaded = offloaded if offloaded is None else offloaded.to("cpu")
        self.policy_version = self.num_tokens = 0

    def on_main(self, function: Callable[[], T], name: str) -> T | None:
        """Call a function that samples on rank 0, while the other ranks wait; return None on these.

        Args:
            function: function without arguments.
            name: name of the call in errors.

        Raises:
            RankError: on the other ranks, if the function fails on rank 0.
        """
        with self._sampling():
            return self.ranks.on_main(function, name)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Put the weights of the sampler where it samples, within the context."""
        if self.offloaded is not None:
            self.offloaded.to(self.ranks.device)
        try:
            with nullcontext() if self.sampler is None else gathered(self.sampler):
                yield
        finally:
            if self.offloaded is not None:
                self.offloaded.to("cpu")

    def collect(self) -> StepRows:
        """Return the rows of the next step: those of rank 0, which are sampled with text there and trained on without.

        Raises:
            DatasetExhaustedError: if the dataset's epochs have ended.
            RankError: on the other ranks, if rank 0 fails.
        """
        step_rows = self._collect()
        if self.finish is not None:
            # Rows that are trained on and sampled are the same objects
            rows = {id(row): row for part in step_rows if part is not None for row in part.unbind(0)}
            self.finish(stack_rows(list(rows.values())))
        trained, sampled = step_rows
        return StepRows(None if trained is None else tensor_rows(trained), sampled)

    def _collect(self) -> StepRows:
        collected: list[StepRows] = []

        def collect() -> tuple[int, int, list[list[TensorDictBase] | None]]:
            collected.append(self.source.collect())
            plain: dict[int, TensorDictBase] = {}  # a row that is trained on and sampled is sent once
            parts = [
                None if rows is None else [plain.setdefault(id(row), tensor_row(row)) for row in rows.unbind(0)]
                for rows in (collected[0] if self.ranks.size > 1 else ())
            ]
            return self.source.collector.policy_version, self.source.collector.num_tokens, parts

        with self._sampling():
            self.policy_version, self.num_tokens, parts = self.ranks.broadcast(collect, "collect")
        if collected:
            return collected[0]
        return StepRows(*(None if rows is None else stack_rows(rows) for rows in parts))

    @property
    def rows_of(self) -> Callable[[TensorDictBase], TensorDictBase] | None:
        """Function from a batch of the collected rows to this rank's rows of it; None if the batch has the rows."""
        return None if self.own is None else self.own.rows_of

    def record_log_probs(self, rows: TensorDictBase, scorer: Scorer, *, current: bool = False, **limits: Any) -> None:
        """Score the step's rows with the training model before its first update on them, on all ranks together.

        Args:
            rows: rows of :meth:`collect` to train on, which get the log-probs and entropies in place.
            scorer: scorer of the training model.
            current: True scores only :meth:`current_rows`.
            **limits: limits of a pass, see :func:`~torchrl_rloo.modules.record_log_probs`.
        """
        own = self.current_rows(rows) if current else stack_rows(self._own_rows(rows))
        options = {"entropy": keys.PROXIMAL_ENTROPY, "ranks": self.ranks, "split": self.own is None}
        record_log_probs(scorer, own, **options, **limits)

    def current_rows(self, rows: TensorDictBase) -> TensorDictBase:
        """Return what parity compares: this rank's whole rows ``[n]`` that the current weights sampled for the step."""

        def is_current(row: TensorDictBase) -> bool:
            cached = int(row[keys.GROUP_ID]) >= FIRST_CACHED_GROUP  # whose log-probs are already the trainer's
            whole = keys.PREVIOUS_SEGMENTS not in row.keys()
            sampled = int(row.get(keys.ORIGIN, keys.SAMPLED)) == keys.SAMPLED
            return whole and sampled and not cached and int(row[keys.POLICY_VERSION]) == self.policy_version

        return stack_rows([row for row in self._own_rows(rows) if is_current(row)])

    def _own_rows(self, rows: TensorDictBase) -> list[TensorDictBase]:
        return unbind_rows(rows if self.own is None else self.own.rows)

    def with_text(self, rows: TensorDictBase) -> list[TensorDictBase]:
        """Return collected rows with their text, on rank 0.

        Args:
            rows: rows ``[n]`` of the step.
        """
        return unbind_rows(rows)

    def update_policy_weights_(self) -> None:
        """Push the training model's weights to the sampler, on all ranks together."""
        if self.source is None:
            self.updater.join()  # rank 0 decides whether a failed push ends the run
        else:
            self.source.collector.update_policy_weights_()

    def close(self) -> None:
        """Shut the collector of rank 0 down."""
        if self.source is not None:
            self.source.close()

    @property
    def parts(self) -> list[Any]:
        """Parts of rank 0 that may have counters or metrics; empty on the other ranks."""
        return [] if self.source is None else self.source.parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of rank 0's source; empty on the other ranks."""
        return {} if self.source is None else self.source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` on rank 0."""
        if self.source is not None:
            self.source.load_state_dict(state)
