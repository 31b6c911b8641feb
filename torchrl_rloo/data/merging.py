"""Rows that a loss cannot tell apart, made one: a small model often samples the same completion many times."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, is_non_tensor

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows

# Where a row comes from, which no loss reads. Everything else is compared, entries of the user's own included.
BOOKKEEPING: frozenset[NestedKey] = frozenset(
    {keys.GROUP_ID, keys.GROUP_SIZE, keys.PROMPT_ID, keys.SEED, keys.MAX_NEW_TOKENS}
    | {keys.POLICY_VERSION, keys.ACTION_VERSIONS}
)


def merge_identical(rows: TensorDictBase) -> TensorDictBase:
    """Rows whose tensors are all equal become one, with ``MULTIPLICITY`` the number of rows that it stands for.

    A loss that multiplies a row's terms by its multiplicity, and divides by the sum of multiplicities where it divided
    by the number of rows, has the gradient that it had before. Rows are equal if they have the same entries with the
    same bits (NaN equals NaN). Which group, seed or policy version they come from, and their text, is not compared; a
    merged row has those of the first.

    Args:
        rows: batch size ``[B]``, ragged, with token ids; not changed. Multiplicities that they have are added up.

    Returns:
        At most ``B`` rows in order of first appearance, sharing the tensors of ``rows``; each has ``MULTIPLICITY``
        (int64).
    """
    if not len(rows):
        return rows
    own = rows.get(keys.MULTIPLICITY, None)
    counts = [1] * len(rows) if own is None else own.reshape(-1).tolist()
    same_tokens: dict[bytes, list[int]] = {}
    for i, tokens in enumerate(ragged(rows, keys.TOKENS)):
        same_tokens.setdefault(_bits(tokens), []).append(i)
    items, total = rows.unbind(0), {}
    for candidates in same_tokens.values():
        firsts: dict[frozenset, int] = {}
        for i in candidates:  # most rows are alone, and their other entries need not be looked at
            first = i if len(candidates) == 1 else firsts.setdefault(_content(items[i]), i)
            total[first] = total.get(first, 0) + counts[i]
    merged = []
    for i in sorted(total):
        row = items[i].copy()
        row.set(keys.MULTIPLICITY, torch.tensor(total[i]))
        merged.append(row)
    return stack_rows(merged)


def _content(row: TensorDictBase) -> frozenset:
    """All that makes a row what it is, hashable."""
    return frozenset(
        (key, value.dtype, value.shape, _bits(value))
        for key, value in row.items(True, True)
        if key not in BOOKKEEPING and key != keys.MULTIPLICITY and not is_non_tensor(value)
    )


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
