"""Reductions over ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed


def reduce_over_ranks(
    value: torch.Tensor, process_group: distributed.ProcessGroup | None, op: str = "sum"
) -> torch.Tensor:
    """Reduce a tensor over the ranks of a group, on the device it came from; return it as it is without a group.

    Args:
        value: any shape, the same on all ranks.
        process_group: the ranks; None for this one.
        op: ``"sum"`` or ``"max"``.
    """
    if process_group is None:
        return value
    device = "cuda" if "nccl" in distributed.get_backend(process_group) else "cpu"  # NCCL takes no CPU tensors
    reduced = value.to(device, copy=True)
    distributed.all_reduce(reduced, getattr(distributed.ReduceOp, op.upper()), process_group)
    return reduced.to(value.device)


def mean_over_ranks(value: torch.Tensor, process_group: distributed.ProcessGroup | None) -> torch.Tensor:
    """Sum a tensor over the ranks and divide by their number, as DDP and FSDP do with gradients."""
    ranks = 1 if process_group is None else distributed.get_world_size(process_group)
    return reduce_over_ranks(value, process_group) / ranks


def reducer(process_group: distributed.ProcessGroup | None) -> Callable[[torch.Tensor, str], torch.Tensor]:
    """Return ``(value, op) -> value``, the reduction that pure functions take as an argument."""
    return lambda value, op: reduce_over_ranks(value, process_group, op)
