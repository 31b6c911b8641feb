"""Training on rows that each rank fetches itself, from memory in place of a cluster's object store.

As a script it is one rank of several (:mod:`support.rank_scripts`). The folder has ``cases.json``.
"""

from __future__ import annotations

import json
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from support.rank_scripts import become_rank
from support.rank_training import MEMBERS, VOCABULARY, Delivered, train
from torchrl_rloo.collectors.staleness import limit_staleness
from torchrl_rloo.data import keys, stack_rows
from torchrl_rloo.data.metadata import metadata_of
from torchrl_rloo.data.outcomes import rows_with_signal
from torchrl_rloo.data.segments import trajectory_id
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.diagnostics.parity import parity_metrics
from torchrl_rloo.envs.transforms import add_reference_kl
from torchrl_rloo.modules import TransformersWrapper, record_log_probs
from torchrl_rloo.ray import ReferencedSource
from torchrl_rloo.ray.source import LostRowsError, RowReferences
from torchrl_rloo.runtime.ranks import Ranks

VERSION, MAX_STALENESS = 3, 1  # current policy version; tokens have versions from 0 on
Ref = tuple[int, int]  # a group's id, and the attempt that sampled it


class Store:
    """Memory of one process in place of an object store, which loses some groups' first attempts.

    Args:
        lost: ids of groups that this process cannot read, or an error that it raises for them.
        attempts: number of attempts of these groups that are lost.
    """

    def __init__(self, lost: tuple[int, ...] = (), attempts: int = 1):
        self.lost, self.attempts = lost, attempts
        self.groups: dict[int, list[TensorDictBase]] = {}
        self.fetched: list[int] = []  # groups, also of earlier steps
        self.replaced: list[int] = []

    def put(self, rows: TensorDictBase) -> None:
        """Replace the contents by the groups of a step."""
        self.groups.clear()
        for row in rows.unbind(0):
            self.groups.setdefault(int(row[keys.GROUP_ID]), []).append(row)

    def get(self, ref: Ref) -> list[TensorDictBase]:
        """Return the rows of a group; raise if they are lost."""
        group, attempt = ref
        if group in self.lost and attempt < self.attempts:
            raise LostRowsError([group], "the node died")
        self.fetched.append(group)
        return [row.clone() for row in self.groups[group]]


STORE = Store()  # of this process


class StoredReferences(RowReferences):
    """References to rows in :data:`STORE`; like those of a cluster, they carry no rows to another process."""

    def _get(self, needed: list[int], timeout: float) -> dict[int, list[TensorDictBase]]:
        found, lost = {}, []
        for index in needed:
            try:
                found[index] = STORE.get(self.refs[index])
            except LostRowsError as error:
                lost += error.group_ids
        if lost:
            raise LostRowsError(lost, "the node died")
        return found


class StoreCollector:
    """Collector of rank 0 that delivers what :data:`STORE` has.

    Args:
        on_stale: treatment of stale tokens; None leaves them.
    """

    policy_version, num_tokens = VERSION, 7

    def __init__(self, on_stale: str | None = None):
        self.on_stale, self.replaced = on_stale, []
        self.scheduler = SimpleNamespace(counts=Counter())

    def collect_references(self) -> RowReferences:
        """Return references to all rows."""
        return self._references(list(STORE.groups), 0)

    def replace_lost(self, group_ids: list[int]) -> RowReferences:
        """Return references to the next attempts of lost groups."""
        self.replaced.append(group_ids)
        STORE.replaced += group_ids
        return self._references(group_ids, len(self.replaced))

    def _references(self, groups: list[int], attempt: int) -> RowReferences:
        place = [(g, m) for g, group in enumerate(groups) for m in range(len(STORE.groups[group]))]
        return StoredReferences(
            metadata=metadata_of(stack_rows([STORE.groups[groups[g]][m] for g, m in place])),
            refs=[(group, attempt) for group in groups],
            group_ids=groups,
            group_of_row=[g for g, _ in place],
            member_of_row=[m for _, m in place],
            finish=partial(limit, on_stale=self.on_stale),
        )


def limit(rows: list[TensorDictBase], counts: Counter[str], on_stale: str | None) -> list[TensorDictBase]:
    """Take stale tokens out of the loss."""
    return rows if on_stale is None else limit_staleness(rows, VERSION, MAX_STALENESS, on_stale, counts)


def as_finished(rows: TensorDictBase, segments: bool = False) -> TensorDictBase:
    """Add what a collector writes to rollouts: ids, versions and counters.

    Args:
        rows: rollouts of :func:`~support.rank_training.build_rows`.
        segments: True gives every second row an earlier sample, and drops scores that such a row cannot have.
    """
    finished = []
    for i, row in enumerate(rows.unbind(0)):
        generator = torch.Generator().manual_seed(1000 + i)
        group, actions = int(row[keys.GROUP_ID]), int(row[keys.ACTION_MASK].sum())
        versions = torch.randint(i % 4, VERSION + 1, (actions,), generator=generator).sort().values
        row = row.copy().update(
            {
                keys.TRAJECTORY_ID: torch.tensor(trajectory_id(group, i % MEMBERS)),
                keys.NUM_TURNS: torch.tensor(1 + i % 3),
                keys.ACTION_VERSIONS: versions,
                keys.POLICY_VERSION: versions.min(),
                keys.REWARDS: row[keys.REWARD].reshape(1),
            }
        )
        if segments:
            row = row.exclude(keys.REF_LOG_PROBS, keys.PROXIMAL_LOG_PROBS)
            row.set(keys.PROMPT_TOKENS, row[keys.TOKENS][: int((~row[keys.ACTION_MASK]).sum())])
            if i % 2:
                row.set(keys.PREVIOUS_SEGMENTS, _earlier_sample(generator))
        finished.append(row)
    return stack_rows(finished)


def _earlier_sample(generator: torch.Generator) -> TensorDict:
    tokens, mask = torch.randint(VOCABULARY, (5,), generator=generator), torch.tensor([False, False, True, True, True])
    log_probs = torch.where(mask, -3.0 - torch.rand(5, generator=generator), 0.0)
    sample = {"tokens": tokens, "mask": mask, "log_probs": log_probs, "sizes": torch.tensor([5])}
    return TensorDict(sample | {"versions": torch.tensor([2, 3, 3])}, [])


def deliver(
    case: dict[str, Any],
    ranks: Ranks | None,
    step: int,
    rows: TensorDictBase,
    policy: TransformersWrapper,
    start: TransformersWrapper,
) -> Delivered:
    """Deliver rollouts through a source, which is that of one process or of ranks.

    Args:
        case: ``rows`` (number of rollouts), ``segments``, ``on_stale``, ``reference`` (coefficient of a KL in the
            reward) and ``scores`` (record log-probs of the current weights).
        ranks: ranks, each of which fetches its own rows. None delivers all rows.
        step: number of the step.
        rows: rollouts.
        policy: policy that is trained.
        start: policy of the initial weights.
    """
    rows = as_finished(rows[: case.get("rows")], case.get("segments", False))
    shared = {"micro_batch_size": 1, "ranks": ranks, "split": ranks is None}
    finish = None
    if "reference" in case:
        finish = partial(add_reference_kl, ref=start, kl_to_ref_coeff=case["reference"], **shared)
    if ranks is None:
        source, all_rows = None, stack_rows(limit(list(rows.unbind(0)), Counter(), case.get("on_stale")))
        if finish is not None:
            finish(all_rows)
    else:
        STORE.put(rows)
        collector = SimpleNamespace(collector=StoreCollector(case.get("on_stale")), observe=None)
        signal = rows_with_signal if "reference" not in case else None
        source = ReferencedSource(ranks, collector if ranks.is_main else None, None, finish=finish, has_signal=signal)
        all_rows = source.collect().trained
    metrics = {f"rows/{name}": value for name, value in completion_metrics(all_rows, ["score"], [1.0]).items()}
    if case.get("scores"):
        own = all_rows if source is None else source.own.rows
        record_log_probs(policy, own, entropy=keys.PROXIMAL_ENTROPY, **shared)
        metrics |= parity_metrics(own, ranks=ranks)
    return Delivered(all_rows, None if source is None else source.rows_of, metrics)


def train_own_rows(case: dict[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """Train on delivered rows; the result is that of :func:`~support.rank_training.train`."""
    return train(case, ranks, partial(deliver, case, ranks))


def run_cases(ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    """Train all cases of a folder on one rank."""
    results = []
    for case in json.loads((folder / "cases.json").read_text()):
        split = Ranks(ranks.rank, ranks.size, group=ranks.group, control=ranks.control, **case.get("ranks", {}))
        lost, STORE.fetched, STORE.replaced = case.get("lost", {}), [], []
        STORE.lost = tuple(lost.get(str(ranks.rank), ()))
        try:
            results.append(train_own_rows(case, split) | {"fetched": STORE.fetched, "replaced": STORE.replaced})
        except Exception:
            results.append({"error": traceback.format_exc()})
            if ranks.size > 1:  # the other ranks wait in another call
                break
    return results


if __name__ == "__main__":
    become_rank(run_cases)
