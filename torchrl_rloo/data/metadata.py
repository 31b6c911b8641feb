"""Metadata of rows: what advantages, assignments and metrics read, without tokens and text.

Rows stay in the process, or the object store, where they were sampled. Their metadata travel to the process that
decides about them: :func:`shares_of` splits a step over ranks by tokens, and :class:`OwnRows` finds one rank's rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, prefix_order, ragged, set_entries, stack_rows, unbind_rows
from torchrl_rloo.data.segments import sampled_versions
from torchrl_rloo.functional.kl import k1
from torchrl_rloo.functional.statistics import ngram_statistics, sequence_hash

# Entries that grow with the number of tokens
_TOKEN_ENTRIES = {"tokens", "masks", "log_probs", "text", "history", "support", keys.PREVIOUS_SEGMENTS}
_TOKEN_ENTRIES |= {
    "ref_log_probs",
    "token_rewards",
    keys.ACTION_VERSIONS,
    keys.SAMPLED_MASK,
    "proximal_log_probs",
    "proximal_entropy",
}
TOKEN_SUMS = (keys.ACTION_COUNT, keys.SURPRISAL, keys.KL_TO_REF)
TOKEN_STATISTICS = (*TOKEN_SUMS, keys.COMPLETION_HASH, keys.NGRAM_SKETCH, keys.REPETITION)
METADATA_KEYS = frozenset({keys.TOKEN_COUNT, keys.VERSION_COUNTS, *TOKEN_STATISTICS})  # of metadata only


def metadata_of(rows: TensorDictBase) -> LazyStackedTensorDict:
    """Return the metadata of finished rows.

    Shapes: ``rows [B]`` to ``[B]``.
    """
    return stack_rows([_metadata(row) for row in rows.unbind(0)])


def _metadata(row: TensorDictBase) -> TensorDict:
    entries = _without_tokens(row)
    previous = row.get(keys.PREVIOUS_SEGMENTS, None)
    count = len(row[keys.TOKENS]) + (0 if previous is None else len(previous["tokens"]))
    counts = {keys.TOKEN_COUNT: torch.tensor(count), keys.VERSION_COUNTS: version_counts(row)}
    return entries.update(counts | token_statistics(row))


def version_counts(row: TensorDictBase) -> torch.Tensor:
    """Return the versions that sampled a row's action tokens, and the number of tokens of each.

    Shapes: result ``[V, 2]`` int64.
    """
    if keys.VERSION_COUNTS in row.keys():
        return row[keys.VERSION_COUNTS]
    if (versions := sampled_versions(row)) is not None:
        return torch.stack(versions.unique(return_counts=True), 1)
    previous = row.get(keys.PREVIOUS_SEGMENTS, None)
    actions = int(row[keys.ACTION_MASK].sum()) + (0 if previous is None else int(previous["mask"].sum()))
    return torch.tensor([[int(row[keys.POLICY_VERSION]), actions]])


def token_statistics(row: TensorDictBase) -> dict[str, torch.Tensor]:
    """Return the numbers about a row's action tokens that metrics read.

    Shapes: result ``[]``.
    """
    mask = row[keys.ACTION_MASK]
    statistics = {keys.ACTION_COUNT: mask.sum()}
    sampler, reference = row.get(keys.LOG_PROBS, None), row.get(keys.REF_LOG_PROBS, None)
    if sampler is not None:
        statistics[keys.SURPRISAL] = -sampler[mask].sum()
        if reference is not None:
            statistics[keys.KL_TO_REF] = k1(sampler[mask], reference[mask]).sum()
    ids = row[keys.TOKENS][mask]
    statistics[keys.COMPLETION_HASH] = sequence_hash(ids)
    statistics[keys.NGRAM_SKETCH], statistics[keys.REPETITION] = ngram_statistics(ids)
    return statistics


def _without_tokens(entry: TensorDictBase) -> TensorDict:
    """Return the tensors of an entry that do not grow with its tokens, and the name of its task."""
    kept = {}
    for name, value in entry.items():
        if name in _TOKEN_ENTRIES:
            continue
        if name == keys.TASK and is_non_tensor(value):
            kept[name] = value
        if type(value) is TensorDict:
            kept[name] = _without_tokens(value)
        elif isinstance(value, torch.Tensor):
            kept[name] = value
    return TensorDict(kept, batch_size=entry.batch_size)


MAX_LOAD = 1.05  # largest number of tokens of a rank before rows are moved, as a multiple of the mean


def split_by_tokens(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Split items over ranks so that each rank has nearly equally many tokens.

    The longest item goes first, always to the rank with the fewest tokens (Graham 1969, *Bounds on multiprocessing
    timing anomalies*): no rank has more than 4/3 of the smallest possible maximum.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rank))
    return [sorted(share) for share in shares]


def shares_of(rows: TensorDictBase, size: int, packing: str = "none") -> list[list[int]]:
    """Return the rows that each rank works on."""
    lengths = [sum(value.numel() for key, value in row.items(True, True) if _is_tokens(key)) for row in rows.unbind(0)]
    units = [(n, [i]) for i, n in enumerate(lengths)]
    if packing == "shared_prefix" and keys.TOKENS in rows.keys(include_nested=True):  # pairs are not packed by prefix
        units = _subtrees(ragged(rows, keys.TOKENS), size)
    shares = split_by_tokens([tokens for tokens, _ in units], size)
    return [sorted(i for unit in share for i in units[unit][1]) for share in shares]


def shares_of_groups(metadata: TensorDictBase, size: int, trained: Sequence[bool] | None = None) -> list[list[int]]:
    """Return the rows that each rank fetches, by the metadata of all rows of a step.

    Groups stay whole, since they are fetched and packed as a whole. While a rank would have more than ``MAX_LOAD``
    times the mean number of tokens, one of its rows moves to another rank.

    Shapes: ``metadata [B]``.
    """
    lengths = [int(row[keys.TOKEN_COUNT]) for row in metadata.unbind(0)]
    groups = [int(row[keys.GROUP_ID]) for row in metadata.unbind(0)]
    shares: list[list[int]] = [[] for _ in range(size)]
    for kind in (True, False):
        rows = [i for i in range(len(lengths)) if (True if trained is None else bool(trained[i])) == kind]
        for share, added in zip(shares, _spread_groups(rows, lengths, groups, size), strict=True):
            share += added
    return [sorted(share) for share in shares]


def _spread_groups(rows: Sequence[int], lengths: list[int], groups: list[int], size: int) -> list[list[int]]:
    """Split rows over ranks in whole groups, then move single rows from the fullest to the emptiest rank."""
    members: dict[int, list[int]] = {}
    for i in rows:
        members.setdefault(groups[i], []).append(i)
    whole = list(members.values())
    shares = split_by_tokens([sum(lengths[i] for i in group) for group in whole], size)
    shares = [[i for g in share for i in whole[g]] for share in shares]
    loads = [sum(lengths[i] for i in share) for share in shares]
    while max(loads) * size > MAX_LOAD * sum(loads):
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[full] - loads[empty]
        moved = min(shares[full], key=lambda i: abs(gap - 2 * lengths[i]))
        if lengths[moved] >= gap:  # no move helps
            break
        shares[full].remove(moved)
        shares[empty].append(moved)
        loads[full], loads[empty] = loads[full] - lengths[moved], loads[empty] + lengths[moved]
    return shares


def _is_tokens(key: str | tuple[str, ...]) -> bool:
    """Return whether a key is that of the ids of a row, or of one of a pair's completions."""
    return isinstance(key, tuple) and key[-2:] == keys.TOKENS


def _subtrees(tokens: list[torch.Tensor], size: int) -> list[tuple[int, list[int]]]:
    """Return parts of the rows' token trie of at most a rank's share, or of one row, as distinct tokens and rows."""
    order, shared = prefix_order(tokens)
    lengths = [len(tokens[i]) for i in order]
    share = (sum(lengths) - sum(shared)) / size
    parts, whole = [(0, range(len(order)))] if order else [], []
    while parts:
        stem, part = parts.pop()
        # Leave out the stem that other parts also have: a rank computes it once
        count = lengths[part[0]] - stem + sum(lengths[k] - shared[k] for k in part[1:])
        if count <= share or len(part) == 1:
            whole.append((count, [order[k] for k in part]))
            continue
        # Cut where neighbors share the fewest tokens
        fewest = min(shared[k] for k in part[1:])
        cuts = [part[0], *(k for k in part[1:] if shared[k] == fewest), part[-1] + 1]
        parts += [(fewest, range(*bounds)) for bounds in pairwise(cuts)]
    return whole


class OwnRows:
    """Rows of a step on one rank, which has the metadata of all rows.

    Buffer and advantages work on metadata, which are equal on all ranks. Of each minibatch a rank then trains on its
    own rows::

        buffer.extend(metadata)
        for batch in minibatches(buffer, 4):
            accumulate(loss_fn, batch, rows_of=own.rows_of, ranks=ranks)

    Attributes:
        rows: ``[n]`` rows of this rank. Entries written there, such as scores, are those that the rank trains on.
    """

    def __init__(self, metadata: TensorDictBase, rows: TensorDictBase):
        ids = [trajectory_id(row) for row in metadata.unbind(0)]
        self.rows, self._ids = rows, frozenset(ids)
        self._rows = {trajectory_id(row): row for row in unbind_rows(rows)}
        if len(self._ids) < len(ids) or len(self._rows) < len(rows) or not self._ids.issuperset(self._rows):
            raise ValueError(
                f"the {len(rows)} rows must be different ones of the {len(ids)} rows of the step, by trajectory_id"
            )

    def rows_of(self, batch: TensorDictBase) -> TensorDictBase:
        """Return this rank's rows of a batch, with the entries that the batch has in addition.

        Shapes: ``batch [b]`` to ``[m]``.
        """
        local_rows = []
        for metadata in batch.unbind(0):
            number = trajectory_id(metadata)
            if number not in self._ids:
                raise ValueError(
                    f"trajectory_id={number} is not a row of this step; empty the buffer after each step, and set "
                    "normalize.groups so that no group waits for a later step"
                )
            if number in self._rows:
                row = copy_row(self._rows[number])
                known = METADATA_KEYS.union(row.keys())
                local_rows.append(set_entries(row, {key: value for key, value in metadata.items() if key not in known}))
        return stack_rows(local_rows)


def trajectory_id(row: TensorDictBase) -> int:
    """Return the id of a row's conversation."""
    return int(row[keys.TRAJECTORY_ID])
