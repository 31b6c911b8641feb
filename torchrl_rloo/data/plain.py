"""Conversion of rows to nested dicts of tensors and plain values, as checkpoints need them, and back."""

from __future__ import annotations

from typing import Any

from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_rloo.data.rows import make_tensorclass

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
