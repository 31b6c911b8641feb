"""Merging of identical rows: a small model often samples the same completion many times."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, is_non_tensor

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import ragged, stack_rows

# Entries that no loss reads. All others are compared, also those that a user adds.
BOOKKEEPING: frozenset[NestedKey] = frozenset(
    {keys.GROUP_ID, keys.GROUP_SIZE, keys.PROMPT_ID, keys.SEED, keys.MAX_NEW_TOKENS}
    | {keys.POLICY_VERSION, keys.ACTION_VERSIONS}
)


def merge_identical(rows: TensorDictBase) -> TensorDictBase:
    """Merge rows whose tensors are all equal and count them in ``MULTIPLICITY``.

    The gradient stays the same if the loss multiplies a row's terms by its multiplicity. Where it divided by the number
    of rows, it must divide by the sum of multiplicities.

    Two rows are equal if they have the same entries with the same bits (NaN equals NaN). Group, prompt, seed, token
    limit, policy versions and text are not compared. A merged row keeps those of its first row.

    Args:
        rows: ragged batch of size ``[B]`` with token ids; not changed. Existing multiplicities are summed.

    Returns:
        At most ``B`` rows in order of first appearance. They share the tensors of ``rows`` and have ``MULTIPLICITY``
        (int64, ``[]``).

    Example:
        >>> from tensordict import TensorDict
        >>> row = TensorDict({("tokens", "full"): torch.tensor([1, 2])})
        >>> merge_identical(stack_rows([row, row]))["multiplicity"]
        tensor([2])
    """
    if not len(rows):
        return rows
    multiplicity = rows.get(keys.MULTIPLICITY, None)
    counts = [1] * len(rows) if multiplicity is None else multiplicity.reshape(-1).tolist()
    # Compare token ids first: most rows differ there, so their other entries need not be read
    same_tokens: dict[bytes, list[int]] = {}
    for i, tokens in enumerate(ragged(rows, keys.TOKENS)):
        same_tokens.setdefault(_bits(tokens), []).append(i)
    items, total = rows.unbind(0), {}
    for candidates in same_tokens.values():
        firsts: dict[frozenset, int] = {}
        for i in candidates:
            first = i if len(candidates) == 1 else firsts.setdefault(_content(items[i]), i)
            total[first] = total.get(first, 0) + counts[i]
    merged = []
    for i in sorted(total):
        row = items[i].copy()
        row.set(keys.MULTIPLICITY, torch.tensor(total[i]))
        merged.append(row)
    return stack_rows(merged)


def _content(row: TensorDictBase) -> frozenset:
    """Return the compared entries of a row in hashable form."""
    return frozenset(
        (key, value.dtype, value.shape, _bits(value))
        for key, value in row.items(True, True)
        if key not in BOOKKEEPING and key != keys.MULTIPLICITY and not is_non_tensor(value)
    )


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
