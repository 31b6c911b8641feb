"""PackedRows: rows as few flat tensors, to send them to another process.

A lazy stack of ragged rows pickles slowly, entry by entry. Packed rows have one tensor per key, whose pickle is its
bytes. With pickle protocol 5 these bytes may stay out of band, so an object store can share them without a copy.

Checkpoints take rows as nested dicts of tensors and plain values instead (:func:`to_plain`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data.rows import make_non_tensor, make_tensorclass, make_unchecked, stack_rows


class PackedRows(NamedTuple):
    """``B`` rows. Tensors lie one after the other in the order of the rows; rows without a key are left out of it.

    Attributes:
        tensors: flat tensor of each key, ``[N]``: the entries of its ``n`` rows, on the CPU.
        shapes: shapes of these entries, int64 ``[n, number of dimensions]``. For one dimension these are lengths.
        columns: non-tensor values of each key, ``n`` each: text, messages, lists, ``History``.
        layouts: different structures of the rows: names, nesting and classes of their entries.
        layout_of_row: index of each row's layout, ``B`` numbers.
    """

    tensors: dict[NestedKey, torch.Tensor]
    shapes: dict[NestedKey, torch.Tensor]
    columns: dict[NestedKey, list[Any]]
    layouts: list[Layout]
    layout_of_row: list[int]

    def __reduce_ex__(self, protocol: int) -> tuple:
        arrays = {key: (value.dtype, _to_bytes(value)) for key, value in self.tensors.items()}
        shapes = {key: value.numpy() for key, value in self.shapes.items()}
        return _restore, (arrays, shapes, *self[2:])


class Layout(NamedTuple):
    """Structure of a TensorDict, or of a tensorclass if ``cls`` is given."""

    batch_size: tuple[int, ...]
    entries: tuple[tuple[str, str | Layout], ...]  # "tensor", "column" (NonTensorData), "object", or a nested layout
    cls: type | None = None
    values: tuple[tuple[str, Any], ...] | None = None  # non-tensor fields of a tensorclass; None: they are in a column


def pack_rows(rows: TensorDictBase) -> PackedRows:
    """Pack rows. The result shares no memory with them, so its pickle contains nothing else.

    Args:
        rows: batch of size ``[B]``, at least one row. Rows may have different keys.

    Raises:
        ValueError: if there are no rows, or a key has several dtypes or numbers of dimensions.

    Example:
        >>> from torchrl_rloo.data.rows import stack_rows
        >>> rows = stack_rows([TensorDict(ids=torch.arange(n), text=NonTensorData("a" * n)) for n in (3, 1)])
        >>> packed = pack_rows(rows)
        >>> packed.tensors["ids"], packed.shapes["ids"].tolist(), packed.columns["text"]
        (tensor([0, 1, 2, 0]), [[3], [1]], ['aaa', 'a'])
        >>> unpack_rows(packed)[1]["ids"]
        tensor([0])
    """
    if not len(rows):
        raise ValueError("there are no rows to pack; pack at least one")
    # Collect the values of each key over the rows
    tensors: dict[NestedKey, list[torch.Tensor]] = {}
    columns: dict[NestedKey, list[Any]] = {}
    layouts: dict[Layout, int] = {}
    layout_of_row = []
    for row in rows.unbind(0):
        layout = _take(row, (), tensors, columns)
        layout_of_row.append(layouts.setdefault(layout, len(layouts)))
    # Concatenate them, also a single one, since it may be part of a larger storage
    flat, shapes = {}, {}
    for key, values in tensors.items():
        if len(kinds := {(value.dtype, value.dim()) for value in values}) > 1:
            raise ValueError(f"key={key!r} must have one dtype and one number of dimensions in all rows, got {kinds}")
        flat[key] = torch.cat([value.detach().reshape(-1) for value in values]).cpu()
        shapes[key] = torch.tensor([value.shape for value in values], dtype=torch.int64)
    return PackedRows(flat, shapes, columns, list(layouts), layout_of_row)


def unpack_rows(packed: PackedRows) -> LazyStackedTensorDict:
    """Return the rows, whose tensors are views of the packed ones.

    Do not write to these tensors in place: they may lie in memory shared with other processes. To send the rows on,
    pack them again, since the pickle of a view contains the whole tensor.

    Args:
        packed: packed rows.

    Returns:
        Lazy stack of batch size ``[B]`` with the rows' TensorDicts and tensorclasses.
    """
    values = {key: _split(flat, packed.shapes[key]) for key, flat in packed.tensors.items()}
    columns = {key: iter(column) for key, column in packed.columns.items()}
    return stack_rows([_build(packed.layouts[i], (), values, columns) for i in packed.layout_of_row])


def _take(
    entry: TensorDictBase, path: tuple[str, ...], tensors: dict[NestedKey, list], columns: dict[NestedKey, list]
) -> Layout:
    """Append the values of a TensorDict to the lists of their keys, and return its structure."""
    entries = []
    for name, value in entry.items():
        key = (*path, name)
        if isinstance(value, torch.Tensor):
            tensors.setdefault(_short(key), []).append(value)
            entries.append((name, "tensor"))
        elif type(value) is NonTensorData and not value.batch_size:
            columns.setdefault(_short(key), []).append(value.data)
            entries.append((name, "column"))
        elif type(value) is TensorDict:
            entries.append((name, _take(value, key, tensors, columns)))
        elif is_tensorclass(value) and type(value._tensordict) is TensorDict and not value.batch_size:
            entries.append((name, _take_tensorclass(value, key, tensors, columns)))
        else:  # such as a History, which is a stack of messages
            columns.setdefault(_short(key), []).append(value)
            entries.append((name, "object"))
    return Layout(tuple(entry.batch_size), tuple(entries))


def _take_tensorclass(value: Any, key: tuple[str, ...], tensors: dict, columns: dict) -> Layout:
    layout, fields = _take(value._tensordict, key, tensors, columns), value._non_tensordict
    # Fields that are not text are the same in most rows, and belong to the structure
    if all(field is None or isinstance(field, bool) for field in fields.values()):
        return layout._replace(cls=type(value), values=tuple(fields.items()))
    columns.setdefault((*key, _FIELDS), []).append(dict(fields))
    return layout._replace(cls=type(value))


def _build(
    layout: Layout, path: tuple[str, ...], values: Mapping[NestedKey, Iterator], columns: Mapping[NestedKey, Iterator]
) -> Any:
    """Build a TensorDict or a tensorclass from the next values of its keys."""
    entries = {}
    for name, kind in layout.entries:
        key = (*path, name)
        if kind == "tensor":
            entries[name] = next(values[_short(key)])
        elif kind == "column":
            entries[name] = make_non_tensor(next(columns[_short(key)]))
        elif kind == "object":
            entries[name] = next(columns[_short(key)])
        else:
            entries[name] = _build(kind, key, values, columns)
    if layout.cls is None:
        return TensorDict._new_unsafe(entries, batch_size=torch.Size(layout.batch_size))
    fields = next(columns[(*path, _FIELDS)]) if layout.values is None else dict(layout.values)
    return make_unchecked(layout.cls, entries, fields)


def _split(flat: torch.Tensor, shapes: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return views of the entries of a key."""
    if bool((shapes == shapes[:1]).all()):  # scalars and fixed shapes in one call
        return iter(flat.view(len(shapes), *shapes[0].tolist()).unbind(0))
    pieces = flat.split(shapes.prod(1).tolist())
    return iter(pieces if shapes.shape[1] == 1 else [p.view(s) for p, s in zip(pieces, shapes.tolist(), strict=True)])


def _short(key: tuple[str, ...]) -> NestedKey:
    return key[0] if len(key) == 1 else key


def _to_bytes(flat: torch.Tensor) -> np.ndarray:
    return flat.contiguous().view(torch.uint8).numpy()  # of any dtype: numpy has no bfloat16


def _restore(
    arrays: dict[NestedKey, tuple[torch.dtype, np.ndarray]], shapes: dict[NestedKey, np.ndarray], *rest: Any
) -> PackedRows:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensors = {key: torch.from_numpy(array).view(dtype) for key, (dtype, array) in arrays.items()}
        return PackedRows(tensors, {key: torch.from_numpy(shape) for key, shape in shapes.items()}, *rest)


_FIELDS = ""  # key of a tensorclass's non-tensor fields, which no entry can have


_VALUE, _CLASS = "non-tensor value", "tensorclass"
_CLASSES = {cls.__name__: cls for cls in (Tokens, Masks, LogProbs)}


def to_plain(row: TensorDictBase) -> dict[str, Any]:
    """Convert a row to nested dicts that mark non-tensor values and tensorclasses."""

    def plain(value):
        if is_non_tensor(value):
            return {_VALUE: value.tolist()}
        return to_plain(value) if is_tensor_collection(value) else value

    entries = {k: plain(v) for k, v in row.items()}
    name = type(row).__name__
    return {_CLASS: name, **entries} if name in _CLASSES else entries


def from_plain(row: dict[str, Any]) -> TensorDictBase:
    """Convert nested dicts from :func:`to_plain` to a row, tensorclasses included."""

    def entry(value):
        if isinstance(value, dict):
            return NonTensorData(value[_VALUE]) if _VALUE in value else from_plain(value)
        return value

    entries = {k: entry(v) for k, v in row.items() if k != _CLASS}
    return make_tensorclass(_CLASSES[row[_CLASS]], **entries) if _CLASS in row else TensorDict(entries, [])
