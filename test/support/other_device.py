"""A device that computes on the CPU, but refuses tensors of the CPU as a GPU does.

PyTorch registers it as the device ``other`` of this process, for good. So tests use it in a separate process, and its
first use registers it, not the import.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "other"
_INDEXED = (
    "aten.index.Tensor",
    "aten.index_put.",
    "aten.index_put_.",
    "aten._index_put_impl_.",
)  # may mix, on GPUs too


class _Backend(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@cache
def register() -> None:
    """Register the device; required before the first backward pass of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Backend())


class OtherTensor(torch.Tensor):
    """Tensor that says it is on the other device, around one on the CPU."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OtherTensor:
        shape = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, held.size(), device=torch.device(NAME, 0), **shape)

    def __init__(self, held: torch.Tensor):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def held(x: Any) -> Any:
    """Return the tensor on the CPU inside one of the other device; anything else unchanged."""
    return x.held if isinstance(x, OtherTensor) else x


def _run(func, args: tuple, kwargs: dict[str, Any]):
    """Run an operation on the CPU, and wrap what it makes."""
    name, tensors = str(func), [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    wrapped = [x for x in tensors if isinstance(x, OtherTensor)]
    device = kwargs.get("device")
    if not wrapped and (device is None or torch.device(device).type != NAME):
        return func(*args, **kwargs)
    plain = kwargs if device is None else kwargs | {"device": torch.device("cpu")}
    # Copies are the only way from one device to the other
    if name == "aten._to_copy.default":
        target = tensors[0].device if device is None else torch.device(device)
        copy = func(held(args[0]), **plain)
        return OtherTensor(copy) if target.type == NAME else copy
    if name == "aten.copy_.default":
        held(args[0]).copy_(held(args[1]))
        return args[0]
    if wrapped and not name.startswith(_INDEXED):
        mixed = [tuple(x.shape) for x in tensors if not isinstance(x, OtherTensor) and x.ndim]
        if mixed:
            raise RuntimeError(f"{name} mixes devices: tensors of shapes {mixed} are on the CPU")
    result = func(*tree_map(held, args), **tree_map(held, plain))
    known = {id(x.held): x for x in wrapped}

    def wrap(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else OtherTensor(x)

    return tree_map(wrap, result)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that PyTorch runs below the dispatcher, on the device itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], OtherTensor):
            kwargs = {"dtype": args[0].dtype} | kwargs
            return torch.tensor(*args[1:], **kwargs).to(args[0].device)
        if func is torch.Tensor.tolist:
            return held(args[0].detach()).tolist()
        if func is torch.Tensor.__setitem__ and isinstance(args[0], OtherTensor) and not torch.is_tensor(args[2]):
            with torch._C.DisableTorchFunction():
                return args[0].held.__setitem__(tree_map(held, args[1]), args[2])
        return func(*args, **kwargs)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Make the other device usable within the context, and return it."""
    register()
    with _Functions(), _Dispatch():
        yield torch.device(NAME)
