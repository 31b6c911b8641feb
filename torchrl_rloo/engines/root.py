"""Calls through the root of a model that DDP or FSDP wraps, so that their hooks run for any function of its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from torch.utils._pytree import tree_leaves  # as FSDP2 finds the tensors of an output

T = TypeVar("T")

_ENTERED: ContextVar[frozenset[int]] = ContextVar("entered_roots", default=frozenset())
_GATHERED: ContextVar[frozenset[int]] = ContextVar("gathered_roots", default=frozenset())
_REPLICA = "_data_parallel"


class _Replica:
    """Holder of a module's ``DistributedDataParallel``, which copies of the module do not share."""

    def __init__(self, wrapper: nn.parallel.DistributedDataParallel | None):
        self.wrapper = wrapper

    def __deepcopy__(self, memo: dict) -> _Replica:
        return _Replica(None)

    def __reduce__(self) -> tuple:
        return _Replica, (None,)


def adopt(model: nn.Module) -> nn.Module:
    """Return the module inside a ``DistributedDataParallel``, which :func:`call_root` then calls; others unchanged."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return model
    model.module.__dict__[_REPLICA] = _Replica(model)
    return model.module


def replica_of(module: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` that :func:`adopt` remembered for a module, or None."""
    holder = module.__dict__.get(_REPLICA)
    return None if holder is None else holder.wrapper


def is_fsdp(module: nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to this module."""
    if not distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def is_distributed(module: nn.Module) -> bool:
    """Return whether :func:`call_root` calls this module through hooks of DDP or FSDP."""
    return is_fsdp(module) or replica_of(module) is not None


def fsdp_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Return the dtypes to which FSDP casts the parameters of a module's parts for their passes."""
    policies = [part._get_fsdp_state()._mp_policy for part in module.modules() if is_fsdp(part)]
    return {policy.param_dtype for policy in policies} - {None}


def call_root(model: nn.Module, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return a function's result, called as the forward pass of the root that DDP or FSDP wraps.

    Scoring runs the decoder and the head separately, but FSDP gathers the root's parameters, and DDP prepares its
    reduction, only when the root is called. The root's ``forward`` is the function for this one call. Gradients flow
    through tensors that it returns, also in tuples, lists and dicts. Roots of neither kind simply call it.
    """
    sharded = is_fsdp(model)
    root = model if sharded else replica_of(model)
    # Without gradients DDP has nothing to reduce, but its forward may wait for ranks that do not score
    idle = not sharded and not torch.is_grad_enabled()
    if root is None or idle or id(model) in _ENTERED.get():
        return function(*args, **kwargs)
    # A pass without backward leaves the root's parameters gathered, and an optimizer step makes them stale
    frees = sharded and id(model) not in _GATHERED.get()
    if frees:
        model.reshard()
    reduces = not sharded and root.require_backward_grad_sync

    def forward() -> T:
        result = function(*args, **kwargs)
        # DDP would reduce in the next backward pass, even if that is another pass, which only accumulates
        if reduces and not _requires_grad(result):
            root.require_backward_grad_sync = False
        return result

    restore = _replaced_forward(model, forward)
    token = _ENTERED.set(_ENTERED.get() | {id(model)})
    try:
        result = root()
    finally:
        _ENTERED.reset(token)
        restore()
        if reduces:
            root.require_backward_grad_sync = True
    if frees and not _requires_grad(result):
        model.reshard()
    return result


def _requires_grad(result: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(result))


def _replaced_forward(model: nn.Module, forward: Callable[[], Any]) -> Callable[[], None]:
    """Replace a module's forward by a function that first restores it; return how to restore it."""
    previous = model.__dict__.get("forward")

    def restore() -> None:
        model.__dict__.pop("forward", None)
        if previous is not None:
            model.__dict__["forward"] = previous

    def run() -> Any:
        restore()
        return forward()

    model.__dict__["forward"] = run
    return restore


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Keep all parameters of a sharded model whole within the context, so that one rank can sample alone.

    All ranks must enter and leave together. Each rank holds the whole model. Other models are unchanged. The model is
    one that :func:`call_root` has called, or one that is not sharded.
    """
    units = [module for module in model.modules() if is_fsdp(module)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    token = _GATHERED.set(_GATHERED.get() | {id(model)})
    try:
        yield
    finally:
        _GATHERED.reset(token)
        for unit in units:
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()
            _forget_forward_passes(unit)


def _forget_forward_passes(unit: nn.Module) -> None:
    """Make FSDP forget passes that ran on one rank only.

    It prefetches in the backward pass in the recorded order of forward passes, which must be equal on all ranks. Torch
    2.13 has no public call for it.
    """
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    for group in groups:
        if group is not None:  # a unit may have no parameters
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()


def set_gradient_sync(module: nn.Module, enabled: bool) -> None:
    """Choose whether the next backward pass through the roots in ``module`` reduces gradients over ranks."""
    for part in module.modules():
        if is_fsdp(part):
            part.set_requires_gradient_sync(enabled, recurse=False)
        elif (replica := replica_of(part)) is not None:
            replica.require_backward_grad_sync = enabled
