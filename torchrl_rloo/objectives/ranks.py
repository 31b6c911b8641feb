"""Reductions over ranks of a process group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed


def reduce_over_ranks(
    value: torch.Tensor, process_group: distributed.ProcessGroup | None, op: str = "sum"
) -> torch.Tensor:
    """Reduce a tensor over the ranks of a group, on the device of the tensor.

    Args:
        value: tensor of the same shape on all ranks.
        process_group: group of ranks. None returns ``value`` unchanged.
        op: ``"sum"`` or ``"max"``.

    Returns:
        Same shape as ``value``.
    """
    if process_group is None:
        return value
    device = "cuda" if "nccl" in distributed.get_backend(process_group) else "cpu"  # NCCL rejects CPU tensors
    reduced = value.to(device, copy=True)
    distributed.all_reduce(reduced, getattr(distributed.ReduceOp, op.upper()), process_group)
    return reduced.to(value.device)


def mean_over_ranks(value: torch.Tensor, process_group: distributed.ProcessGroup | None) -> torch.Tensor:
    """Return the mean of a tensor over the ranks, as DDP and FSDP do with gradients."""
    ranks = 1 if process_group is None else distributed.get_world_size(process_group)
    return reduce_over_ranks(value, process_group) / ranks


def make_reducer(process_group: distributed.ProcessGroup | None) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Return a function ``(value, op) -> value`` that reduces over ranks, as an argument of pure functions."""
    return lambda value, op: reduce_over_ranks(value, process_group, op)
