"""Ragged rows: the one place that knows how they become a padded batch and come apart again.

A batch of rows is a lazy stack of TensorDicts, one per trajectory, each with its own length. Everything that a model
or a formula needs as a rectangle is made here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
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
    """The entry ``key`` of each row, as a list of ``B`` tensors.

    Raises:
        KeyError: if the rows lack the key.
    """
    values = rows.get(key, as_list=True)
    if values is None:
        raise KeyError(f"rows have no entry {key!r}; they have {sorted(map(str, rows.keys(True, True)))}")
    return list(values.unbind(0)) if isinstance(values, torch.Tensor) else list(values)


def pad(values: Sequence[torch.Tensor], padding_value: float = 0, side: str = "right") -> torch.Tensor:
    """``B`` tensors of shape ``[T_i]`` as one ``[B, max T_i]`` tensor."""
    return pad_sequence(list(values), batch_first=True, padding_value=padding_value, padding_side=side)


def unpad(padded: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """The first ``lengths[i]`` entries of each row of ``padded`` ``[B, T]``: undoes :func:`pad` on the right."""
    return [row[:n] for row, n in zip(padded.unbind(0), lengths, strict=True)]


def stack_rows(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    """Rows (batch size ``[]`` each) as one ragged batch of size ``[B]``."""
    return lazy_stack(list(rows), 0)


def concatenate(batches: Sequence[TensorDictBase]) -> TensorDictBase:
    """Several ragged batches as one, in order, sharing their tensors."""
    return stack_rows([row for batch in batches for row in batch.unbind(0)])


def prompt_lengths(action_masks: Sequence[torch.Tensor]) -> list[int]:
    """How many tokens come before the first action token of ``B`` rows, bool ``[T_i]`` each; all, without one."""
    mask = pad(action_masks, False)
    lengths = torch.tensor([len(m) for m in action_masks], device=mask.device)
    return torch.where(mask.any(1), mask.to(torch.uint8).argmax(1), lengths).tolist()


def prompt_groups(tokens: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the rows that begin with the same prompt, together; in order of first appearance.

    Args:
        tokens: ids of ``B`` rows, ``[T_i]`` each, on the CPU.
        lengths: of their prompts.
    """
    groups: dict[bytes, list[int]] = {}
    for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
        groups.setdefault(row[:length].numpy().tobytes(), []).append(i)
    return list(groups.values())


def micro_batches(
    rows: TensorDictBase,
    size: int | None = None,
    *,
    max_tokens: int | None = None,
    packing: Literal["none", "packed", "shared_prefix"] = "none",
) -> Iterator[TensorDictBase]:
    """Splits a batch into pieces of at most ``size`` rows and ``max_tokens`` tokens, longest rows first.

    Yields the batch as it is where there is nothing to split, and an empty batch, too: its loss has a gradient of
    zeros, with which the optimizer takes the step that it would have taken.

    Args:
        rows: batch size ``[B]``.
        size: most rows of a piece; None for any number.
        max_tokens: most tokens of a piece, as its forward pass counts them; None for any number. A row that exceeds it
            alone makes a piece of its own.
        packing: what the forward pass makes of a piece. ``"none"``: padded, rows times the longest of them are counted.
            ``"packed"``: the sum of their lengths. ``"shared_prefix"``: the same, with a prompt that several rows begin
            with counted once; such rows stay together as far as the limits allow.

    Raises:
        ValueError: for a limit below 1 or an unknown packing.
    """
    for name, limit in (("size", size), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name}={limit} must be at least 1, or None for no limit")
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
    """Indices of the rows of each piece."""
    lengths = [len(t) for t in ragged(rows, keys.TOKENS)]
    order = sorted(range(len(rows)), key=[-n for n in lengths].__getitem__)
    prompt, group = [0] * len(rows), list(range(len(rows)))  # what a row shares, and with whom
    if packing == "shared_prefix":
        prompt = prompt_lengths(ragged(rows, keys.ACTION_MASK))
        groups = prompt_groups([t.cpu() for t in ragged(rows, keys.TOKENS)], prompt)
        group = [g for _, g in sorted((i, g) for g, members in enumerate(groups) for i in members)]
        rank = {g: k for k, g in enumerate(dict.fromkeys(group[i] for i in order))}  # that of its longest row
        order.sort(key=lambda i: rank[group[i]])
    piece: list[int] = []
    tokens = 0
    for i in order:
        if packing == "none":
            more = lengths[piece[0] if piece else i]  # the first is the longest
        else:
            more = lengths[i] - (prompt[i] if piece and group[piece[-1]] == group[i] else 0)
        if piece and (len(piece) == size or tokens + more > max_tokens):
            yield piece
            piece, tokens, more = [], 0, lengths[i]
        piece.append(i)
        tokens += more
    yield piece


def tensor_rows(rows: TensorDictBase) -> TensorDictBase:
    """Return the rows without their text, as plain TensorDicts: what a replay buffer and a loss need.

    Conversations, queries and text columns stay with the environment: in a buffer each costs more than its tokens.
    """
    return stack_rows([_tensor_row(row) for row in rows.unbind(0)])


def _tensor_row(row: TensorDictBase) -> TensorDictBase:
    kept = {k: _plain(v) for k, v in row.items() if not is_non_tensor(v) and k not in _CONVERSATION}
    outcome, extra = keys.LOG_EXTRA
    if outcome in kept and extra in kept[outcome].keys():
        kept[outcome] = kept[outcome].exclude(extra)
    return TensorDict._new_unsafe(kept, batch_size=_NO_SHAPE)


def _plain(value: Any) -> Any:
    """Return a tensorclass as a TensorDict: a buffer clones every row it takes, and a tensorclass costs 30 us."""
    return value._tensordict if is_tensorclass(value) else value


_CONVERSATION = ("history", "text")


class ActionTokens(NamedTuple):
    """The action tokens of ``B`` rows, and where they lie.

    Attributes:
        tokens: ``[B, T]`` ids, padded on the right.
        action_mask: ``[B, T]`` bool, True on action tokens, False on padding.
        mask: ``[B, A]`` bool: how many action tokens each row has, left-aligned.
    """

    tokens: torch.Tensor
    action_mask: torch.Tensor
    mask: torch.Tensor


def action_tokens(rows: TensorDictBase, padding_id: int = 0) -> ActionTokens:
    """Pads the rows' tokens and finds their action tokens.

    Raises:
        ValueError: if a row's first token is an action token: nothing precedes it, so it has no log-prob.
    """
    tokens = pad(ragged(rows, keys.TOKENS), padding_id)
    action_mask = pad(ragged(rows, keys.ACTION_MASK), False)
    if action_mask[:, :1].any():
        raise ValueError("the first token of a row is an action token, but a policy needs at least one prompt token")
    counts = action_mask.sum(1)
    mask = torch.arange(int(counts.max()) if len(counts) else 0, device=counts.device) < counts[:, None]
    return ActionTokens(tokens, action_mask, mask)


def gather_actions(values: Sequence[torch.Tensor], actions: ActionTokens) -> torch.Tensor:
    """Per-token values of each row (``B`` tensors ``[T_i]``) at its action tokens only, ``[B, A]``, 0 elsewhere."""
    return place_actions(pad(values).to(actions.tokens.device)[actions.action_mask], actions)


def place_actions(flat: torch.Tensor, actions: ActionTokens) -> torch.Tensor:
    """Values of all action tokens in row order, ``[N]``, as ``[B, A]``; 0 elsewhere. Differentiable."""
    return torch.zeros_like(actions.mask, dtype=flat.dtype).masked_scatter(actions.mask, flat)


def spread_actions(values: torch.Tensor, rows: TensorDictBase, actions: ActionTokens) -> list[torch.Tensor]:
    """Values at action tokens ``[B, A]`` as ``B`` tensors of each row's length ``[T_i]``, 0 on all other tokens."""
    full = torch.zeros_like(actions.tokens, dtype=values.dtype)
    full = full.masked_scatter(actions.action_mask, values[actions.mask])
    tokens = ragged(rows, keys.TOKENS)
    return unpad(full.to(tokens[0].device), [len(t) for t in tokens])


def as_lazy(rows: TensorDictBase) -> LazyStackedTensorDict:
    """The batch as a lazy stack, so that entries of different lengths can be set on it."""
    return rows if isinstance(rows, LazyStackedTensorDict) else rows.to_lazystack(0)


def collection(cls: type, **tensors: torch.Tensor):
    """Make one row's ``Tokens``, ``Masks`` or ``LogProbs`` without checks that cost more than the data."""
    absent = dict.fromkeys(cls.__expected_keys__ - tensors.keys())
    return _tensorclass(cls, tensors, absent | {"padded": False})


def collection_like(entry: TensorDictBase, **tensors: torch.Tensor):
    """Make one row's tokens, masks or log-probs of the kind that ``entry`` has: a tensorclass or a TensorDict."""
    if is_tensorclass(entry):
        return collection(type(entry), **tensors)
    return TensorDict._new_unsafe(tensors, batch_size=_NO_SHAPE)


def non_tensor(value: Any) -> NonTensorData:
    """Make a row's entry of any value; ``NonTensorData(value)`` takes ten times as long."""
    made = _tensorclass(NonTensorData, {}, _TEXT._non_tensordict | {"data": value})
    made.__dict__["_is_initialized"] = True
    return made


def _tensorclass(cls: type, tensors: dict[str, torch.Tensor], values: dict[str, Any]):
    made = cls.__new__(cls)
    made.__dict__["_tensordict"] = TensorDict._new_unsafe(tensors, batch_size=_NO_SHAPE)
    made.__dict__["_non_tensordict"] = values
    return made


def put(row: TensorDictBase, entries: dict[str, Any]) -> TensorDictBase:
    """Set entries of one row in place, without the checks of ``TensorDict.set``: values have no device or batch."""
    if type(row) is TensorDict and not row.is_locked:
        row._tensordict.update(entries)
        return row
    return row.update(entries)


def without(row: TensorDictBase, names: Collection[str]) -> TensorDictBase:
    """Copy one row, its values shared, without some entries."""
    return TensorDict._new_unsafe({k: v for k, v in row.items() if k not in names}, batch_size=_NO_SHAPE)


def value_of(row: TensorDictBase, key: str) -> Any:
    """Return ``row[key]`` of an entry that is no tensor; the row's own lookup takes ten times as long."""
    entry = row._get_str(key, None) if type(row) is TensorDict else None
    return entry._non_tensordict["data"] if type(entry) is NonTensorData else row[key]


_NO_SHAPE = torch.Size([])
_TEXT = NonTensorData("")  # the first of its class completes the class
