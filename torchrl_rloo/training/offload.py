"""Activations that wait for the backward pass in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MIN_BYTES = 2**16  # smaller tensors stay: a transfer costs more than their memory


@contextmanager
def offload_activations(enabled: bool = True) -> Iterator[None]:
    """Keep tensors that autograd saves in CPU memory, from the forward to the backward pass.

    Gradients are bit for bit those without offload. Parameters stay where they are. With gradient checkpointing, only
    the inputs of layers are saved, and so moved. Transfers use pinned memory and run in order with the computation.

    Args:
        enabled: False leaves everything on the device.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(300, 300))
        >>> with offload_activations():
        ...     loss = (torch.ones(300, 300) @ weight).square().mean()
        >>> loss.backward()
    """
    if not enabled:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
    """Return the device of a tensor and its copy in CPU memory, or the tensor itself if that would save nothing."""
    owner = tensor if tensor._base is None else tensor._base  # the transposed weight of a linear layer is a view
    if isinstance(owner, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return tensor
    if tensor.nbytes < MIN_BYTES or tensor.nbytes > tensor.untyped_storage().nbytes():  # small, or expanded
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
