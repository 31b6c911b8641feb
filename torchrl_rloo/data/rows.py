"""Ragged rows: padding, unpadding, micro-batches and action tokens.

A batch of rows is a lazy stack of TensorDicts, one per trajectory, each with its own length. Only this module turns
them into padded tensors. It also merges identical rows: a small model often samples the same completion many times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
    lazy_stack,
)
from torch.nn.utils.rnn import pad_sequence

from torchrl_rloo.data import keys


def ragged(rows: TensorDictBase, key: NestedKey) -> list[torch.Tensor]:
    """Return the entry ``key`` of each row as a list of ``B`` tensors.

    Raises:
        KeyError: if the rows lack the key.

    Example:
        >>> rows = stack_rows([TensorDict(ids=torch.ones(n)) for n in (1, 2)])
        >>> ragged(rows, "ids")
        [tensor([1.]), tensor([1., 1.])]
    """
    values = rows.get(key, as_list=True)
    if values is None:
        raise KeyError(f"key={key!r} must be an entry of the rows; entries: {sorted(map(str, rows.keys(True, True)))}")
    return list(values.unbind(0)) if isinstance(values, torch.Tensor) else list(values)


def pad(values: Sequence[torch.Tensor], padding_value: float = 0, side: str = "right") -> torch.Tensor:
    """Pad ``B`` tensors of shape ``[T_i]`` to one ``[B, max T_i]`` tensor.

    Example:
        >>> pad([torch.tensor([1, 2]), torch.tensor([3])])
        tensor([[1, 2],
                [3, 0]])
    """
    return pad_sequence(list(values), batch_first=True, padding_value=padding_value, padding_side=side)


def unpad(padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Undo :func:`pad` on the right: return the first ``lengths[i]`` entries of each row of ``padded`` (``[B, T]``)."""
    return [row[:n] for row, n in zip(padded.unbind(0), lengths, strict=True)]


def stack_rows(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack rows (batch size ``[]`` each) to one ragged batch of size ``[B]``; without rows it has no entries."""
    rows = list(rows)
    return lazy_stack(rows, 0) if rows else TensorDict({}, [0])


def unbind_rows(rows: TensorDictBase) -> list[TensorDictBase]:
    """Return the single rows of a batch, which may be empty."""
    return list(rows.unbind(0)) if len(rows) else []


def placeholder_rows() -> TensorDictBase:
    """Return a row of two tokens, ``[1]``, for a rank without rows that takes part in a forward pass."""
    tokens, actions = torch.zeros(2, dtype=torch.int64), torch.tensor([False, True])
    origin = torch.tensor(keys.PLACEHOLDER)
    return stack_rows([TensorDict({keys.TOKENS: tokens, keys.ACTION_MASK: actions, keys.ORIGIN: origin}, [])])


def concatenate(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Concatenate ragged batches in order; the result shares their tensors."""
    return stack_rows([row for batch in batches for row in batch.unbind(0)])


def prefix_order(tokens: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Sort rows so that each follows the row with which it shares the most leading tokens.

    This is a depth-first walk of the rows' token trie: the trie has as many nodes as the rows have tokens that are not
    shared with the row before them. A row that begins another comes after it.
    """
    rows = [t.cpu().numpy().astype(">i8") for t in tokens]  # big-endian bytes sort as the ids do
    order = sorted(range(len(rows)), key=[row.tobytes() for row in rows].__getitem__, reverse=True)
    shared = [0] * len(rows)
    for k in range(1, len(order)):
        a, b = rows[order[k - 1]], rows[order[k]]
        length = min(len(a), len(b))
        differs = a[:length] != b[:length]
        shared[k] = int(differs.argmax()) if differs.any() else length
    return order, shared


def micro_batches(
    rows: TensorDictBase,
    size: int | None = None,
    *,
    max_tokens: int | None = None,
    packing: Literal["none", "packed", "shared_prefix"] = "none",
) -> Iterator[TensorDictBase]:
    """Split a batch into pieces of at most ``size`` rows and ``max_tokens`` tokens.

    The longest rows come first. With ``packing="shared_prefix"``, rows that begin alike stay together instead.

    A batch within the limits is yielded unchanged. So is an empty batch: its loss has zero gradients, so the
    optimizer still takes its step.
    """
    for name, limit in (("size", size), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be at least 1; use None for no limit")
    if packing not in PACKINGS:
        raise ValueError(f"packing={packing!r} must be one of {PACKINGS}")
    if not len(rows) or (max_tokens is None and (size is None or size >= len(rows))):
        yield rows
        return
    pieces = list(_pieces(rows, size or len(rows), math.inf if max_tokens is None else max_tokens, packing))
    for piece in pieces:
        yield rows if len(pieces) == 1 else stack_rows([rows[i] for i in piece])


PACKINGS = ("none", "packed", "shared_prefix")


def _pieces(rows: TensorDictBase, size: int, max_tokens: float, packing: str) -> Iterator[list[int]]:
    """Yield the row indices of each piece."""
    lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
    order, shared = sorted(range(len(rows)), key=[-n for n in lengths].__getitem__), [0] * len(rows)
    if packing == "shared_prefix":
        order, shared = prefix_order([_with_image(row) for row in rows.unbind(0)])

    # Fill pieces greedily up to the limits
    piece: list[int] = []
    tokens = 0
    for i, prefix in zip(order, shared, strict=True):
        if packing == "none":
            added = lengths[piece[0] if piece else i]  # padded to the first row, the longest
        else:
            added = lengths[i] - prefix
        if piece and (len(piece) == size or tokens + added > max_tokens):
            yield piece
            piece, tokens, added = [], 0, lengths[i]
        piece.append(i)
        tokens += added
    yield piece


def _with_image(row: TensorDictBase) -> torch.Tensor:
    """Return the ids of a row, the first of which differs between rows of different first images."""
    tokens, images = row[keys.TOKENS], entry_of(row, keys.IMAGES)
    if images is None or not len(images):
        return tokens
    first = torch.tensor([int.from_bytes(bytes(images[0, :7].tolist()), "big")], device=tokens.device)
    return torch.cat([first, tokens[1:]])


def limit_length(rows: TensorDictBase, max_length: float, truncate: bool = False) -> list[TensorDictBase]:
    """Return the rows, or preference pairs, of at most ``max_length`` tokens.

    With ``truncate``, a longer row loses the beginning of its prompt if that suffices and it has no images. The prompt
    ends before the first action token; without action tokens, it is what both completions of a pair begin with. Both
    rows of a pair lose the same tokens, so that their prompts stay equal.
    """
    kept = []
    for row in unbind_rows(rows):
        parts = [row] if keys.TOKENS in row.keys(True) else [row["chosen"], row["rejected"]]
        excess = max(len(part[keys.TOKENS]) for part in parts) - max_length
        if excess > 0 and truncate and entry_of(parts[0], keys.IMAGES) is None:
            masks = [part[keys.ACTION_MASK] for part in parts if keys.ACTION_MASK in part.keys(True)]
            shared = max(prefix_order([part[keys.TOKENS] for part in parts])[1])
            if excess < min((int(mask.int().argmax()) for mask in masks), default=shared):
                for part, key in product(parts, (keys.TOKENS, keys.ACTION_MASK)):
                    if key in part.keys(True):
                        part.set(key, part[key][int(excess) :])
                excess = 0
        kept += [row] if excess <= 0 else []
    return kept


def step_indices(step: int, number: int, size: int, seed: int) -> list[int]:
    """Return the rows of a step, counted from 1; each epoch has a new order of ``number`` rows and none twice."""
    epoch, k = divmod(step - 1, number // size)
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[k * size : (k + 1) * size].tolist()


def tensor_rows(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows as plain TensorDicts without text, as a replay buffer and a loss need them.

    Conversations, queries and text columns are dropped: in a buffer each costs more than the tokens.

    Args:
        rows: batch of size ``[B]``; not changed.

    Returns:
        Ragged rows, batch size ``[B]``, that share the tensors of ``rows``.
    """
    return stack_rows([tensor_row(row) for row in rows.unbind(0)])


def tensor_row(row: TensorDictBase) -> TensorDictBase:
    """Return one row without text; see :func:`tensor_rows`."""
    kept = {k: _plain(v) for k, v in row.items() if not is_non_tensor(v) and k not in _CONVERSATION_KEYS}
    outcome, extra = keys.LOG_EXTRA
    if outcome in kept and extra in kept[outcome].keys():
        kept[outcome] = kept[outcome].exclude(extra)
    return TensorDict._new_unsafe(kept, batch_size=_NO_SHAPE)


def _plain(value: Any) -> Any:
    """Return a tensorclass as a TensorDict: a buffer clones every row it takes, and a tensorclass costs 30 us."""
    return value._tensordict if is_tensorclass(value) else value


_CONVERSATION_KEYS = ("history", "text")


class ActionTokens(NamedTuple):
    """Token ids of ``B`` rows and masks of their action tokens."""

    tokens: torch.Tensor  # [B, T] int64 ids, padded on the right
    action_mask: torch.Tensor  # [B, T] bool, True on action tokens, False on all other tokens and padding
    mask: torch.Tensor  # [B, A] bool, True on the first A_i entries of a row with A_i action tokens


def action_tokens(rows: TensorDictBase, padding_id: int = 0, *, sampled: bool = False) -> ActionTokens:
    """Pad the rows' tokens and locate their action tokens.

    Args:
        rows: batch of size ``[B]`` with token ids and action masks.
        padding_id: id of padding tokens.
        sampled: True also locates the tokens that left the action mask because they were too stale.

    Raises:
        ValueError: if a row's first token is an action token. No token precedes it, so it has no log-prob.
    """
    tokens = pad(ragged(rows, keys.TOKENS), padding_id)
    masks = ragged(rows, keys.ACTION_MASK)
    if sampled:
        whole = (row.get(keys.SAMPLED_MASK, None) for row in unbind_rows(rows))
        masks = [kept if mask is None else mask for kept, mask in zip(masks, whole, strict=True)]
    action_mask = pad(masks, False)
    if action_mask[:, :1].any():
        raise ValueError("the first token of a row is an action token; give every prompt at least one token")
    counts = action_mask.sum(1)
    mask = torch.arange(int(counts.max()) if len(counts) else 0, device=counts.device) < counts[:, None]
    return ActionTokens(tokens, action_mask, mask)


def gather_actions(values: Sequence[torch.Tensor], actions: ActionTokens) -> torch.Tensor:
    """Gather per-token values (``B`` tensors ``[T_i]``) at action tokens into ``[B, A]``, 0 elsewhere."""
    return place_actions(pad(values).to(actions.tokens.device)[actions.action_mask], actions)


def place_actions(flat: torch.Tensor, actions: ActionTokens) -> torch.Tensor:
    """Place the values of all action tokens in row order, ``[N]``, into ``[B, A]``, 0 elsewhere; differentiable."""
    return torch.zeros_like(actions.mask, dtype=flat.dtype).masked_scatter(actions.mask, flat)


def spread_actions(values: torch.Tensor, rows: TensorDictBase, actions: ActionTokens) -> list[torch.Tensor]:
    """Spread values at action tokens, ``[B, A]``, to ``B`` tensors of the rows' lengths ``[T_i]``, 0 elsewhere."""
    full = torch.zeros_like(actions.tokens, dtype=values.dtype)
    full = full.masked_scatter(actions.action_mask, values[actions.mask])
    tokens = ragged(rows, keys.TOKENS)
    return unpad(full.to(tokens[0].device), [len(t) for t in tokens])


def to_lazy_stack(rows: TensorDictBase) -> LazyStackedTensorDict:
    """Return the batch as a lazy stack, on which entries of different lengths can be set."""
    return rows if isinstance(rows, LazyStackedTensorDict) else rows.to_lazystack(0)


def make_tensorclass(cls: type, **tensors: torch.Tensor):
    """Make one row's ``Tokens``, ``Masks`` or ``LogProbs`` without checks that cost more than the data."""
    absent = _ABSENT.get(names := (cls, *tensors))
    if absent is None:
        absent = _ABSENT[names] = dict.fromkeys(cls.__expected_keys__ - tensors.keys()) | {"padded": False}
    return make_unchecked(cls, tensors, dict(absent))


def make_tensorclass_like(entry: TensorDictBase, **tensors: torch.Tensor):
    """Make one row's tokens, masks or log-probs of the type of ``entry``: a tensorclass or a TensorDict."""
    if is_tensorclass(entry):
        return make_tensorclass(type(entry), **tensors)
    return TensorDict._new_unsafe(tensors, batch_size=_NO_SHAPE)


def copy_row(row: TensorDictBase) -> TensorDict:
    """Copy one row, but not its tensors; ``row.copy()`` takes ten times as long."""
    entries = dict(row._tensordict if type(row) is TensorDict else row.items())
    for key, value in entries.items():
        if type(value) in _LEAVES or is_non_tensor(value) or isinstance(value, torch.Tensor):
            continue
        if is_tensorclass(value):
            entries[key] = make_unchecked(type(value), dict(value._tensordict.items()), dict(value._non_tensordict))
        else:
            entries[key] = copy_row(value)
    return TensorDict._new_unsafe(entries, batch_size=_NO_SHAPE)


def entry_of(row: TensorDictBase, key: NestedKey, default: Any = None) -> Any:
    """Return a tensor entry of one row, or a default; ``row.get(key, default)`` takes five to ten times as long."""
    if type(key) is not str:
        for name in key[:-1]:
            if (row := entry_of(row, name)) is None:
                return default
        key = key[-1]
    entries = row.__dict__.get("_tensordict")
    if type(entries) is TensorDict:  # those of a tensorclass
        entries = entries._tensordict
    return entries.get(key, default) if type(entries) is dict else row.get(key, default)


def rows_to_reset(rows: TensorDictBase) -> list[bool]:
    """Return for each row of ``env.reset(rows)`` whether it is reset: all of them without a ``"_reset"``."""
    mask = rows.get("_reset", None)
    return [True] * len(rows) if mask is None else mask.reshape(len(rows), -1).any(1).tolist()


def make_non_tensor(value: Any) -> NonTensorData:
    """Make a non-tensor entry of a row; ``NonTensorData(value)`` takes ten times as long."""
    entry = make_unchecked(NonTensorData, {}, _NON_TENSOR_TEMPLATE._non_tensordict | {"data": value})
    entry.__dict__["_is_initialized"] = True
    return entry


def make_unchecked(cls: type, tensors: dict[str, Any], values: dict[str, Any]):
    """Make a tensorclass without batch dimensions of its entries and its non-tensor fields, without checks."""
    instance = cls.__new__(cls)
    instance.__dict__["_tensordict"] = TensorDict._new_unsafe(tensors, batch_size=_NO_SHAPE)
    instance.__dict__["_non_tensordict"] = values
    return instance


def set_entries(row: TensorDictBase, entries: dict[str, Any]) -> TensorDictBase:
    """Set entries of one row in place without the checks of ``TensorDict.set``, which unbatched values do not need."""
    if type(row) is TensorDict and not row.is_locked:
        row._tensordict.update(entries)
        return row
    return row.update(entries)


def drop_entries(row: TensorDictBase, names: Collection[str]) -> TensorDictBase:
    """Return a shallow copy of one row without some entries."""
    entries = row._tensordict if type(row) is TensorDict else row
    return TensorDict._new_unsafe({k: v for k, v in entries.items() if k not in names}, batch_size=_NO_SHAPE)


def non_tensor_value(row: TensorDictBase, key: str) -> Any:
    """Return ``row[key]`` of a non-tensor entry; the row's own lookup takes ten times as long."""
    entry = row._get_str(key, None) if type(row) is TensorDict else None
    return entry._non_tensordict["data"] if type(entry) is NonTensorData else row[key]


_NO_SHAPE = torch.Size([])
_LEAVES = (torch.Tensor, NonTensorData)  # the usual ones, which need no slower check
_ABSENT: dict[tuple, dict[str, Any]] = {}  # non-tensor fields of a tensorclass by its class and tensors
_NON_TENSOR_TEMPLATE = NonTensorData("")  # the first instance completes the class


# Entries that no loss reads. All others are compared, also those that a user adds.
BOOKKEEPING: frozenset[NestedKey] = frozenset(
    {keys.GROUP_ID, keys.GROUP_SIZE, keys.PROMPT_ID, keys.SEED, keys.MAX_NEW_TOKENS}
    | {keys.POLICY_VERSION, keys.ACTION_VERSIONS, keys.SAMPLED_MASK}
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
