"""Metadata of rows: what advantages, assignments and metrics read, without tokens and text.

Rows stay in the process, or the object store, where they were sampled. Their metadata travel to the process that
decides about them.
"""

from __future__ import annotations

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_non_tensor

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import sampled_versions
from torchrl_rloo.functional.kl import k1
from torchrl_rloo.functional.statistics import ngram_statistics, sequence_hash

# Entries that grow with the number of tokens
_TOKEN_ENTRIES = {"tokens", "masks", "log_probs", "text", "history", "support", keys.PREVIOUS_SEGMENTS}
_TOKEN_ENTRIES |= {"ref_log_probs", "token_rewards", keys.ACTION_VERSIONS, "proximal_log_probs", "proximal_entropy"}
TOKEN_SUMS = (keys.ACTION_COUNT, keys.SURPRISAL, keys.KL_TO_REF)
TOKEN_STATISTICS = (*TOKEN_SUMS, keys.COMPLETION_HASH, keys.NGRAM_SKETCH, keys.REPETITION)
METADATA_KEYS = frozenset({keys.TOKEN_COUNT, keys.VERSION_COUNTS, *TOKEN_STATISTICS})  # of metadata only


def metadata_of(rows: TensorDictBase) -> LazyStackedTensorDict:
    """Return the metadata of finished rows.

    Args:
        rows: ``[B]`` finished rows, with or without text.

    Returns:
        ``[B]`` rows with the tensors of ``rows`` that do not grow with their tokens, ``keys.TOKEN_COUNT``,
        ``keys.VERSION_COUNTS`` and the entries of :func:`token_statistics`. A policy that reports no version per token
        has that of the row. The only text is ``keys.TASK``.

    Example:
        >>> from torchrl_rloo.data import stack_rows
        >>> row = TensorDict(
        ...     {
        ...         keys.TOKENS: torch.arange(5),
        ...         keys.ACTION_MASK: torch.tensor([0, 0, 1, 1, 1]).bool(),
        ...         keys.POLICY_VERSION: torch.tensor(7),
        ...         keys.REWARD: torch.ones(1, 1),
        ...     },
        ...     [],
        ... )
        >>> metadata = metadata_of(stack_rows([row]))[0]
        >>> metadata[keys.TOKEN_COUNT].item(), metadata[keys.VERSION_COUNTS].tolist(), metadata[keys.REWARD].item()
        (5, [[7, 3]], 1.0)
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

    Args:
        row: finished row, or its metadata.

    Returns:
        ``[V, 2]`` int64, in ascending order. A policy that reports no version per token has that of the row.
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

    Args:
        row: finished row.

    Returns:
        ``[]`` each: ``keys.ACTION_COUNT``, ``keys.SURPRISAL`` if the row has behavior log-probs, ``keys.KL_TO_REF`` if
        it also has those of the reference, ``keys.COMPLETION_HASH`` (int64) and ``keys.REPETITION``, the share of the
        n-grams that are repetitions. ``[K]`` int64: ``keys.NGRAM_SKETCH``.
    """
    mask = row[keys.ACTION_MASK]
    found = {keys.ACTION_COUNT: mask.sum()}
    sampler, reference = row.get(keys.LOG_PROBS, None), row.get(keys.REF_LOG_PROBS, None)
    if sampler is not None:
        found[keys.SURPRISAL] = -sampler[mask].sum()
        if reference is not None:
            found[keys.KL_TO_REF] = k1(sampler[mask], reference[mask]).sum()
    ids = row[keys.TOKENS][mask]
    found[keys.COMPLETION_HASH] = sequence_hash(ids)
    found[keys.NGRAM_SKETCH], found[keys.REPETITION] = ngram_statistics(ids)
    return found


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
