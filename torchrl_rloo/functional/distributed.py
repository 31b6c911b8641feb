"""Sums and maxima over ranks."""

from __future__ import annotations

import torch
from torch import distributed


def reduce_over_ranks(
    value: torch.Tensor,
    process_group: distributed.ProcessGroup | None,
    op: distributed.ReduceOp = distributed.ReduceOp.SUM,
) -> torch.Tensor:
    """``value`` reduced over the ranks of a group, on the device it came from; as it is without a group.

    Args:
        value: any shape, the same on all ranks.
        process_group: the ranks; None for this one alone.
        op: how to reduce.
    """
    if process_group is None:
        return value
    device = "cuda" if "nccl" in distributed.get_backend(process_group) else "cpu"  # NCCL takes no CPU tensors
    reduced = value.to(device, copy=True)
    distributed.all_reduce(reduced, op, process_group)
    return reduced.to(value.device)
