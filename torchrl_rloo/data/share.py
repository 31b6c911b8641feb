"""Shares of ranks: the rows of an optimizer step, split over ranks by tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import prefix_order, ragged

MAX_LOAD = 1.05  # largest number of tokens of a rank before rows are moved, as a multiple of the mean


def split_by_tokens(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Split items over ranks so that each rank has nearly equally many tokens.

    The longest item goes first, always to the rank with the fewest tokens (Graham 1969, *Bounds on multiprocessing
    timing anomalies*): no rank has more than 4/3 of the smallest possible maximum.

    Args:
        lengths: tokens of each item.
        size: number of ranks.

    Returns:
        Ascending indices of the items of each rank; a rank may have none.

    Example:
        >>> split_by_tokens([5, 3, 3, 2], 2)
        [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, rank) for rank in range(size)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rank))
    return [sorted(share) for share in shares]


def shares_of(rows: TensorDictBase, size: int, packing: str = "none") -> list[list[int]]:
    """Return the rows that each rank works on.

    Args:
        rows: all rows or pairs of a step, equal on all ranks, batch size ``[B]``.
        size: number of ranks.
        packing: layout of the scorer. With ``"shared_prefix"``, rows that begin alike stay on one rank, unless their
            distinct tokens are more than a rank's share.

    Returns:
        Ascending indices of the rows of each rank; a rank may have none.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.data import stack_rows
        >>> rows = stack_rows([TensorDict({keys.TOKENS: torch.arange(n)}, []) for n in (5, 3, 3, 2)])
        >>> shares_of(rows, 2)
        [[0, 3], [1, 2]]
    """
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

    Args:
        metadata: ``[B]`` rows of :func:`~torchrl_rloo.data.metadata.metadata_of`, equal on all ranks.
        size: number of ranks.
        trained: ``B`` flags, False for rows that are likely to be dropped before the forward pass. Both kinds are
            balanced separately. None takes all as trained.

    Returns:
        Ascending indices of the rows of each rank; a rank may have none.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_rloo.data import stack_rows
        >>> rows = [{keys.GROUP_ID: torch.tensor(i // 2), keys.TOKEN_COUNT: torch.tensor(9)} for i in range(4)]
        >>> shares_of_groups(stack_rows([TensorDict(row, []) for row in rows]), 2)
        [[0, 1], [2, 3]]
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
        parts += [(fewest, range(*each)) for each in pairwise(cuts)]
    return whole
